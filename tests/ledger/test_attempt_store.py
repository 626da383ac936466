"""Attempts in the ledger, in SQLite and in PostgreSQL: complete and idempotent."""

import threading
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ledger.schema import attempts
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from ledger.builders import an_entry, entries


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[AttemptStore]:
    with closing(AttemptStore(ledger_url)) as ledger:
        yield ledger


def everything_in(url: str) -> list[LedgerEntry]:
    with open_queries(url) as queries:
        return sorted(queries.jobs(limit=1_000_000), key=lambda entry: (entry.job_id, entry.attempt))


FULL = an_entry(
    "full",
    attempt=3,
    outcome=Outcome.FAILED,
    ended_at=1_700_000_000.125,
    prompt_tokens=1000,
    cached_tokens=600,
    output_tokens=77,
    gpu_seconds=0.25,
    queue_ms=12.5,
    first_token_ms=80.25,
    total_ms=900.5,
    batch_size=8,
    release_reason="window",
    worker="gpu-a",
    parent_run="run-0",
    finish="stop",
    error_code="worker_lost",
    request_id="req-1",
)


def test_the_table_holds_every_field_of_an_entry() -> None:
    assert tuple(column.name for column in attempts.columns) == LedgerEntry.__struct_fields__


def test_an_entry_comes_back_as_it_went_in(ledger: AttemptStore, ledger_url: str) -> None:
    bare = an_entry("bare")
    ledger.append([FULL, bare])
    assert everything_in(ledger_url) == [bare, FULL]


def test_appending_the_same_attempt_twice_changes_nothing(ledger: AttemptStore, ledger_url: str) -> None:
    first = an_entry(1, output_tokens=5, outcome=Outcome.FAILED)
    again = msgspec.structs.replace(first, output_tokens=999)
    retried = msgspec.structs.replace(first, attempt=2, outcome=Outcome.DONE)
    ledger.append([first])
    ledger.append([again, retried])
    ledger.append([retried])
    assert everything_in(ledger_url) == [first, retried]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_repeated_work_is_charged_where_the_process_before_has_left_rows_of_attempts_without_a_result(
    ledger: AttemptStore, ledger_url: str, outcome: Outcome
) -> None:
    left = [an_entry("job-0", attempt=number, outcome=outcome) for number in (1, 2)]
    ledger.append(left)
    done = an_entry("job-0", attempt=1, output_tokens=5)
    for _ in range(2):  # a write whose acknowledgement was lost is repeated
        ledger.append([done, an_entry("other")])
    assert everything_in(ledger_url) == [
        *left,
        msgspec.structs.replace(done, attempt=3),
        an_entry("other"),
    ]


def test_of_two_results_of_the_same_work_the_first_is_charged(ledger: AttemptStore, ledger_url: str) -> None:
    lost, late = an_entry("job-0", attempt=1, outcome=Outcome.FAILED), an_entry("job-0", attempt=2, output_tokens=9)
    done = an_entry("job-0", attempt=1, output_tokens=5)
    ledger.append([done])
    ledger.append([lost])
    ledger.append([late])
    ledger.append([lost, late])
    assert everything_in(ledger_url) == [done]


def test_a_later_result_of_repeated_work_is_not_charged_again(ledger: AttemptStore, ledger_url: str) -> None:
    lost, late = an_entry("job-0", attempt=1, outcome=Outcome.FAILED), an_entry("job-0", attempt=2, output_tokens=9)
    ledger.append([lost, late])
    ledger.append([an_entry("job-0", attempt=1, output_tokens=5)])
    assert everything_in(ledger_url) == [lost, late]


def test_nothing_of_a_batch_is_kept_when_one_entry_cannot_be(ledger: AttemptStore, ledger_url: str) -> None:
    for hopeless in (
        an_entry("surrogate", run_id="\ud800"),
        an_entry("huge", prompt_tokens=2**70),
        an_entry("no-run", run_id=None),
        an_entry("not-a-time", ended_at=float("nan")),
    ):
        with pytest.raises((ValueError, OverflowError)):
            ledger.append([an_entry("good"), hopeless])
    assert everything_in(ledger_url) == []
    ledger.append([an_entry("good")])
    assert everything_in(ledger_url) == [an_entry("good")]


def test_an_empty_batch_is_fine(ledger: AttemptStore, ledger_url: str) -> None:
    ledger.append([])
    assert everything_in(ledger_url) == []


def test_a_ledger_goes_on_where_it_stopped(ledger_url: str) -> None:
    for number in range(3):
        with closing(AttemptStore(ledger_url)) as ledger:
            ledger.append([an_entry(number)])
    assert everything_in(ledger_url) == entries(3)


def test_closing_twice_is_fine(ledger_url: str) -> None:
    ledger = AttemptStore(ledger_url)
    ledger.close()
    ledger.close()


def test_several_may_open_a_new_ledger_at_once(ledger_url: str) -> None:
    start = threading.Barrier(8)
    faults: list[BaseException] = []

    def open_and_write(number: int) -> None:
        start.wait(20)
        try:
            with closing(AttemptStore(ledger_url)) as ledger:
                ledger.append([an_entry(number)])
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=open_and_write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
    assert everything_in(ledger_url) == entries(8)
