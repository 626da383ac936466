"""The whole gateway in virtual time, traffic for it, and its diagnosis.

    with_stage(directory, [ContinuousWorker(max_sequences=2)], play, lanes={"P1": {"ttft_ms": 500}})

`play` gets a `Stage` and sends traffic; the result is what `GET /admin/diagnosis` would answer at that moment. Nothing
here depends on the speed of the machine: time passes only while everything waits.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import Lane
from inferry.domain.tenants import Tenant
from inferry.observe.diagnosis.findings import Diagnosis
from support.builders import a_job
from support.staging.engines import SimulatedWorker
from support.virtual_time import LoopClock, run_virtual

Length = int | tuple[int, int]
"""Tokens: a number, or the least and the most of an even distribution."""


class Stage:
    """Sends traffic to a gateway. Numbers are drawn from one seed, so that a situation is the same in every run."""

    def __init__(self, service: wiring.Service, workers: Sequence[SimulatedWorker], seed: int) -> None:
        self.service = service
        self.workers = workers
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs = 0

    async def arrivals(self, per_s: float, seconds: float, *, burst: int = 1, **call: Any) -> None:
        """Calls that arrive independently of each other, `burst` at a time, `per_s` calls a second on average.

        Returns after `seconds`; calls that have not ended go on. `call` are the arguments of `call`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            await asyncio.sleep(self._rng.expovariate(per_s / burst))
            if loop.time() >= until:
                return
            for _ in range(burst):
                self.start(self.call(**call))

    async def agents(self, count: int, seconds: float, *, tool_s: float, **call: Any) -> None:
        """Agents that make one call after the other, with a tool of `tool_s` seconds between two of them."""
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._agent(until, tool_s, call))

    async def call(
        self,
        *,
        lane: str = "P1",
        prompt: Length = 500,
        output: Length = 50,
        tenant: str = "default",
        run: str | None = None,
        template: str | None = None,
        shared_prompt: int = 0,
        read_every_s: float = 0.0,
        leaves_after_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """One streamed call, read to its end. A refusal is final.

        `shared_prompt` tokens at the begin of the prompt are those of the `template`. The client reads what there is
        every `read_every_s` seconds, and disconnects after `leaves_after_s`.
        """
        service, now = self.service, asyncio.get_running_loop().time()
        self._runs += 1
        job = a_job(
            lane=Lane[lane],
            tokens=max(self._length(prompt), shared_prompt + 1),
            output=self._length(output),
            tenant=tenant,
            run_id=run or f"run-{self._runs}",
            template_id=template,
            stream=True,
            at=now,
            deadline=None if deadline_s is None else now + deadline_s,
            max_wait_s=service.diagnostics.lanes[Lane[lane]].max_wait_ms / 1000,
            body=json.dumps({"shared": [template, shared_prompt]}).encode(),
        )
        known = service.tenants.directory.tenants.get(tenant, Tenant(name=tenant))
        try:
            stream = service.gateway.submit(job, Caller(known))
        except GatewayError:
            return
        if leaves_after_s is not None:
            asyncio.get_running_loop().call_later(leaves_after_s, service.gateway.cancel, job.job_id)
        end = None
        while end is None:
            _, end = await stream.take()
            if read_every_s:
                await asyncio.sleep(read_every_s)

    def start(self, work: Any) -> None:
        """Run something beside what follows."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def diagnose(self, window_s: float = 300.0) -> Diagnosis:
        """What `GET /admin/diagnosis` answers now."""
        await asyncio.to_thread(self.service.gateway._recorder.flush)
        self.service.observation.history.sample(asyncio.get_running_loop().time())
        return await self.service.diagnostics.diagnose(window_s)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.service.gateway.abandon()
        await self.service.close()

    async def _agent(self, until: float, tool_s: float, call: dict[str, Any]) -> None:
        self._runs += 1
        run = f"agent-{self._runs}"
        await asyncio.sleep(self._rng.uniform(0.0, tool_s))
        while asyncio.get_running_loop().time() < until:
            await self.call(run=run, **call)
            await asyncio.sleep(tool_s)

    def _length(self, length: Length) -> int:
        return length if isinstance(length, int) else self._rng.randint(*length)


def with_stage(
    directory: Path,
    workers: Callable[[], Sequence[SimulatedWorker]],
    play: Callable[[Stage], Awaitable[None]],
    *,
    seed: int = 1,
    window_s: float = 300.0,
    **config: Any,
) -> Diagnosis:
    """Play a situation and diagnose it. `config` is a configuration file's content, without workers."""

    async def main() -> Diagnosis:
        made = list(workers())
        raw = {"ledger": f"sqlite:///{directory / 'ledger.db'}", **config}
        service = wiring.assemble(parse(raw), made, {}, LoopClock())
        stage = Stage(service, made, seed)
        service.start()
        try:
            async with asyncio.timeout(600):
                while not service.gateway.is_ready:
                    await asyncio.sleep(0.01)
            await play(stage)
            return await stage.diagnose(window_s)
        finally:
            await stage.close()

    # A busy machine may take longer to read the ledger than an operator would wait.
    with mock.patch("inferry.ledger.queries.TRAFFIC_TIME_LIMIT_S", 600.0):
        return run_virtual(main())
