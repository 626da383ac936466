"""The dispatch loop: every admitted job ends exactly once, whatever its worker does."""

import asyncio
from typing import Any

import pytest

from dispatch.loop_harness import House, a_house, a_house_of
from inferry.domain.errors import (
    ClientClosed,
    Draining,
    NoWorker,
    QueueFull,
    QueueTimeout,
    WorkerLost,
)
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase
from support.loop_helpers import read, run, run_pending
from support.scripted_worker import ScriptedWorker


class OneTurnWorker(ScriptedWorker):
    """Writes a token, and the end: in the same callback where the answer is whole."""

    def __init__(self, *, is_whole: bool) -> None:
        super().__init__()
        self._is_whole = is_whole

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        for job in plan.jobs:
            emit(Delta(job.job_id, job.run_id, job.step_id, 0, "one", (1,), 1, b"", self._is_whole))
            if not self._is_whole:
                for _ in range(5):
                    await asyncio.sleep(0)
            emit(Done(job.job_id, FinishReason.STOP, Usage(1, 0, 1)))


def ticks(house: House) -> int:
    return sum(house.metrics.ticks._jobs.counts)


def test_a_job_streams_its_words_and_one_ledger_row_accounts_for_it() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            deltas, end = await read(house.gateway.submit(house.job(lane=Lane.P0)))
            assert "".join(delta.text for delta in deltas) == "one two three"
            assert isinstance(end, Done)
            (row,) = house.entries()
            assert (row.outcome, row.lane, row.output_tokens, row.worker) == (Outcome.DONE, "P0", 3, "scripted")
            assert row.queue_ms is not None
            assert row.first_token_ms is not None
            assert 0 <= row.queue_ms <= row.first_token_ms <= row.total_ms

    run(scenario())


def test_jobs_of_one_burst_are_planned_together() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            streams = [house.gateway.submit(house.job()) for _ in range(5)]
            await asyncio.gather(*map(read, streams))
            assert [len(plan.jobs) for plan in house.worker.plans] == [5]

    run(scenario())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reader_that_sends_with_others_of_its_turn_sends_before_the_tick_that_follows(is_whole: bool) -> None:
    async def scenario() -> None:
        loop, sent_after = asyncio.get_running_loop(), []
        worker = OneTurnWorker(is_whole=is_whole)
        async with a_house_of(worker) as house:
            before = ticks(house)
            stream = house.gateway.submit(house.job(stream=not is_whole))

            def sent() -> None:
                sent_after.append(ticks(house) - before)

            def wake() -> None:
                loop.call_soon(sent)

            stream.listen(wake)
            for _ in range(50):
                await asyncio.sleep(0)
            assert sent_after[0] == 1, "the tick that has planned the job"
            assert ticks(house) - before == (2 if is_whole else 3), "offer, first token of a stream, end"

    run(scenario())


def test_a_worker_that_dies_fails_its_jobs_and_no_others() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            house.worker.dies_after = 1
            deltas, end = await read(house.gateway.submit(house.job(stream=True)))
            assert [delta.text for delta in deltas] == ["one"]
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerLost)
            house.worker.dies_after = None
            while not house.gateway.is_ready:
                await asyncio.sleep(0.01)  # it has to generate once more before it is trusted
            _, end = await read(house.gateway.submit(house.job()))
            assert isinstance(end, Done)
            assert [row.output_tokens for row in house.entries()] == [1, 3]

    run(scenario())


def test_a_worker_that_returns_early_leaves_no_job_without_an_end() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            house.worker.returns_early = True
            ends = await asyncio.gather(*(read(house.gateway.submit(house.job())) for _ in range(3)))
            assert all(isinstance(end, Failed) and isinstance(end.error, WorkerLost) for _, end in ends)

    run(scenario())


def test_a_skipped_delta_index_fails_the_job(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with a_house() as house:

            async def mixed_up(plan: Any, emit: Any) -> None:
                job = plan.jobs[0]
                emit(Delta(job.job_id, job.run_id, job.step_id, 1, "late", (1,), 1))

            house.worker.run = mixed_up  # type: ignore[method-assign]
            _, end = await read(house.gateway.submit(house.job()))
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerLost)

    run(scenario())
    assert "broke its contract" in caplog.text


