"""The life of batches in virtual time, on a real database: deadlines, shares, failures, restarts."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from durable.batch_bench import OK, Bench, Engine
from inferry.domain.errors import Conflict, LedgerUnavailable, StorageQuotaExceeded
from inferry.domain.ledger import Outcome
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry
from support.virtual_time import CreepingLoop, run_virtual


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(work: Callable[[Bench], Awaitable[None]], engine: Engine | None = None, **limits: Any) -> None:
        async def scenario() -> None:
            async with Bench(tmp_path / "db", engine or Engine(), **limits) as bench:
                await work(bench)

        run_virtual(scenario())

    return run


def test_no_more_items_are_in_flight_than_allowed_and_tenants_share_them(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batches = [await bench.create(40, "a"), await bench.create(40, "a"), await bench.create(40, "b")]
        await asyncio.sleep(5.5)
        assert sum(bench.engine.in_flight.values()) <= 8
        assert bench.engine.in_flight["b"] == 4
        assert bench.engine.in_flight["a"] == 4
        for batch in batches:
            assert (await bench.ended(batch)).completed == 40

    run(work, batch_concurrency=8)


def test_every_batch_has_at_least_one_item_in_flight(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batches = [await bench.create(3, f"t{number}") for number in range(5)]
        await asyncio.sleep(1.5)  # the first batch had the others' share until they began
        assert bench.engine.in_flight == Counter({f"t{number}": 1 for number in range(5)})
        for batch in batches:
            await bench.ended(batch)

    run(work, batch_concurrency=2)


def test_a_batch_that_takes_too_long_expires_with_what_is_done(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batch = await bench.ended(await bench.create(10, window_s=3.5))
        assert batch.status == "expired"
        assert (batch.completed, batch.failed) == (6, 4)
        assert bench.engine.in_flight["acme"] == 0
        types = [line["result"]["type"] for line in await bench.lines(batch)]
        assert types == ["succeeded"] * 6 + ["expired"] * 4

    run(work, batch_concurrency=2)


def test_items_carry_the_identity_of_the_batch(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batch = await bench.ended(await bench.create(2))
        first = bench.engine.calls[0]
        assert first == StoredCall(
            tenant="acme",
            key_id="k",
            path="/v1/x",
            body=b'{"n":1}',
            job_id=f"{batch.id}-1-0",
            run_id=batch.id,
            step_id="item-1",
            lane="P2",
        )
        assert bench.ledger_writes > 0, "the ledger is written before results"

    run(work)


def test_a_failing_item_is_tried_again_and_given_up(run: Callable[..., None]) -> None:
    def answer(call: StoredCall) -> CallAnswer:
        return CallAnswer(status=502, body=b'{"error":{}}') if call.body == b'{"n":1}' else OK

    async def work(bench: Bench) -> None:
        bench.engine.answer = answer
        batch = await bench.ended(await bench.create(2))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
        tried = [call.job_id for call in bench.engine.calls if call.body == b'{"n":1}']
        assert tried == [f"{batch.id}-1-{number}" for number in range(5)]

    run(work)


def test_a_timer_that_fires_early_does_not_leave_a_refused_item_waiting(tmp_path: Path) -> None:
    refusals = [CallAnswer(status=429, body=b"", retry_after_s=1.0)] * 100
    engine = Engine()
    engine.answer = lambda _: refusals.pop() if refusals else OK

    async def scenario() -> None:
        async with Bench(tmp_path / "db", engine) as bench:
            batch = await bench.ended(await bench.create(1))
            assert (batch.status, batch.completed) == ("completed", 1)

    with asyncio.Runner(loop_factory=CreepingLoop) as runner:
        runner.run(asyncio.wait_for(scenario(), 1000))
    assert len(engine.calls) == 101


def test_a_process_that_stops_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    engine = Engine()

    async def scenario() -> None:
        async with Bench(tmp_path / "db", engine, batch_concurrency=4) as bench:
            batch = await bench.create(20)
            await asyncio.sleep(2.5)
            assert engine.ended == 8
        assert engine.in_flight["acme"] == 0
        async with Bench(tmp_path / "db", engine, batch_concurrency=4) as bench:
            ended = await bench.ended(batch)
            assert (ended.status, ended.completed) == ("completed", 20)
        numbers = Counter(call.job_id for call in engine.calls)
        repeated = {job_id for job_id, count in numbers.items() if count > 1}
        assert repeated == {f"{batch.id}-{number}-0" for number in range(9, 13)}, "only items without a result"

    run_virtual(scenario())


def test_a_try_that_a_killed_process_charged_is_not_charged_under_another_job_id(tmp_path: Path) -> None:
    """The next process is refused and fails before it succeeds: every try has the job id that the ledger has."""
    url = f"sqlite:///{tmp_path / 'db'}"
    engine = Engine(delay_s=1000.0)
    answers = [
        CallAnswer(status=503, body=b"{}", retry_after_s=1.0),
        CallAnswer(status=502, body=b"{}"),
        OK,
    ]

    async def scenario() -> None:
        async with Bench(tmp_path / "db", engine) as bench:
            batch = await bench.create(2)
            await asyncio.sleep(1)
        with closing(AttemptStore(url)) as ledger:
            ledger.append([an_entry(f"{batch.id}-1-0", outcome=Outcome.DONE)])
        engine.calls.clear()
        engine.delay_s = 0.1
        engine.answer = lambda call: answers.pop(0) if call.step_id == "item-1" else OK
        async with Bench(tmp_path / "db", engine) as bench:
            assert (await bench.ended(batch)).completed == 2
        assert [call.job_id for call in engine.calls if call.step_id == "item-1"] == [f"{batch.id}-1-0"] * 3

    run_virtual(scenario())


def test_a_database_that_fails_delays_results_and_loses_none(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        record, failures = bench.store.record, [LedgerUnavailable("away")] * 5

        def failing(records: Any) -> None:
            if failures:
                raise failures.pop()
            record(records)

        bench.store.record = failing  # type: ignore[method-assign]
        batch = await bench.ended(await bench.create(10))
        assert (batch.completed, len(bench.engine.calls)) == (10, 10)

    run(work)


def test_batches_are_continued_although_the_first_reads_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = Engine()
        async with Bench(tmp_path / "db", engine) as bench:
            batch = await bench.create(3)
        later = Bench(tmp_path / "db", engine)
        unfinished, failures = later.store.unfinished, [LedgerUnavailable("away")] * 3

        def failing() -> list[str]:
            if failures:
                raise failures.pop()
            return unfinished()

        monkeypatch.setattr(later.store, "unfinished", failing)
        async with later, asyncio.timeout(3600):
            assert (await later.ended(batch)).completed == 3

    run_virtual(scenario())


def test_a_step_that_fails_is_repeated(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        finish, failures = bench.store.finish, [LedgerUnavailable("away")] * 3

        def failing(*args: Any) -> None:
            if failures:
                raise failures.pop()
            finish(*args)

        bench.store.finish = failing  # type: ignore[method-assign, assignment]
        batch = await bench.ended(await bench.create(3))
        assert (batch.status, len(bench.engine.calls)) == ("completed", 3)

    run(work)


def test_a_cancelled_batch_stops_at_once(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batch = await bench.create(100)
        await asyncio.sleep(1.5)
        await bench.batches.cancel("acme", "anthropic", batch.id)
        await asyncio.sleep(0.01)
        assert bench.engine.in_flight["acme"] == 0
        ended = await bench.ended(batch)
        assert (ended.status, ended.completed, ended.failed) == ("cancelled", 8, 92)
        assert bench.runner.ended == {"cancelled": 1}
        with pytest.raises(Conflict):
            await bench.batches.cancel("acme", "anthropic", (await bench.ended(await bench.create(1))).id)

    run(work, batch_concurrency=8)


def test_a_batch_whose_run_was_cancelled_is_cancelled(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        bench.engine.answer = lambda call: CallAnswer(status=409, body=b"{}", code="run_cancelled")
        ended = await bench.ended(await bench.create(5))
        assert (ended.status, ended.failed) == ("cancelled", 5)

    run(work)


def test_a_batch_expires_some_time_after_its_end_and_is_swept(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batch = await bench.ended(await bench.create(5))
        now = bench.clock.wall()
        assert bench.store.get("acme", "anthropic", batch.id, now + 1001) is None
        assert bench.store.sweep(now, 100) == 0
        while bench.store.sweep(now + 1001, 2):
            pass
        assert bench.store.load(batch.id) is None
        assert bench.file_store.used_bytes("acme") == 0

    run(work)


def test_items_of_a_batch_with_files_are_swept_and_the_batch_stays(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {}}
        batch = await bench.ended(await bench.create_from_file(json.dumps(line).encode()))
        while bench.store.sweep(bench.clock.wall(), 1):
            pass
        assert not bench.store.outcomes(batch.id, 0, 1000)
        found = await bench.batches.get("acme", "openai", batch.id)
        assert (found.status, found.size, found.output_file) == ("completed", 0, batch.output_file)

    run(work)


def test_a_line_may_be_so_long_and_no_longer(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        batch = await bench.ended(await bench.create_from_file(b"x" * 2000))
        assert [error.code for error in batch.detail.errors] == ["line_too_long"]

    run(work)


def test_batches_count_towards_the_quota(run: Callable[..., None]) -> None:
    async def work(bench: Bench) -> None:
        await bench.ended(await bench.create(5))
        with pytest.raises(StorageQuotaExceeded):
            await bench.create(20)

    run(work, max_bytes_per_tenant=400)
