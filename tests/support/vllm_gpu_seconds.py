"""Agents before vLLM, and the GPU-seconds of their calls: estimated from outside, and measured step by step.

In process, vLLM measures every step, so the shares of runs and jobs are compared (`Agreement`). Over HTTP the truth is
the time for which the server's scheduler has requests, by its own clock (`HttpAgreement`).
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import json

from inferry.admission.quota_gate import QuotaGate
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.pool import Pool
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import Payload
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import GpuTimeKind, LedgerEntry
from inferry.domain.ports import Worker
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.engine.tokenizer import HfTokenizer
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.vllm_inprocess import VllmEngine, VllmInProcessWorker
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.loop_helpers import ListLedger, read
from support.outside_view import OutsideView
from support.vllm_server import BLOCKS_PER_CEILING, CONTEXT, VllmServer, vllm_venv

RUNS = 6
STEPS = 12
WARM_UPS = 12
MAX_RUN_ERROR = 0.05
MAX_JOB_ERROR = 0.20
MAX_UNATTRIBUTED = 0.05
MAX_LATE = 0.1
"""Above this part of a round in which the event loop was late, the machine has too few cores for the comparison."""
MAX_SEQUENCES, CHUNK_TOKENS = 16, 512
PRICE_PER_HOUR = 3.6
SCHEDULER = "support.vllm_busy_time.TimedScheduler"
BUSY_TIME_FILE = "BUSY_TIME_FILE"
"""Of that scheduler, which only vLLM can import."""


class Served:
    """A gateway with one worker. `received` is the output tokens that clients got, by job."""

    def __init__(self, worker: Worker) -> None:
        self.received: dict[str, int] = {}
        self.ledger = ListLedger()
        self.clock = SystemClock()
        self.recorder = Recorder(self.ledger)
        self.pool = Pool([worker], self.clock)
        metrics = Metrics(["m"], [worker.name])
        self.gateway: Gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=self.recorder,
            metrics=metrics,
            clock=self.clock,
            gate=QuotaGate({"m": Price(gpu_hour=PRICE_PER_HOUR)}),
        )

    async def learn(self) -> None:
        """Traffic from which the costs of the engine are learned: long answers, long prompts, and single calls."""
        for number in range(WARM_UPS):
            calls = [
                *[(20, 60)] * (1 + 15 * (number % 2)),
                *[(500, 2)] * (8 * (number % 3)),
            ]
            await asyncio.gather(
                *(
                    self.run(f"warm-up-{number}-{place}", random.Random(place), 1, (prompt, prompt), (output, output))
                    for place, (prompt, output) in enumerate(calls)
                )
            )

    async def run(
        self,
        run_id: str,
        rng: random.Random,
        steps: int = STEPS,
        prompts: tuple[int, int] = (50, 600),
        outputs: tuple[int, int] = (40, 200),
    ) -> None:
        """An agent: calls one after the other, with prompts and outputs of different lengths."""
        for step in range(steps):
            prompt = tuple(rng.randrange(10, 200) for _ in range(rng.randint(*prompts)))
            output = rng.randint(*outputs)
            body = {"model": "m", "prompt": prompt, "max_tokens": output, "ignore_eos": True}
            # Sampled, so that no call shares the answer of another.
            sampling = Sampling(max_tokens=output, temperature=1.0, ignore_eos=True)
            payload = Payload(api="completions", body=json.encode(body), sampling=sampling, prompt_ids=prompt)
            job = a_job(
                f"{run_id}/{step}",
                run_id=run_id,
                tokens=len(prompt),
                output=output,
                stream=True,
                at=self.clock.now(),
            )
            job = replace(job, payload=payload)
            _, end = await read(self.gateway.submit(job))
            assert isinstance(end, Done), end
            self.received[job.job_id] = end.usage.output_tokens
            await asyncio.sleep(rng.random() * 0.2)

    async def entries(self, names: Collection[str]) -> list[LedgerEntry]:
        """What the ledger has of these runs. Its tokens are those that clients received."""
        await asyncio.to_thread(self.recorder.flush, 30)
        found = [entry for entry in self.ledger.entries if entry.run_id in names]
        assert all(entry.gpu_estimated for entry in found)
        assert {entry.job_id: entry.output_tokens for entry in found} == {
            job_id: tokens for job_id, tokens in self.received.items() if run_of(job_id) in names
        }
        return found

    @property
    def unattributed(self) -> float:
        """The part of wall time and GPUs that no call is charged for although the worker was busy; after the close."""
        rows = self.ledger.gpu_time
        unattributed = sum(row.gpu_seconds for row in rows if row.kind == GpuTimeKind.UNATTRIBUTED.value)
        return unattributed / sum(row.gpu_seconds for row in rows)


@asynccontextmanager
async def served(worker: Worker) -> AsyncIterator[Served]:
    serving = Served(worker)
    serving.gateway.start()
    async with asyncio.timeout(300):
        while not serving.gateway.is_ready:
            await asyncio.sleep(0.1)
    try:
        await serving.learn()
        yield serving
    finally:
        await serving.gateway.close()


def worker_in_process(model: Path) -> OutsideView:
    tokenizer = HfTokenizer(model)
    engine = VllmEngine(
        python=vllm_venv() / "bin" / "python",
        max_sequences=MAX_SEQUENCES,
        chunk_tokens=CHUNK_TOKENS,
        context_tokens=CONTEXT,
        arguments={
            "dtype": "float32",
            "enforce_eager": True,
            "num_gpu_blocks_override": 4 * BLOCKS_PER_CEILING,
            "enable_prefix_caching": False,
        },
    )
    return OutsideView(
        VllmInProcessWorker(
            "vllm", model_dir=model, models=["m"], engine=engine, make_assembler=lambda stop: Assembler(tokenizer, stop)
        )
    )


class TimedServer(VllmServer):
    """A server that says for how long its engine has had requests."""

    def __init__(self, model: Path, log_path: Path) -> None:
        options = ("--no-enable-prefix-caching", "--max-num-batched-tokens", str(CHUNK_TOKENS))
        self._file = log_path.with_suffix(".busy")
        environment = {BUSY_TIME_FILE: str(self._file), "PYTHONPATH": str(Path(__file__).parents[1])}
        super().__init__(
            model, log_path, *options, "--scheduler-cls", SCHEDULER, max_sequences=MAX_SEQUENCES, **environment
        )

    def busy_seconds(self) -> float:
        """Up to when the engine was idle last."""
        return float(self._file.read_text())


def worker_over_http(server: TimedServer) -> OpenAIHttpWorker:
    settings = HttpWorkerSettings(url=server.url, profile=PROFILES["vllm"], models=("m",), chunk_tokens=CHUNK_TOKENS)
    return OpenAIHttpWorker("vllm", settings, SystemClock(), DEFAULT_LANES)


class Agreement(NamedTuple):
    """Relative differences between the shares of one round: of all runs, of 95 % of the jobs; and of the sums.

    `late`: part of the round for which the gateway's event loop was not run although it was due.
    """

    runs: float
    jobs: float
    total: float
    late: float

    @property
    def is_close(self) -> bool:
        return self.runs <= MAX_RUN_ERROR and self.jobs <= MAX_JOB_ERROR and abs(self.total) <= MAX_RUN_ERROR

    @property
    def is_disturbed(self) -> bool:
        return self.late > MAX_LATE


def agreement(estimated: Mapping[str, float], measured: Mapping[str, float], late: float) -> Agreement:
    jobs = errors(estimated, measured)
    total = sum(estimated.values()) / sum(measured.values()) - 1
    return Agreement(errors(by_run(estimated), by_run(measured))[-1], jobs[int(0.95 * len(jobs))], total, late)


class Lateness:
    """How long the event loop was kept from running, as a part of the time since the start."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._late_s = 0.0
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            due_at = self._loop.time() + 0.01
            await asyncio.sleep(0.01)
            self._late_s += self._loop.time() - due_at

    def end(self) -> float:
        self._watching.cancel()
        return self._late_s / (self._loop.time() - self._started_at)


