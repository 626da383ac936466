"""Deadlines and the request timeout, also of calls that run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.domain.attempts import Attempt
from inferry.domain.errors import DeadlineExceeded, GatewayError, QueueTimeout, RequestTimeout
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.sampling import Sampling
from inferry.domain.streams import End, Failed
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock, run_virtual


class Harness:
    """A gateway before one worker that writes a word and then stops until its gate opens."""

    def __init__(self, request_timeout_s: float | None, sequences: int) -> None:
        self.clock = LoopClock()
        self.worker = ScriptedWorker(clock=self.clock, words=("one", " two"), capacity=Capacity(sequences=sequences))
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.gateway: Gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=Pool([self.worker], self.clock),
            recorder=self.recorder,
            metrics=Metrics(["m"], [self.worker.name]),
            clock=self.clock,
            request_timeout_s=request_timeout_s,
        )

    @property
    def deadlines(self) -> Deadlines:
        return self.gateway._deadlines

    def job(self, deadline_s: float | None = None, **fields: Any) -> InferenceJob:
        now = self.clock.now()
        return a_job(at=now, deadline=None if deadline_s is None else now + deadline_s, **fields)

    async def end_of(self, job: InferenceJob) -> tuple[float, End]:
        """When the job ended, from its arrival, and how."""
        async with asyncio.timeout(60.0):
            _, end = await read(self.gateway.submit(job))
        return self.clock.now() - job.arrived_at, end

    def entries(self) -> list[LedgerEntry]:
        self.recorder.flush(5)
        return self.ledger.entries


@asynccontextmanager
async def a_gateway(request_timeout_s: float | None = None, sequences: int = 8) -> AsyncIterator[Harness]:
    harness = Harness(request_timeout_s, sequences)
    harness.gateway.start()
    while not harness.gateway.is_ready:
        await asyncio.sleep(0.01)
    harness.worker.gate.clear()
    try:
        yield harness
    finally:
        harness.worker.gate.set()
        harness.gateway.stop_timers()
        await harness.gateway._pool.close()
        await harness.gateway._loop.close()
        harness.recorder.close()


def error_of(end: End) -> GatewayError:
    assert isinstance(end, Failed)
    return end.error


def test_a_running_call_is_stopped_at_its_deadline() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            took_s, end = await harness.end_of(harness.job(deadline_s=3.0))
            assert isinstance(error_of(end), DeadlineExceeded)
            assert took_s == pytest.approx(3.0, abs=0.1)
            assert harness.gateway.in_flight == 0
            assert harness.gateway._loop._scheduler.use(harness.worker.name).sequences == 0
            (entry,) = harness.entries()
            assert (entry.outcome, entry.error_code) == (Outcome.EXPIRED, "deadline_exceeded")

    run_virtual(scenario())


def test_a_running_call_is_stopped_by_the_request_timeout() -> None:
    async def scenario() -> None:
        async with a_gateway(request_timeout_s=2.0) as harness:
            took_s, end = await harness.end_of(harness.job())
            assert isinstance(error_of(end), RequestTimeout)
            assert took_s == pytest.approx(2.0, abs=0.1)

    run_virtual(scenario())


def test_the_request_timeout_counts_the_time_in_the_queue() -> None:
    async def scenario() -> None:
        async with a_gateway(request_timeout_s=2.0, sequences=1) as harness:
            both = await asyncio.gather(*(harness.end_of(harness.job()) for _ in range(2)))
            assert [round(took_s) for took_s, _ in both] == [2, 2]
            assert all(isinstance(error_of(end), RequestTimeout) for _, end in both)

    run_virtual(scenario())


def test_the_earlier_of_deadline_and_request_timeout_ends_a_call() -> None:
    async def scenario() -> None:
        async with a_gateway(request_timeout_s=4.0) as harness:
            early, late = await asyncio.gather(
                harness.end_of(harness.job(deadline_s=1.0)), harness.end_of(harness.job(deadline_s=9.0))
            )
            assert (round(early[0]), type(error_of(early[1]))) == (1, DeadlineExceeded)
            assert (round(late[0]), type(error_of(late[1]))) == (4, RequestTimeout)

    run_virtual(scenario())


def test_a_deadline_that_passes_in_the_queue_stays_a_queue_timeout() -> None:
    async def scenario() -> None:
        async with a_gateway(request_timeout_s=60.0, sequences=1) as harness:
            running = harness.gateway.submit(harness.job())
            _, end = await harness.end_of(harness.job(deadline_s=1.0))
            assert isinstance(error_of(end), QueueTimeout)
            assert running.attempt.end is None

    run_virtual(scenario())


def test_a_call_that_completes_in_time_leaves_no_timer() -> None:
    async def scenario() -> None:
        async with a_gateway(request_timeout_s=60.0) as harness:
            harness.worker.gate.set()
            _, end = await harness.end_of(harness.job(deadline_s=30.0))
            assert not isinstance(end, Failed)
            assert len(harness.deadlines) == 0

    run_virtual(scenario())


def test_a_call_without_a_limit_has_no_timer() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            harness.gateway.submit(harness.job())
            await asyncio.sleep(1.0)
            assert len(harness.deadlines) == 0

    run_virtual(scenario())


def test_the_leader_of_a_shared_execution_leaves_at_its_deadline_and_followers_read_on() -> None:
    async def scenario() -> None:
        async with a_gateway() as harness:
            greedy = Sampling(temperature=0.0, max_tokens=10)
            leader = harness.gateway.submit(harness.job(deadline_s=2.0, sampling=greedy, stream=True))
            arrived_at = harness.clock.now()
            await asyncio.sleep(0.5)
            follower = harness.gateway.submit(harness.job(sampling=greedy, stream=True))
            assert follower.shared_with is not None
            hurried = harness.gateway.submit(harness.job(deadline_s=4.0, sampling=greedy, stream=True))
            for stream, at_s in ((leader, 2.0), (hurried, 4.5)):
                async with asyncio.timeout(60.0):
                    _, end = await read(stream)
                assert isinstance(error_of(end), DeadlineExceeded)
                assert harness.clock.now() - arrived_at == pytest.approx(at_s, abs=0.1)
            harness.worker.gate.set()
            deltas, end = await read(follower)
            assert not isinstance(end, Failed)
            assert "".join(delta.text for delta in deltas) == "one two"

    run_virtual(scenario())


def test_a_retry_keeps_the_deadline_of_its_job() -> None:
    async def scenario() -> None:
        expired: list[str] = []
        deadlines = Deadlines(None, LoopClock().now)
        deadlines.on_expired = lambda job_id, error: expired.append(job_id)
        attempt = Attempt(a_job(at=LoopClock().now(), deadline=LoopClock().now() + 2.0))
        deadlines.sent(attempt, LoopClock().now())
        attempt.resumed = True
        deadlines.ended(attempt, LoopClock().now())
        await asyncio.sleep(3.0)
        assert expired == [attempt.job.job_id]

    run_virtual(scenario())