def test_a_delta_of_another_run_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with a_house() as house:

            async def cross_talk(plan: Any, emit: Any) -> None:
                job = plan.jobs[0]
                emit(Delta(job.job_id, "another-run", job.step_id, 0, "secret", (1,), 1))

            house.worker.run = cross_talk  # type: ignore[method-assign]
            deltas, end = await read(house.gateway.submit(house.job()))
            assert deltas == []
            assert isinstance(end, Failed)

    run(scenario())


def test_a_queued_job_is_cancelled_without_reaching_a_worker() -> None:
    async def scenario() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            first = house.gateway.submit(house.job())
            queued = house.gateway.submit(house.job(job_id="queued"))
            await run_pending()
            house.gateway.cancel("queued")
            _, end = await read(queued)
            assert isinstance(end, Failed)
            assert isinstance(end.error, ClientClosed)
            house.worker.gate.set()
            await read(first)
            assert [job.job_id for plan in house.worker.plans for job in plan.jobs] == [first.attempt.job.job_id]
            assert [row.outcome for row in house.entries()] == [Outcome.CANCELLED, Outcome.DONE]

    run(scenario())


def test_a_running_job_is_cancelled_at_its_worker_and_frees_its_capacity() -> None:
    async def scenario() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            running = house.gateway.submit(house.job(job_id="running"))
            behind = house.gateway.submit(house.job())
            await run_pending()
            house.gateway.cancel("running")
            _, end = await read(running)
            assert isinstance(end, Failed)
            await run_pending()
            assert house.worker.cancelled == ["running"]
            house.worker.gate.set()
            _, end = await read(behind)
            assert isinstance(end, Done)

    run(scenario())


def test_a_job_whose_deadline_passes_in_the_queue_times_out() -> None:
    async def scenario() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            first = house.gateway.submit(house.job())
            late = house.gateway.submit(replace(house.job(), deadline=house.clock.now() + 0.02))
            _, end = await read(late)
            assert isinstance(end, Failed)
            assert isinstance(end.error, QueueTimeout)
            house.worker.gate.set()
            await read(first)

    run(scenario())


