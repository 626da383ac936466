"""Resumed jobs that are lost again, left by their client or ended: budgets, SLO targets, accounts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from admission.builders import a_caller
from inferry.admission.queue_limiter import QueueLimiter
from inferry.admission.quota_gate import QuotaGate
from inferry.cli.gateway_wiring import make_gateway, make_loop
from inferry.dispatch import lifecycle
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.gpu_accounting import GpuAccounting
from inferry.dispatch.pool import Pool
from inferry.dispatch.queue_admission import QueueAdmission
from inferry.domain.attempts import Attempt
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ClientClosed, GatewayError, RunBudgetExhausted, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.prices import Price
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.prediction.estimator import Estimator
from inferry.prediction.wait_model import WaitModel
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run
from support.scripted_worker import ScriptedWorker

WORDS = ("one", " two", " three", " four", " five")


class Purse:
    """A budget that grants `most` tokens to every job, and remembers what it was asked and told."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.probe_count: list[int] = []
        self.paid: list[Usage] = []

    def charges_gpu_time(self) -> bool:
        return False

    def lease_gpu_time(self, job_id: str, gpu_seconds: float) -> bool:
        return True

    def renew_grant(self, job_id: str, written: int) -> int:
        self.probe_count.append(written)
        return self.most

    def exhausted_error(self, job_id: str) -> GatewayError:
        return RunBudgetExhausted("used up")

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> int | None:
        self.paid.append(usage)
        return None

    def retry_refusal(self, job: InferenceJob) -> GatewayError | None:
        return None


class House:
    """A dispatch loop over scripted workers that all go on from token ids."""

    def __init__(self, workers: int, lanes: dict[Lane, LanePolicy], budget: Purse | None) -> None:
        self.workers = [ScriptedWorker(f"w{number}", words=WORDS, can_resume=True) for number in range(workers)]
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = SystemClock()
        self.pool = Pool(self.workers, self.clock)
        self.metrics = Metrics(["m"], [worker.name for worker in self.workers])
        self.estimator = Estimator()
        depth, scheduler = QueueDepth(), Scheduler(lanes)
        self.loop = make_loop(
            scheduler=scheduler,
            lanes=lanes,
            pool=self.pool,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
            depth=depth,
            queue_admission=QueueAdmission(scheduler, QueueLimiter(lanes, depth), WaitModel(depth)),
            estimator=self.estimator,
            deadlines=Deadlines(None, self.clock.now),
            gpu_accounting=GpuAccounting(self.clock, self.pool.reported_view, self.recorder.record),
            budget=budget,
        )

    def job(self) -> InferenceJob:
        return a_job(at=self.clock.now(), stream=True, resume=ResumeMode.CONTINUE, output=100)

    def rows(self) -> list[LedgerEntry]:
        self.recorder.flush(5)
        return self.ledger.entries


@asynccontextmanager
async def a_house(
    workers: int = 3, lanes: dict[Lane, LanePolicy] = DEFAULT_LANES, budget: Purse | None = None
) -> AsyncIterator[House]:
    house = House(workers, lanes, budget)
    house.pool.start()
    await until_up(house.pool, house.workers)
    try:
        yield house
    finally:
        await house.pool.close()
        await house.loop.close()
        house.recorder.close()


async def until_up(pool: Pool, workers: list[ScriptedWorker]) -> None:
    while not all(pool.serves_elsewhere("m", [other.name for other in workers if other is not one]) for one in workers):
        await asyncio.sleep(0)


def lose_one_word_each(workers: list[ScriptedWorker], times: int) -> None:
    """The first so many that take a job say one word and are lost."""
    left = [times]
    for worker in workers:
        worker.dies_after = 1
        says = worker.run

        async def counted(plan: Any, emit: Any, worker: ScriptedWorker = worker, says: Any = says) -> None:
            if plan.jobs[0].step_id != "probe":
                worker.dies_after = 1 if left[0] > 0 else None
                left[0] -= 1
            await says(plan, emit)

        worker.run = counted  # type: ignore[method-assign]


def test_a_granted_budget_covers_all_attempts_together() -> None:
    async def scenario() -> None:
        purse = Purse(4)
        async with a_house(budget=purse) as house:
            lose_one_word_each(house.workers, 2)
            stream = house.loop.submit(house.job(), granted_tokens=4)
            deltas, end = await read(stream)
            assert "".join(delta.text for delta in deltas) == "one two three four"
            assert isinstance(end, Done)
            assert (end.finish, end.usage.output_tokens) == (FinishReason.LENGTH, 4)
            assert isinstance(end.stopped, RunBudgetExhausted)
            assert purse.probe_count == sorted(purse.probe_count)
            assert purse.probe_count[-1] == 4, "what earlier attempts wrote is part of it"
            assert [usage.output_tokens for usage in purse.paid] == [4]
            assert [row.attempt for row in house.rows()] == [1, 2, 3]

    run(scenario())


