"""Wait predictions in the dispatch loop, and refusals on arrival."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.domain.clock import ManualClock
from inferry.domain.errors import DeadlineInfeasible, QueueFull
from inferry.domain.jobs import Estimate, InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.scripted_worker import ScriptedWorker


class NoLedger:
    def append(self, entries: Sequence[LedgerEntry]) -> None:
        pass

    def append_composed(self, rows: Sequence[ComposedRow]) -> None:
        pass

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        pass

    def close(self) -> None:
        pass


class OneAtATime:
    """A gateway whose worker runs one job at a time and is done with it when told to. Another model has its own."""

    def __init__(self, lanes: Any = DEFAULT_LANES) -> None:
        self.clock = ManualClock(100.0)
        self.worker = ScriptedWorker(words=("done",), capacity=Capacity(sequences=1), clock=self.clock)
        self.worker.gate.clear()
        other = ScriptedWorker("other", models=("other",), clock=self.clock)
        self.gateway = make_gateway(
            lanes=lanes,
            pool=Pool([self.worker, other], self.clock),
            recorder=Recorder(NoLedger()),
            metrics=Metrics(["m", "other"], [self.worker.name, other.name]),
            clock=self.clock,
        )

    def submit(self, deadline_in_s: float | None = None, **fields: Any) -> JobStream:
        now = self.clock.now()
        deadline = None if deadline_in_s is None else now + deadline_in_s
        return self.gateway.submit(a_job(at=now, deadline=deadline, lane=Lane.P0, **fields))

    async def one_goes(self, after_s: float = 1.0) -> None:
        """The job that runs ends, and the next one starts."""
        self.clock.advance(after_s)
        self.worker.gate.set()
        self.worker.gate.clear()
        await run_pending()

    async def measured(self, backlog: int = 20, ends: int = 60) -> None:
        """A backlog goes at one job a second, and is kept up meanwhile."""
        for _ in range(backlog + 1):
            self.submit()
        await run_pending()
        for _ in range(ends):
            await self.one_goes()
            self.submit()
        await run_pending()


@asynccontextmanager
async def one_at_a_time(lanes: Any = DEFAULT_LANES) -> AsyncIterator[OneAtATime]:
    house = OneAtATime(lanes)
    house.gateway.start()
    while not house.gateway.is_ready:
        await asyncio.sleep(0)
    try:
        yield house
    finally:
        await house.gateway.close()


async def run_pending(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def limited(jobs: int) -> Any:
    return {lane: replace(policy, queue_limit=jobs, high_watermark=1.0) for lane, policy in DEFAULT_LANES.items()}


def test_a_job_gets_a_wait_prediction() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            await house.measured(backlog=20)
            predicted = house.submit().attempt.predicted
            assert predicted is not None
            assert predicted.p50_s == pytest.approx(21, rel=0.25)
            assert predicted.p50_s <= predicted.p90_s < 45

    run(scenario())


def test_a_job_that_would_expire_in_the_queue_is_refused_on_arrival() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            await house.measured(backlog=20)
            with pytest.raises(DeadlineInfeasible) as refused:
                house.submit(deadline_in_s=5.0)
            error = refused.value
            assert error.status == 408
            assert error.predicted_wait_s == pytest.approx(21, rel=0.25)
            # The queue is kept up at its length, so it will not be much shorter before long; but there is an end to it.
            assert error.retry_after_s is not None
            assert 10 <= error.retry_after_s <= 120
            assert b'inferry_errors_total{code="deadline_infeasible"} 1' in house.gateway._metrics.render()[0]

    run(scenario())


def test_a_queue_of_another_models_worker_refuses_no_deadline() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            house.submit(model="other")
            await house.measured(backlog=20)
            stream = house.submit(deadline_in_s=5.0, model="other")
            await run_pending()
            assert stream.attempt.sent_at is not None
            with pytest.raises(DeadlineInfeasible):
                house.submit(deadline_in_s=5.0)

    run(scenario())


def test_a_job_that_can_be_sent_in_time_is_let_in_and_sent_in_time() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            await house.measured(backlog=5)
            stream = house.submit(deadline_in_s=30.0)
            for _ in range(8):
                await house.one_goes()
            assert stream.attempt.queue_s == pytest.approx(6.0, abs=1.0)

    run(scenario())


def test_no_job_is_refused_for_a_deadline_before_anything_was_measured() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            for _ in range(50):
                house.submit(deadline_in_s=0.5)
            await run_pending()

    run(scenario())


def test_a_full_queue_gives_each_client_a_retry_slot_at_the_drain_rate() -> None:
    async def scenario() -> None:
        async with one_at_a_time(limited(30)) as house:
            await house.measured(backlog=29)
            house.submit()
            prediction = []
            for _ in range(10):
                with pytest.raises(QueueFull) as refused:
                    house.submit()
                assert refused.value.predicted_wait_s == pytest.approx(31, rel=0.25)
                prediction.append(refused.value.retry_after_s or 0.0)
            assert prediction == pytest.approx([1.0 * turn for turn in range(1, 11)], rel=0.25), "one goes every second"

    run(scenario())


def test_a_cancelled_queued_job_does_not_count_towards_waits() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            await house.measured(backlog=5)
            queued = [house.submit() for _ in range(30)]
            await run_pending()
            before = house.submit().attempt.predicted
            for stream in queued:
                house.gateway.cancel(stream.attempt.job.job_id)
            await run_pending()
            stayed = house.submit()
            after = stayed.attempt.predicted
            limiter, each = house.gateway._queue_limiter, len(stayed.attempt.job.payload.body)
            assert limiter.queued_bytes == house.gateway._loop._scheduler.queued * each, "queued bytes"
            assert before is not None
            assert after is not None
            assert after.p50_s < before.p50_s / 3

    run(scenario())


def test_the_coverage_of_wait_predictions_is_reported() -> None:
    async def scenario() -> None:
        async with one_at_a_time() as house:
            await house.measured(backlog=20)
            record = house.gateway._loop._queue_admission._waits.coverage(Lane.P0)
            assert record.jobs > 10
            assert 0 <= record.covered <= 1
            assert house.gateway._loop._queue_admission._waits.coverage(Lane.P2).jobs == 0

    run(scenario())


def test_output_predictions_improve_with_history() -> None:
    """The gateway asks with nothing but the prompt's size; every call of the template writes one token."""

    async def scenario() -> None:
        async with one_at_a_time() as house:
            errors = []
            for _ in range(40):
                said = house.gateway.models.estimator.output("a", "m", 50, 400, "template", None)
                job: InferenceJob = a_job(at=house.clock.now(), lane=Lane.P0, template_id="template", output=400)
                footprint = replace(job.footprint, output=Estimate(said.low, said.expected, said.high))
                house.gateway.submit(replace(job, footprint=footprint))
                await run_pending()
                await house.one_goes(0.1)
                errors.append(house.gateway.models.estimator.output_accuracy.mean_abs_log_error)
            assert house.gateway.models.estimator.output_accuracy.jobs == 40
            assert errors[39] < errors[9] < errors[0]
            assert said.expected <= 3

    run(scenario())
