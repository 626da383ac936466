"""A gateway with one scripted worker, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock


class House:
    """A gateway with a scripted worker, and the ledger it writes."""

    def __init__(self, worker: ScriptedWorker, lanes: Any = DEFAULT_LANES) -> None:
        self.worker = worker
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.clock = LoopClock()
        self.pool = Pool([worker], self.clock)
        self.metrics = Metrics(["m"], [worker.name])
        self.gateway = make_gateway(
            lanes=lanes, pool=self.pool, recorder=self.recorder, metrics=self.metrics, clock=self.clock
        )

    def job(self, **fields: Any) -> InferenceJob:
        return a_job(at=self.clock.now(), **fields)

    def entries(self) -> list[LedgerEntry]:
        self.recorder.flush(120)
        return self.ledger.entries


@asynccontextmanager
async def a_house(lanes: Any = DEFAULT_LANES, **script: Any) -> AsyncIterator[House]:
    async with a_house_of(ScriptedWorker(**script), lanes) as house:
        yield house


@asynccontextmanager
async def a_house_of(worker: ScriptedWorker, lanes: Any = DEFAULT_LANES) -> AsyncIterator[House]:
    house = House(worker, lanes)
    house.gateway.start()
    while not house.gateway.is_ready:
        await asyncio.sleep(0)
    try:
        yield house
    finally:
        await house.gateway.close()