def test_an_slo_missed_by_one_attempt_is_not_attained_by_the_next() -> None:
    lanes = {Lane.P1: LanePolicy(max_wait_ms=25, coalesce_ms=0, ttft_ms=1e-9, itl_ms=1e9)}

    async def scenario() -> None:
        async with a_house(lanes=lanes) as house:
            lose_one_word_each(house.workers, 1)
            stream = house.loop.submit(house.job())
            _, end = await read(stream)
            assert isinstance(end, Done)
            assert stream.attempt.job.attempt == 2
            assert not stream.attempt.slo_attained

    run(scenario())


def test_only_jobs_with_one_attempt_train_the_length_model() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            lose_one_word_each(house.workers, 1)
            resumed, plain = (replace(house.job(), token_budget=1000) for _ in range(2))
            await read(house.loop.submit(resumed))
            assert house.estimator.output_accuracy.jobs == 0
            await read(house.loop.submit(plain))
            assert house.estimator.output_accuracy.jobs == 1

    run(scenario())


def test_a_job_lost_too_often_ends_with_the_error_after_its_delivered_output() -> None:
    async def scenario() -> None:
        async with a_house(4) as house:
            lose_one_word_each(house.workers, 99)
            deltas, end = await read(house.loop.submit(house.job()))
            assert "".join(delta.text for delta in deltas) == "one two three"
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerLost)
            rows = house.rows()
            assert [(row.outcome, row.output_tokens) for row in rows] == [(Outcome.FAILED, 1)] * 3
            assert len({row.worker for row in rows}) == 3

    run(scenario())


def test_a_lost_job_without_another_worker_is_delayed_before_the_same_worker_retries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_DELAY_S", 600.0)

    async def scenario() -> None:
        async with a_house(1) as house:
            lose_one_word_each(house.workers, 1)
            stream = house.loop.submit(house.job())
            while stream.attempt.job.attempt == 1:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert stream.attempt.plan is None, "who lost it is no other"
            house.loop.cancel(stream.attempt.job.job_id)
            _, end = await read(stream)
            assert isinstance(end, Failed)
            assert isinstance(end.error, ClientClosed)

    run(scenario())


# -- with the gate ---------------------------------------------------------------------------------------------------


class Paid:
    """A whole gateway, with prices and a tenant that has a ceiling."""

    def __init__(self) -> None:
        self.workers = [ScriptedWorker(f"w{number}", words=WORDS, can_resume=True) for number in range(2)]
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = SystemClock()
        self.pool = Pool(self.workers, self.clock)
        self.gate = QuotaGate({"m": Price(input=1.0, output=2.0)})
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=self.recorder,
            metrics=Metrics(["m"], [worker.name for worker in self.workers]),
            clock=self.clock,
            gate=self.gate,
        )


def silent_at_the_second(worker: ScriptedWorker) -> Any:
    says = worker.run

    async def run_plan(plan: Any, emit: Any) -> None:
        if plan.jobs[0].attempt == 2:
            worker.gate.clear()
        await says(plan, emit)

    return run_plan


def test_a_client_that_leaves_a_resumed_job_is_charged_for_its_delivered_output() -> None:
    async def scenario() -> None:
        house = Paid()
        house.gateway.start()
        await until_up(house.pool, house.workers)
        try:
            for worker in house.workers:
                worker.dies_after = 2
                worker.run = silent_at_the_second(worker)  # type: ignore[method-assign]
            caller = a_caller(day_token_ceiling=10_000)
            job = a_job(at=house.clock.now(), stream=True, resume=ResumeMode.CONTINUE, output=100)
            stream = house.gateway.submit(job, caller)
            while stream.attempt.job.attempt == 1:
                await asyncio.sleep(0)
            while stream.attempt.plan is None:
                await asyncio.sleep(0)
            assert stream.attempt.first_token_at is None
            house.gateway.cancel(job.job_id)
            deltas, end = await read(stream)
            assert "".join(delta.text for delta in deltas) == "one two"
            assert isinstance(end, Failed)
            assert house.gate.report("a")[0].spent_tokens == 3 + 2, "the ids of the prompt, and two words"
            house.recorder.flush(5)
            lost, left = house.ledger.entries
            assert (lost.outcome, lost.cost_nanos) == (Outcome.FAILED, None)
            assert (left.outcome, left.cost_nanos) == (Outcome.CANCELLED, 3 * 1000 + 2 * 2000)
        finally:
            await house.gateway.close()

    run(scenario())
