"""GPU-seconds of calls to an HTTP server whose true step times are known: bytes through sockets, in virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from msgspec import json

from inferry.admission.quota_gate import QuotaGate
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.domain.jobs import InferenceJob, Payload
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import GpuTimeKind
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.ledger.recorder import Recorder
from inferry.observe.history import INTERVAL_S
from inferry.observe.metrics import Metrics
from inferry.sim.costs import EngineFlags, load_model
from inferry.sim.engine import Engine
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.loop_helpers import ListLedger, read
from support.simulated_engine_server import EngineServer, RealTimeEngine
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

GPUS = 2
PRICE = Price(gpu_hour=3.6)
COSTS = load_model().costs
FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=512, kv_tokens=100_000)
RUNS, STEPS = 12, 8


class MeteredServer(EngineServer):
    """A simulated engine behind HTTP. With `counts` its metrics page has the counters of vLLM, else only its load."""

    PORT = 8000

    def __init__(self, *, counts: bool) -> None:
        self._script_engine = RealTimeEngine(COSTS, FLAGS)
        super().__init__(self._script_engine, metrics="yes")
        self.url = f"http://127.0.0.1:{self.PORT}"
        self._counts = counts

    @property
    def engine(self) -> Engine:
        """The engine, idle before the first call."""
        if not hasattr(self._script_engine, "_engine"):
            return Engine(COSTS, FLAGS)
        return self._script_engine._engine

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        runner = await self._set_up()
        await web.TCPSite(runner, "127.0.0.1", self.PORT).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def _send_metrics(self, request: web.Request) -> web.Response:
        engine = self.engine
        lines = [f"vllm:num_requests_running {engine.running}", f"vllm:num_requests_waiting {engine.waiting}"]
        if self._counts:
            lines.append(f"vllm:iteration_tokens_total_count {engine.steps}")
            lines.append(f"vllm:iteration_tokens_total_sum {engine.prompt_tokens + engine.output_tokens}")
            lines.append(f"vllm:generation_tokens_total {engine.output_tokens}")
        return web.Response(text="\n".join([*lines, ""]))


class Fleet:
    """Agents before a gateway whose only worker is the server. `received` is output tokens by job."""

    def __init__(self, server: MeteredServer) -> None:
        self.server = server
        self.ledger = ListLedger()
        self.clock = LoopClock()
        self.recorder = Recorder(self.ledger)
        self.received: dict[str, int] = {}
        settings = HttpWorkerSettings(url=server.url, profile=PROFILES["vllm"], models=("m",), gpus=GPUS)
        pool = Pool([OpenAIHttpWorker("up", settings, self.clock, DEFAULT_LANES)], self.clock)
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=pool,
            recorder=self.recorder,
            metrics=Metrics(["m"], ["up"]),
            clock=self.clock,
            gate=QuotaGate({"m": PRICE}),
        )

    def job(self, job_id: str, prompt: list[int], output: int) -> InferenceJob:
        body = json.encode({"model": "m", "prompt": prompt, "max_tokens": output})
        job = a_job(job_id, tokens=len(prompt), output=output, stream=True, at=self.clock.now())
        payload = Payload(api="completions", body=body, sampling=Sampling(max_tokens=output, temperature=1.0))
        return replace(job, token_budget=output, payload=payload)

    async def run(self, number: int) -> None:
        """An agent: calls one after the other, with tools between them."""
        rng = random.Random(number)
        for step in range(STEPS):
            prompt = [rng.randrange(1000) for _ in range(rng.randint(50, 900))]
            job = self.job(f"run-{number}/{step}", prompt, rng.randint(5, 120))
            deltas, end = await read(self.gateway.submit(job))
            assert isinstance(end, Done)
            self.received[job.job_id] = sum(delta.tokens for delta in deltas)
            await asyncio.sleep(rng.random())

    async def sample(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.gateway.account_gpu_time(self.clock.now())


@pytest.mark.parametrize("counts", [True, False])
def test_a_price_per_gpu_hour_charges_http_workers_what_their_engine_spent(counts: bool) -> None:
    server = MeteredServer(counts=counts)

    async def play() -> tuple[Fleet, float, float]:
        async with server.serving():
            fleet = Fleet(server)
            fleet.gateway.start()
            while not fleet.gateway.is_ready:
                await asyncio.sleep(0.05)
            before_s, started_at = server.engine.busy_s, fleet.clock.now()
            sampling = asyncio.get_running_loop().create_task(fleet.sample())
            await asyncio.gather(*(fleet.run(number) for number in range(RUNS)))
            await asyncio.sleep(70.0)  # idle, until rows are due
            sampling.cancel()
            wall_s = fleet.clock.now() - started_at
            await fleet.gateway.close()
            return fleet, server.engine.busy_s - before_s, wall_s

    fleet, true_s, wall_s = run_virtual_net(play())
    entries = {entry.job_id: entry for entry in fleet.ledger.entries}
    assert {job_id: entry.output_tokens for job_id, entry in entries.items()} == fleet.received
    assert all(entry.gpu_estimated for entry in entries.values())

    charged = sum(entry.cost_nanos or 0 for entry in entries.values()) / NANOS_PER_UNIT
    assert charged == pytest.approx(true_s * GPUS * 3.6 / 3600, rel=0.05)
    gpu_seconds = sum(entry.gpu_seconds or 0.0 for entry in entries.values())
    assert gpu_seconds == pytest.approx(true_s * GPUS, rel=0.05)

    rows = fleet.ledger.gpu_time
    started = sorted({(row.started_at, row.ended_at) for row in rows})
    assert all(one[1] == following[0] for one, following in pairwise(started))
    for started_at, ended_at in started:
        of_interval = sum(row.gpu_seconds for row in rows if row.started_at == started_at)
        assert of_interval == pytest.approx((ended_at - started_at) * GPUS)
    by_kind = {kind: sum(row.gpu_seconds for row in rows if row.kind == kind.value) for kind in GpuTimeKind}
    assert sum(by_kind.values()) == pytest.approx(wall_s * GPUS, rel=0.02)
    assert by_kind[GpuTimeKind.WORK] == pytest.approx(gpu_seconds, rel=0.01)
    assert by_kind[GpuTimeKind.UNATTRIBUTED] <= 0.05 * sum(by_kind.values())
    assert all(1.0 <= (entry.engine_batch or 0.0) <= RUNS for entry in entries.values())
    fills = [(entry.batch_fill, entry.engine_batch) for entry in entries.values()]
    assert all(fill == pytest.approx((batch or 0.0) / 256) for fill, batch in fills)