def test_a_full_lane_refuses_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        lanes = {lane: replace(policy, queue_limit=2) for lane, policy in DEFAULT_LANES.items()}
        async with a_house(lanes, capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            streams = [house.gateway.submit(house.job())]
            await run_pending()
            streams += [house.gateway.submit(house.job()) for _ in range(2)]
            with pytest.raises(QueueFull):
                house.gateway.submit(house.job())
            house.worker.gate.set()
            for stream in streams:
                assert isinstance((await read(stream))[1], Done)

    run(scenario())


def test_no_job_is_taken_for_a_model_whose_workers_are_drained() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            house.pool.drain("scripted")
            while house.gateway.is_ready:
                await asyncio.sleep(0)
            with pytest.raises(NoWorker, match=f"every worker of model `{house.job().route.model}` is drained"):
                house.gateway.submit(house.job())

    run(scenario())


def test_a_held_job_is_queued_although_retries_have_filled_its_lane_meanwhile() -> None:
    async def scenario() -> None:
        lanes = {**DEFAULT_LANES, Lane.P1: replace(DEFAULT_LANES[Lane.P1], queue_limit=1)}
        async with a_house(lanes, capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            first = house.gateway.submit(house.job())
            await run_pending()
            loop = house.gateway._loop
            held = house.job()
            stream = loop.submit(held, batch=1)
            house.worker.dies_after, house.worker.phase = 0, Phase.DOWN
            house.worker.gate.set()
            await asyncio.sleep(1.0)
            assert first.attempt.job.attempt == 2, "the lost job waits for its worker"
            assert first.attempt.sent_at is None
            loop.reoffer(held.job_id)
            house.worker.dies_after, house.worker.phase = None, Phase.READY
            for one in (first, stream):
                assert isinstance((await read(one))[1], Done)

    run(scenario())


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def scenario() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            streams = [house.gateway.submit(house.job()) for _ in range(3)]
            await run_pending()
            draining = asyncio.create_task(house.gateway.drain())
            await run_pending()
            assert not house.gateway.is_ready
            with pytest.raises(Draining):
                house.gateway.submit(house.job())
            house.worker.gate.set()
            await draining
            for stream in streams:
                assert isinstance((await read(stream))[1], Done)

    run(scenario())


def test_jobs_that_outlast_the_drain_timeout_end_with_an_error() -> None:
    async def scenario() -> None:
        async with a_house(capacity=Capacity(sequences=1)) as house:
            house.worker.gate.clear()
            running, queued = (house.gateway.submit(house.job()) for _ in range(2))
            await run_pending()
            house.gateway.abandon()
            for stream in (running, queued):
                _, end = await read(stream)
                assert isinstance(end, Failed)
                assert isinstance(end.error, Draining)

    run(scenario())


@pytest.mark.parametrize(("streams", "outcome"), [(True, Outcome.CANCELLED), (False, Outcome.FAILED)])
@pytest.mark.parametrize("immediately", [False, True])
def test_a_stream_that_a_drain_ends_counts_as_cancelled_with_what_was_delivered(
    streams: bool, outcome: Outcome, immediately: bool
) -> None:
    async def scenario() -> None:
        async with a_house(pause_s=1.0) as house:
            stream = house.gateway.submit(house.job(stream=streams))
            delta, _ = await stream.take()
            assert delta is not None
            house.gateway.abandon(immediately=immediately)
            await read(stream)
            (row,) = house.entries()
            assert (row.outcome, row.error_code, row.output_tokens) == (outcome, "draining", 1)

    run(scenario())


@pytest.mark.parametrize(("seconds", "attained"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("words", [0, 1])
def test_a_call_that_its_client_gives_up_has_missed_its_target_if_its_next_token_was_due(
    seconds: float, attained: bool, words: int
) -> None:
    targets = {Lane.P1: replace(DEFAULT_LANES[Lane.P1], ttft_ms=1000, itl_ms=5000)}

    async def scenario() -> None:
        async with a_house(lanes=targets, pause_s=1000.0) as house:
            if not words:
                house.worker.gate.clear()
            house.gateway.submit(house.job(job_id="left"))
            await asyncio.sleep(seconds + 5 * words)
            house.gateway.cancel("left")
            await run_pending()
            (row,) = house.entries()
            assert (row.outcome, row.output_tokens, row.attained) == (Outcome.CANCELLED, words, attained)

    run(scenario())


@pytest.mark.parametrize(("sequences", "rounds"), [(8, 100), (64, 1)])
def test_a_fixed_window_holds_closed_loop_clients_only_until_they_fill_a_worker(sequences: int, rounds: int) -> None:
    lanes = {Lane.P1: replace(DEFAULT_LANES[Lane.P1], window="fixed", coalesce_ms=3000, max_wait_ms=3000)}

    async def scenario() -> None:
        async with a_house(lanes=lanes, capacity=Capacity(sequences=sequences)) as house:

            async def client() -> None:
                for _ in range(rounds):
                    await read(house.gateway.submit(house.job()))

            began = house.clock.now()
            await asyncio.gather(*(client() for _ in range(24)))
            took = house.clock.now() - began
            if sequences < 24:
                assert took < 3.5, "only the clients that are left at the end do not fill a batch"
            else:
                assert took >= 3.0

    run(scenario())


def test_a_slow_reader_gets_merged_deltas_and_delays_no_other_stream() -> None:
    async def scenario() -> None:
        async with a_house(words=[f"{i} " for i in range(50)]) as house:
            slow = house.gateway.submit(house.job(output=50))
            quick = house.gateway.submit(house.job(output=50))
            deltas, _ = await read(quick)
            assert len(deltas) > 10
            merged, end = await read(slow)
            assert isinstance(end, Done)
            assert len(merged) == 1
            assert merged[0].text == "".join(f"{i} " for i in range(50))
            assert merged[0].tokens == 50

    run(scenario())
