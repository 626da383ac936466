"""Load of other clients keeps jobs from a worker for a bounded time, even where the engine's count is wrong."""

import asyncio

import pytest

from inferry.dispatch.foreign_load import FOREIGN_HOLD_S, ForeignLoadBound
from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Load, WorkerView
from inferry.workers.openai_http.load_estimate import LoadEstimate
from inferry.workers.openai_http.metrics_parser import MetricsSnapshot
from support.builders import a_job, a_view
from support.loop_helpers import read, run
from support.scripted_worker import ScriptedWorker
from support.virtual_gateway import a_virtual_gateway
from support.virtual_time import LoopClock

SEQUENCES = 8


class CountingWorker(ScriptedWorker):
    """An engine that keeps counting `leaked` sequences which do not run any more."""

    def __init__(self, clock: LoopClock, leaked: int) -> None:
        super().__init__(clock=clock, capacity=Capacity(sequences=SEQUENCES), pause_s=0.1)
        self.clock = clock
        self.leaked = leaked
        self.estimate = LoadEstimate()
        self.most_running = 0

    def view(self) -> WorkerView:
        now, own = self.clock.now(), self.running
        self.most_running = max(self.most_running, own)
        snapshot = MetricsSnapshot(running=own + self.leaked, waiting=0)
        self.estimate.update(snapshot, own, now)
        return replace(super().view(), load=self.estimate.load(own, now), foreign=self.estimate.foreign(now))


@pytest.mark.parametrize("lane", Lane)
def test_jobs_end_although_the_engine_counts_aborted_calls_as_running(lane: Lane) -> None:
    async def scenario() -> None:
        worker = CountingWorker(LoopClock(), leaked=SEQUENCES)
        async with a_virtual_gateway(worker) as env:
            await env.until(lambda: env.pool.view(worker.name).foreign.running == SEQUENCES)
            started_at, worker.most_running = env.clock.now(), 0
            ends = await asyncio.gather(*(read(env.submit(job_id=f"{lane}-{n}", lane=lane)) for n in range(3)))
            assert all(isinstance(end, Done) for _, end in ends)
            assert worker.most_running == 1, "one at a time: the other clients may be real"
            # 0.3 s of work each, and a capacity interval for each change.
            assert 3 * FOREIGN_HOLD_S <= env.clock.now() - started_at <= 3 * (FOREIGN_HOLD_S + 0.3 + 0.2)

    run(scenario())


def test_foreign_load_that_leaves_space_changes_nothing() -> None:
    async def scenario() -> None:
        worker = CountingWorker(LoopClock(), leaked=SEQUENCES - 3)
        async with a_virtual_gateway(worker) as env:
            await env.until(lambda: env.pool.view(worker.name).foreign.running == SEQUENCES - 3)
            await asyncio.sleep(3 * FOREIGN_HOLD_S)
            started_at = env.clock.now()
            await asyncio.gather(*(read(env.submit(job_id=str(n))) for n in range(3)))
            assert env.clock.now() - started_at < 1.0
            assert max(len(plan.jobs) for plan in worker.plans) == 3

    run(scenario())


def a_bound() -> tuple[ForeignLoadBound, QueueDepth, dict[str, int]]:
    depth, in_flight = QueueDepth(), {"w": 0}
    return ForeignLoadBound(depth, lambda worker: in_flight[worker]), depth, in_flight


def test_only_waiting_jobs_start_the_time() -> None:
    bound, depth, in_flight = a_bound()
    view = a_view("w", sequences=4, foreign=Load(running=4))
    assert bound.bounded(view, 0.0) is view
    assert bound.refresh(100.0) == [], "nothing waits"
    depth.queued(Attempt(a_job()), 100.0)
    assert bound.refresh(100.0) == []
    assert bound.refresh(100.0 + FOREIGN_HOLD_S - 0.01) == []
    (opened,) = bound.refresh(100.0 + FOREIGN_HOLD_S)
    assert (opened.capacity.sequences, opened.foreign) == (1, Load())
    assert bound.bounded(view, 106.0).capacity.sequences == 1, "a new view of the worker keeps the space"
    in_flight["w"] = 1
    assert bound.refresh(106.0) == [view]
    in_flight["w"] = 0
    assert bound.refresh(107.0) == []
    assert len(bound.refresh(107.0 + FOREIGN_HOLD_S)) == 1


def test_a_worker_that_may_take_no_job_for_another_reason_takes_none() -> None:
    bound, depth, _ = a_bound()
    depth.queued(Attempt(a_job()), 0.0)
    limited = Capacity(sequences=0, kv_tokens=10, batch_sequences=0)
    bound.bounded(replace(a_view("w", foreign=Load(running=4)), capacity=limited), 0.0)
    (opened,) = bound.refresh(FOREIGN_HOLD_S)
    assert opened.capacity == Capacity(sequences=0, kv_tokens=10, batch_sequences=1)


def test_a_worker_without_a_limit_takes_one_job_as_well() -> None:
    bound, depth, _ = a_bound()
    depth.queued(Attempt(a_job()), 0.0)
    bound.bounded(replace(a_view("w", foreign=Load(kv_tokens=4)), capacity=Capacity(kv_tokens=4)), 0.0)
    (opened,) = bound.refresh(FOREIGN_HOLD_S)
    assert opened.capacity == Capacity(sequences=1, kv_tokens=4)


def test_without_foreign_load_the_view_is_unchanged() -> None:
    bound, depth, _ = a_bound()
    depth.queued(Attempt(a_job()), 0.0)
    bound.bounded(a_view("w", sequences=4, foreign=Load(running=4)), 0.0)
    bound.refresh(FOREIGN_HOLD_S)
    free = a_view("w", sequences=4)
    assert bound.bounded(free, FOREIGN_HOLD_S) is free
    assert bound.refresh(2 * FOREIGN_HOLD_S) == []
