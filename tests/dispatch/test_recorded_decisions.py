"""Decision records on the way from the scheduler to the ledger and the metrics."""

import asyncio

import pytest

from dispatch.loop_harness import a_house
from inferry.domain.decisions import Decision, from_text
from inferry.domain.errors import ClientClosed
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.workers import Capacity
from support.loop_helpers import read, run, run_pending


def recorded(entry: LedgerEntry) -> Decision:
    decision = from_text(entry.decision)
    assert decision is not None
    return decision


def test_the_ledger_has_the_limit_that_kept_a_job_waiting() -> None:
    async def work() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            first = house.gateway.submit(house.job(job_id="first"))
            await run_pending()
            second = house.gateway.submit(house.job(job_id="second"))
            await asyncio.sleep(2.0)
            house.worker.gate.set()
            await asyncio.gather(read(first), read(second))
            entries = {entry.job_id: entry for entry in house.entries()}
            page = house.metrics.render()[0].decode()
        assert recorded(entries["first"]) == Decision(picked_by="least_loaded", candidates=1)
        waited = recorded(entries["second"])
        assert (waited.limit, waited.limit_worker, waited.picked_by) == ("sequences", "scripted", "least_loaded")
        assert waited.waits is not None
        assert sum(waited.waits.values()) == pytest.approx(2.0, abs=0.01)
        assert (entries["first"].batching_ms, entries["second"].batching_ms) == (0.0, 0.0)
        assert 'inferry_binding_limit_total{worker="scripted",limit="sequences"} 1' in page
        assert 'inferry_batching_wait_seconds_count{lane="P1",model="m"} 0' in page

    run(work())


def test_the_ledger_has_the_time_that_a_job_was_held() -> None:
    async def work() -> None:
        fixed = LanePolicy(max_wait_ms=1000, coalesce_ms=200, window="fixed")
        async with a_house({**DEFAULT_LANES, Lane.P1: fixed}) as house:
            await read(house.gateway.submit(house.job(job_id="held")))
            (entry,) = [one for one in house.entries() if one.job_id == "held"]
            page = house.metrics.render()[0].decode()
        assert entry.batching_ms == pytest.approx(200.0, abs=1.0)
        assert entry.queue_ms == pytest.approx(entry.batching_ms, abs=1.0)
        assert recorded(entry).held_by == "window"
        assert 'inferry_batching_wait_seconds_count{lane="P1",model="m"} 1' in page

    run(work())


def test_a_job_cancelled_or_expired_in_the_queue_has_the_record_of_its_wait() -> None:
    async def work() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            first = house.gateway.submit(house.job(job_id="first"))
            await run_pending()
            now = house.clock.now()
            cancelled = house.gateway.submit(house.job(job_id="cancelled"))
            expired = house.gateway.submit(house.job(job_id="expired", deadline=now + 3.0))
            await asyncio.sleep(1.0)
            house.gateway.cancel("cancelled", ClientClosed("gone"))
            await asyncio.sleep(3.0)
            house.worker.gate.set()
            await asyncio.gather(*map(read, (first, cancelled, expired)))
            entries = {entry.job_id: entry for entry in house.entries()}
        for job_id, waited_s in (("cancelled", 1.0), ("expired", 3.0)):
            record = recorded(entries[job_id])
            assert (record.picked_by, record.limit) == (None, "sequences")
            assert record.waits is not None
            assert record.waits["sequences"] == pytest.approx(waited_s, abs=0.01)

    run(work())
