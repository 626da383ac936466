"""Jobs with a lost or stopped attempt resume on another worker, and their readers see one stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch import lifecycle
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.errors import ClientClosed, InvalidRequest, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run, run_pending
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock

WORDS = ("one", " two", " three", " four", " five")


class House:
    def __init__(
        self, workers: Sequence[ScriptedWorker], lanes: dict[Lane, LanePolicy], no_worker_timeout_s: float = 30.0
    ) -> None:
        self.workers = workers
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = LoopClock()
        self.pool = Pool(workers, self.clock, health=HealthPolicy(no_worker_timeout_s=no_worker_timeout_s))
        self.metrics = Metrics(["m"], [worker.name for worker in workers])
        self.gateway = make_gateway(
            lanes=lanes, pool=self.pool, recorder=self.recorder, metrics=self.metrics, clock=self.clock
        )

    def submit(self, **fields: Any) -> JobStream:
        fields = {"stream": True, "resume": ResumeMode.CONTINUE} | fields
        return self.gateway.submit(self.job(**fields))

    def job(self, **fields: Any) -> InferenceJob:
        return a_job(at=self.clock.now(), **fields)

    def rows(self) -> list[LedgerEntry]:
        self.recorder.flush(120)
        return self.ledger.entries

    def metric(self, line: str) -> float:
        text = self.metrics.render()[0].decode()
        (found,) = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found.rsplit(" ", 1)[1])


@asynccontextmanager
async def a_house(
    count: int = 2,
    lanes: dict[Lane, LanePolicy] = DEFAULT_LANES,
    no_worker_timeout_s: float = 30.0,
    precisions: Sequence[str | None] = (),
    **script: Any,
) -> AsyncIterator[House]:
    """`precisions` replaces `count`: one worker of each."""
    script = dict[str, Any](words=WORDS, can_resume=True) | script
    workers = [
        ScriptedWorker(f"w{number}", precision=precision, **script)
        for number, precision in enumerate(precisions or [None] * count)
    ]
    house = House(workers, lanes, no_worker_timeout_s)
    house.gateway.start()
    while not all(
        house.pool.serves_elsewhere("m", [w.name for w in house.workers if w is not one]) for one in house.workers
    ):
        await asyncio.sleep(0)
    try:
        yield house
    finally:
        await house.gateway.close()


def texts(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_failover_of_a_stream_loses_and_repeats_no_token() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            for worker in house.workers:
                worker.dies_after = 2
            # Both die after two words of their own: it takes the first, the second, and the first again.
            stream = house.submit()
            deltas, end = await read(stream)
            assert texts(deltas) == "".join(WORDS)
            assert [token for delta in deltas for token in delta.token_ids] == [0, 1, 2, 3, 4]
            assert [delta.index for delta in deltas] == sorted({delta.index for delta in deltas})
            assert isinstance(end, Done)
            assert end.usage.output_tokens == len(WORDS)
            assert end.usage.prompt_tokens == 3
            rows = house.rows()
            assert [(row.attempt, row.outcome) for row in rows] == [
                (1, Outcome.FAILED),
                (2, Outcome.FAILED),
                (3, Outcome.DONE),
            ]
            assert rows[0].worker != rows[1].worker
            assert sum(row.output_tokens for row in rows) == len(WORDS)
            assert house.metric('inferry_attempt_retries_total{reason="worker_lost",resumed="true"}') == 2
            assert house.metric("inferry_jobs_in_flight") == 0
            assert house.metric("inferry_queued_bytes") == 0

    run(scenario())


def test_an_answer_that_began_in_one_precision_is_continued_in_it() -> None:
    async def scenario() -> None:
        async with a_house(precisions=("bf16", "bf16", "fp8", "fp8")) as house:
            for worker in house.workers:
                worker.dies_after = 2
            deltas, end = await read(house.submit())
            assert isinstance(end, Done)
            assert texts(deltas) == "".join(WORDS)
            precisions = {worker.view().precision for worker in house.workers if worker.plans}
            assert len(precisions) == 1

    run(scenario())


def test_a_job_with_no_delivered_output_restarts() -> None:
    async def scenario() -> None:
        async with a_house(can_resume=False) as house:
            house.workers[0].dies_after = house.workers[1].dies_after = 0
            stream = house.submit(resume=ResumeMode.RESTART)
            while not any(worker.plans for worker in house.workers):
                await asyncio.sleep(0)
            (first,) = [worker for worker in house.workers if worker.plans]
            for worker in house.workers:
                if worker is not first:
                    worker.dies_after = None
            deltas, end = await read(stream)
            assert isinstance(end, Done)
            assert texts(deltas) == "".join(WORDS)

    run(scenario())


def test_a_job_that_cannot_resume_ends_with_the_error_after_its_delivered_output() -> None:
    async def scenario() -> None:
        async with a_house(can_resume=False) as house:
            for worker in house.workers:
                worker.dies_after = 2
            deltas, end = await read(house.submit(resume=ResumeMode.RESTART))
            assert texts(deltas) == "one two"
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerLost)
            assert len(house.rows()) == 1

    run(scenario())


def test_a_non_streaming_job_restarts_since_nothing_was_delivered() -> None:
    async def scenario() -> None:
        async with a_house(can_resume=False) as house:
            for worker in house.workers:
                worker.dies_after = 2
            stream = house.submit(resume=ResumeMode.RESTART, stream=False)
            restarts = 0
            taken: list[str] = []
            end = None
            while end is None:
                delta, end = await stream.take()
                if stream.restarts != restarts:
                    restarts = stream.restarts
                    taken.clear()
                    for worker in house.workers:
                        worker.dies_after = None
                if delta is not None:
                    taken.append(delta.text)
            assert isinstance(end, Done)
            assert "".join(taken) == "".join(WORDS)
            assert restarts >= 1

    run(scenario())


def test_a_job_that_crashes_its_workers_is_retried_a_bounded_number_of_times() -> None:
    async def scenario() -> None:
        async with a_house(6) as house:
            for worker in house.workers:
                worker.dies_after = 0
            _, end = await read(house.submit())
            assert isinstance(end, Failed)
            visited = [plan.worker for worker in house.workers for plan in worker.plans]
            assert len(visited) == len(set(visited)) == 3

    run(scenario())


def test_an_error_of_the_job_itself_is_not_retried() -> None:
    async def scenario() -> None:
        async with a_house() as house:

            async def refuses(plan: BatchPlan, emit: Emit) -> None:
                for job in plan.jobs:
                    emit(Failed(job.job_id, InvalidRequest("no")))

            for worker in house.workers:
                worker.run = refuses  # type: ignore[method-assign]
            _, end = await read(house.submit())
            assert isinstance(end, Failed)
            assert isinstance(end.error, InvalidRequest)
            assert len(house.rows()) == 1

    run(scenario())


def test_late_items_of_a_lost_worker_are_dropped() -> None:
    async def scenario() -> None:
        async with a_house() as house:
            late: list[tuple[Emit, InferenceJob]] = []

            async def lies(plan: BatchPlan, emit: Emit) -> None:
                for job in plan.jobs:
                    late.append((emit, job))
                    emit(Failed(job.job_id, WorkerLost("gone")))

            first = house.workers[0]
            first.run = lies  # type: ignore[method-assign]
            house.workers[1].gate.clear()
            streams = [house.submit() for _ in range(4)]
            await run_pending()
            assert late
            for emit, job in late:
                emit(Delta(job.job_id, job.run_id, job.step_id, 0, "late", (9,), 1))
                emit(Done(job.job_id, FinishReason.STOP, Usage(1, 0, 1)))
            house.workers[1].gate.set()
            for deltas, end in await asyncio.gather(*map(read, streams)):
                assert texts(deltas) == "".join(WORDS)
                assert isinstance(end, Done)

    run(scenario())


def test_a_job_whose_whole_budget_was_written_when_its_worker_died_is_done() -> None:
    async def scenario() -> None:
        async with a_house(words=("one", " two", " three")) as house:
            for worker in house.workers:
                worker.dies_after = 2
            deltas, end = await read(house.submit(tokens=1, output=1))  # a budget of two
            assert texts(deltas) == "one two"
            assert isinstance(end, Done)
            assert end.finish is FinishReason.LENGTH

    run(scenario())


def test_a_disconnect_ends_a_job_that_waits_for_its_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_DELAY_S", 60.0)

    async def scenario() -> None:
        async with a_house(1) as house:
            house.workers[0].dies_after = 2
            stream = house.submit()
            while stream.attempt.job.attempt == 1:
                await asyncio.sleep(0)
            house.gateway.cancel(stream.attempt.job.job_id)
            _, end = await read(stream)
            assert isinstance(end, Failed)
            assert isinstance(end.error, ClientClosed)
            assert house.metric("inferry_jobs_in_flight") == 0
            assert [row.outcome for row in house.rows()] == [Outcome.FAILED, Outcome.CANCELLED]

    run(scenario())


def test_the_error_is_delivered_if_no_worker_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_DELAY_S", 0.0)

    async def scenario() -> None:
        async with a_house(1, no_worker_timeout_s=0.05) as house:
            (worker,) = house.workers
            worker.gate.clear()
            stream = house.submit()
            await run_pending()
            await worker.close()
            house.pool.refresh_worker(worker.name)
            worker.dies_after = 0
            _, end = await read(stream)
            assert isinstance(end, Failed)
            assert house.metric("inferry_jobs_in_flight") == 0

    run(scenario())


PREEMPTING = {
    Lane.P0: LanePolicy(max_wait_ms=25, coalesce_ms=0, may_preempt=(Lane.P2,)),
    Lane.P2: LanePolicy(max_wait_ms=25, coalesce_ms=0, preemptible=True),
}


def test_a_batch_job_is_preempted_for_a_live_one_and_then_resumes() -> None:
    async def scenario() -> None:
        many = tuple(f"{number} " for number in range(100))
        async with a_house(1, PREEMPTING, words=many, capacity=Capacity(sequences=1)) as house:
            (worker,) = house.workers
            batch = house.submit(lane=Lane.P2, output=200)
            while batch.attempt.output_tokens < 40:
                await asyncio.sleep(0)
            worker.gate.clear()
            live = house.submit(lane=Lane.P0, resume=ResumeMode.RESTART)
            while live.attempt.plan is None:
                await asyncio.sleep(0)
            assert batch.attempt.plan is None  # it waits for the live one
            worker.gate.set()
            deltas, end = await read(live)
            assert isinstance(end, Done)
            deltas, end = await read(batch)
            assert isinstance(end, Done)
            assert texts(deltas) == "".join(many)
            assert end.usage.output_tokens == len(many)
            mine = [row for row in house.rows() if row.lane == "P2"]
            assert [row.outcome for row in mine] == [Outcome.PREEMPTED, Outcome.DONE]
            assert house.metric('inferry_attempt_retries_total{reason="preempted",resumed="true"}') == 1

    run(scenario())


def test_a_preempted_answer_waits_for_a_worker_of_its_precision() -> None:
    async def scenario() -> None:
        many = tuple(f"{number} " for number in range(100))
        capacity = Capacity(sequences=1)
        async with a_house(0, PREEMPTING, precisions=("bf16", "fp8"), words=many, capacity=capacity) as house:
            batch = house.submit(lane=Lane.P2, output=200)
            while batch.attempt.output_tokens < 40:
                await asyncio.sleep(0)
            (first,) = [worker for worker in house.workers if worker.plans]
            (other,) = [worker for worker in house.workers if worker is not first]
            first.gate.clear()
            other.gate.clear()
            live = [house.submit(lane=Lane.P0, resume=ResumeMode.RESTART, output=100) for _ in range(2)]
            while any(stream.attempt.plan is None for stream in live):
                await asyncio.sleep(0)
            other.gate.set()
            (elsewhere,) = [s for s in live if s.attempt.plan is not None and s.attempt.plan.worker == other.name]
            await read(elsewhere)
            await run_pending()
            assert batch.attempt.plan is None  # the other worker is free, and has another precision
            first.gate.set()
            deltas, end = await read(batch)
            assert isinstance(end, Done)
            assert texts(deltas) == "".join(many)
            assert {row.worker for row in house.rows() if row.lane == "P2"} == {first.name}

    run(scenario())


def test_a_worker_is_not_called_before_its_retry_after() -> None:
    async def scenario() -> None:
        async with a_house(1, no_worker_timeout_s=5.0) as house:
            (worker,) = house.workers
            says = worker.run
            refusals = [0.2, 60.0]
            refused_at: list[float] = []

            async def full(plan: BatchPlan, emit: Emit) -> None:
                refused_at.append(house.clock.now())
                worker.run = says  # type: ignore[method-assign]
                for job in plan.jobs:
                    emit(Failed(job.job_id, NoWorker("full", retry_after_s=refusals[0])))

            worker.run = full  # type: ignore[method-assign]
            stream = house.submit()
            _, end = await read(stream)
            assert isinstance(end, Done)
            assert stream.attempt.sent_at is not None
            assert stream.attempt.sent_at - refused_at[0] == pytest.approx(0.2)
            del refusals[0]
            worker.run = full  # type: ignore[method-assign]
            _, end = await read(house.submit())
            assert isinstance(end, Failed)  # longer than anybody is made to wait
            assert end.error.retry_after_s == 60.0

    run(scenario())