def errors(estimated: Mapping[str, float], measured: Mapping[str, float]) -> list[float]:
    """Relative differences of the shares in the sum, the largest last."""
    whole, true_whole = sum(estimated.values()), sum(measured.values())
    return sorted(abs(estimated[name] / whole / (one / true_whole) - 1) for name, one in measured.items())


def by_run(jobs: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for job_id, seconds in jobs.items():
        found[run_of(job_id)] += seconds
    return found


def run_of(job_id: str) -> str:
    return job_id.partition("/")[0]


async def play(serving: Served, number: int) -> tuple[list[LedgerEntry], float]:
    """A round of all agents: its ledger entries, and the part of it for which the event loop was late."""
    names = {f"round-{number}-run-{place}" for place in range(RUNS)}
    lateness = Lateness()
    await asyncio.gather(*(serving.run(name, random.Random(name)) for name in sorted(names)))
    late = lateness.end()
    entries = await serving.entries(names)
    assert len(entries) == RUNS * STEPS
    return entries, late


async def play_in_process(serving: Served, worker: OutsideView, number: int) -> Agreement:
    entries, late = await play(serving, number)
    estimated = {entry.job_id: entry.gpu_seconds or 0.0 for entry in entries}
    return agreement(estimated, {job_id: worker.measured[job_id] for job_id in estimated}, late)


class HttpAgreement(NamedTuple):
    """`gpu_s`: what the calls of a round are charged for; `busy_s`: for how long the engine had requests meanwhile;
    `cost`: the price of the calls, less that of `busy_s`, as a part of the latter.
    """

    gpu_s: float
    busy_s: float
    cost: float
    late: float


async def play_over_http(serving: Served, server: TimedServer, number: int) -> HttpAgreement:
    before_s = server.busy_seconds()
    entries, late = await play(serving, number)
    busy_s = server.busy_seconds() - before_s
    gpu_s = sum(entry.gpu_seconds or 0.0 for entry in entries)
    cost = sum(entry.cost_nanos or 0 for entry in entries) / NANOS_PER_UNIT
    return HttpAgreement(gpu_s, busy_s, cost / (busy_s * PRICE_PER_HOUR / 3600) - 1, late)
