"""A gateway in virtual time, before workers that freeze, die and come back as a test says."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, Worker
from inferry.domain.streams import Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.mailbox import JobStream
from support.builders import a_job
from support.loop_helpers import ListLedger
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock
from support.waiting import async_until


class FreezingWorker(ScriptedWorker):
    """A worker that is watched: it is heard all the time, until it freezes and neither says nor ends anything."""

    def __init__(self, name: str, **script: Any) -> None:
        super().__init__(name, clock=LoopClock(), words=("one", " two"), capacity=Capacity(sequences=64), **script)
        self.frozen_at: float | None = None
        self.refuses: Failed | None = None
        self.confirms = asyncio.Event()

    def freeze(self) -> None:
        self.frozen_at = self._clock.now()
        self.gate.clear()

    def thaw(self) -> None:
        self.frozen_at = None
        self.gate.set()
        self.confirms.set()

    def view(self) -> WorkerView:
        now = self._clock.now()
        return replace(super().view(), last_activity_at=now if self.frozen_at is None else self.frozen_at)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        if self.frozen_at is not None:
            await self.confirms.wait()
        return await super().cancel(job_ids)

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if self.refuses is not None:
            self.plans.append(plan)
            for job in plan.jobs:
                emit(replace(self.refuses, job_id=job.job_id))
            return
        await super().run(plan, emit)


class VirtualGateway:
    def __init__(
        self, workers: Sequence[Worker], health: HealthPolicy, lanes: Mapping[Lane, LanePolicy] = DEFAULT_LANES
    ) -> None:
        self.clock = LoopClock()
        self.workers = workers
        self.pool = Pool(workers, self.clock, health=health)
        self.recorder = Recorder(ListLedger())
        self.metrics = Metrics(["m"], [worker.name for worker in workers])
        self.metrics.workers.health = self.pool.health
        self.gateway = make_gateway(
            lanes=lanes, pool=self.pool, recorder=self.recorder, metrics=self.metrics, clock=self.clock
        )

    def submit(self, **fields: Any) -> JobStream:
        return self.gateway.submit(self.job(**fields))

    def job(self, **fields: Any) -> InferenceJob:
        return a_job(at=self.clock.now(), **fields)

    def phase(self, worker: Worker) -> Phase:
        return self.pool.view(worker.name).phase

    def metric(self, line: str) -> float:
        text = self.metrics.render()[0].decode()
        (found,) = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found.rsplit(" ", 1)[1])

    async def until(self, condition: Any, seconds: float = 600.0) -> None:
        await async_until(condition, seconds)


@asynccontextmanager
async def a_virtual_gateway(
    *workers: Worker, lanes: Mapping[Lane, LanePolicy] = DEFAULT_LANES, **health: Any
) -> AsyncIterator[VirtualGateway]:
    """`health` are fields of the policy."""
    env = VirtualGateway(workers, HealthPolicy(**health), lanes)
    env.gateway.start()
    await env.until(lambda: all(env.phase(worker) is Phase.READY for worker in workers))
    try:
        yield env
    finally:
        # Not the gateway's own close: that waits for a thread, and no time passes here meanwhile.
        for worker in workers:
            if isinstance(worker, FreezingWorker):
                worker.thaw()
        await env.pool.close()
        await env.gateway._loop.close()
        env.gateway.stop_timers()
        env.recorder.close()
