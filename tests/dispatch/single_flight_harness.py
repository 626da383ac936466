"""A gateway whose worker emits what the test says, for tests of single flight."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import Sharing
from inferry.domain.errors import (
    ClientClosed,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry
from inferry.domain.ports import Emit
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run_pending
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock

GREEDY = Sampling(temperature=0.0, max_tokens=10)


FREE = Sampling(temperature=1.0, max_tokens=10)


class ControlledWorker(ScriptedWorker):
    """Says what the test tells it to say, when it is told."""

    def __init__(self, **more: Any) -> None:
        super().__init__("puppet", **more)
        self.lines: dict[str, asyncio.Queue[str | End]] = {}

    async def _generate(self, job: InferenceJob, emit: Emit) -> None:
        if job.step_id == "probe":
            await super()._generate(job, emit)
            return
        said = 0
        lines = self.lines.setdefault(job.job_id, asyncio.Queue())
        try:
            while isinstance(line := await lines.get(), str):
                emit(Delta(job.job_id, job.run_id, job.step_id, said, line, (said,), 1))
                said += 1
            emit(line)
        except asyncio.CancelledError:
            emit(Failed(job.job_id, ClientClosed("cancelled"), Usage(output_tokens=said)))
        finally:
            self._running.pop(job.job_id, None)

    async def says(self, job: InferenceJob, *lines: str) -> None:
        for line in lines:
            self.lines.setdefault(job.job_id, asyncio.Queue()).put_nowait(line)
        await run_pending()

    async def ends(self, job: InferenceJob, end: End | None = None) -> None:
        usage = Usage(50, 0, 3, 0.5)
        done = Done(job.job_id, FinishReason.STOP, usage) if end is None else end
        self.lines.setdefault(job.job_id, asyncio.Queue()).put_nowait(done)
        await run_pending()


class GatewayHarness:
    """A gateway whose worker is a puppet, and the ledger it writes."""

    def __init__(self, single_flight: Sharing, capacity: Capacity | None) -> None:
        self.worker = ControlledWorker(capacity=capacity)
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = LoopClock()
        self.metrics = Metrics(["m"], ["puppet"])
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=Pool([self.worker], self.clock),
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
            sharing=single_flight,
        )

    def job(self, sampling: Sampling = GREEDY, **fields: Any) -> InferenceJob:
        return a_job(at=self.clock.now(), sampling=sampling, **fields)

    def same_call(self, job: InferenceJob, **changes: Any) -> InferenceJob:
        """The same call from another client."""
        other = a_job(tenant=job.tenant)
        changes = {"job_id": other.job_id, "arrived_at": self.clock.now()} | changes
        return replace(job, **changes)

    async def executions(self) -> int:
        await run_pending()
        return sum(len(plan.jobs) for plan in self.worker.plans)

    def rows(self) -> dict[str, LedgerEntry]:
        self.recorder.flush(120)
        return {entry.job_id: entry for entry in self.ledger.entries}

    def metric(self, line: str) -> float:
        found = [one for one in self.metrics.render()[0].decode().splitlines() if one.startswith(line)]
        assert len(found) == 1, (line, found)
        return float(found[0].rpartition(" ")[2])


@asynccontextmanager
async def a_gateway(capacity: Capacity | None = None, **single_flight: Any) -> AsyncIterator[GatewayHarness]:
    harness = GatewayHarness(Sharing(**single_flight), capacity)
    harness.gateway.start()
    while not harness.gateway.is_ready:
        await asyncio.sleep(0)
    try:
        yield harness
        assert harness.gateway._single_flight._history_budget.used == 0 or len(harness.gateway._single_flight), (
            "nothing is kept for nobody"
        )
    finally:
        await harness.gateway.close()


async def text_of(stream: JobStream) -> str:
    deltas, end = await read(stream)
    assert isinstance(end, Done), end
    return "".join(delta.text for delta in deltas)
