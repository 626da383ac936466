"""Results of stored work: written in batches, and one that cannot be stored does not hold up the others."""

import asyncio
from itertools import chain

import pytest

from inferry.domain.errors import InvalidRequest
from inferry.durable.executor import StoreExecutor
from inferry.durable.result_recorder import ResultRecorder


class Store:
    """Cannot hold NUL; is away as many times as `failures` says."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.batches: list[list[str]] = []

    def record(self, records: list[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the database is away")
        if any("\0" in record for record in records):
            raise InvalidRequest("a character cannot be stored")
        self.batches.append(records)


async def record_all(store: Store, *records: str) -> list[BaseException | None]:
    executor = StoreExecutor()
    recorder = ResultRecorder(store, executor, lambda: None)
    try:
        return await asyncio.gather(*map(recorder.record, records), return_exceptions=True)
    finally:
        await recorder.close()
        await executor.close()


def test_what_can_never_be_stored_is_left_out_and_its_caller_is_told() -> None:
    store = Store()
    a, wrong, b = asyncio.run(record_all(store, "a", "\0", "b"))
    assert (a, b) == (None, None)
    assert isinstance(wrong, InvalidRequest)
    assert sorted(chain(*store.batches)) == ["a", "b"]


def test_a_database_that_is_away_delays_results(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(failures=2)
    assert asyncio.run(record_all(store, "a", "b")) == [None, None]
    assert sorted(chain(*store.batches)) == ["a", "b"]
    assert "retry in" in caplog.text
