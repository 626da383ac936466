"""GPU time of attempts and workers in the gateway, in virtual time: measured, estimated, wasted, idle."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from inferry.admission.quota_gate import QuotaGate
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.gpu_accounting import ROW_INTERVAL_S
from inferry.dispatch.pool import Pool
from inferry.domain.callers import Caller
from inferry.domain.errors import TenantBudgetExhausted
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import GpuTimeKind, LedgerEntry, Outcome
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.prices import Price
from inferry.domain.streams import Done, Failed, FinishReason, Item, Usage
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock

WORDS = tuple(f" w{number}" for number in range(20))


class Engine(ScriptedWorker):
    """Says a word every 0.1 s. `busy_s` None: it does not measure; `probes` do not count."""

    def __init__(self, *, gpus: int = 1, measures: bool = False) -> None:
        super().__init__("w", words=WORDS, clock=LoopClock(), pause_s=0.1)
        self._gpus = gpus
        self._measures = measures
        self.busy_s = 0.0

    def view(self) -> WorkerView:
        return replace(super().view(), gpus=self._gpus, busy_s=self.busy_s if self._measures else None)

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        def pass_on(item: Item) -> None:
            if isinstance(item, Done | Failed):
                usage = item.usage
                measured = 0.5 if self._measures else None
                self.busy_s += measured or 0.0
                item = replace(item, usage=Usage(usage.prompt_tokens, 0, usage.output_tokens, measured))
            emit(item)

        await super().run(plan, pass_on)


class Served:
    def __init__(self, worker: Engine, prices: Mapping[str, Price]) -> None:
        self.worker = worker
        self.clock = LoopClock()
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.metrics = Metrics(["m"], ["w"])
        self.pool = Pool([worker], self.clock)
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
            gate=QuotaGate(prices),
        )

    async def call(self, job_id: str) -> None:
        await read(self.gateway.submit(a_job(job_id, at=self.clock.now(), output=30, stream=True)))

    def entry(self, job_id: str) -> LedgerEntry:
        assert self.recorder.flush(30)
        return next(entry for entry in self.ledger.entries if entry.job_id == job_id)

    def by_kind(self) -> dict[str, float]:
        return {
            kind.value: sum(row.gpu_seconds for row in self.ledger.gpu_time if row.kind == kind.value)
            for kind in GpuTimeKind
        }


@asynccontextmanager
async def served(worker: Engine, prices: Mapping[str, Price] | None = None) -> AsyncIterator[Served]:
    env = Served(worker, prices or {})
    env.gateway.start()
    while env.pool.view("w").phase is not Phase.READY:
        await asyncio.sleep(0.01)
    env.gateway.account_gpu_time(env.clock.now())
    try:
        yield env
    finally:
        await env.gateway.close()


def test_calls_that_run_together_share_the_time_and_the_rest_is_idle() -> None:
    worker, kinds = Engine(gpus=4), dict[str, float]()

    async def play() -> None:
        async with served(worker) as env:
            started_at = env.clock.now()
            await asyncio.gather(env.call("a"), env.call("b"))
            for job_id in ("a", "b"):
                entry = env.entry(job_id)
                assert entry.gpu_seconds == pytest.approx(4 * 2.0 / 2, rel=0.1)
                assert entry.gpu_estimated is True
                assert entry.engine_batch == pytest.approx(2.0, rel=0.05)
                assert entry.batch_fill == pytest.approx(2.0 / 8, rel=0.05)
            await asyncio.sleep(ROW_INTERVAL_S)
            env.gateway.account_gpu_time(env.clock.now())
            kinds["wall"] = (env.clock.now() - started_at) * 4
        kinds.update(env.by_kind())

    run(play())
    assert kinds["work"] == pytest.approx(8.0, rel=0.05)
    assert sum(kinds.values()) - kinds["wall"] == pytest.approx(kinds["wall"], rel=0.02)


def test_a_call_is_stopped_when_its_gpu_time_reaches_a_money_ceiling() -> None:
    kinds = dict[str, float]()
    limited = Caller(tenant=Tenant(name="t", limits=Limits(day_money_ceiling=0.001)))  # one GPU-second

    async def play() -> None:
        async with served(Engine(), prices={"m": Price(gpu_hour=3.6)}) as env:
            job = a_job("stopped", tenant="t", at=env.clock.now(), output=30, stream=True)
            deltas, end = await read(env.gateway.submit(job, limited))
            assert isinstance(end, Done)
            assert (end.finish, type(end.stopped)) == (FinishReason.LENGTH, TenantBudgetExhausted)
            assert 10 <= sum(delta.tokens for delta in deltas) <= 13, "a token every 0.1 s"
            entry = env.entry("stopped")
            assert entry.gpu_seconds == pytest.approx(1.15, rel=0.15)
            with pytest.raises(TenantBudgetExhausted):
                env.gateway.submit(replace(job, job_id="late"), limited)
            _, end = await read(env.gateway.submit(a_job("free", at=env.clock.now(), output=30, stream=True)))
            assert isinstance(end, Done)
            assert end.stopped is None, "a tenant without a ceiling is not stopped"
        kinds.update(env.by_kind())

    run(play())
    assert kinds["work"] == pytest.approx(3.15, rel=0.1)


def test_the_time_of_a_cancelled_call_is_waste() -> None:
    kinds = dict[str, float]()

    async def play() -> None:
        async with served(Engine()) as env:
            reading = asyncio.get_running_loop().create_task(env.call("gone"))
            await asyncio.sleep(1.05)
            env.gateway.cancel("gone")
            await reading
            entry = env.entry("gone")
            assert entry.outcome is Outcome.CANCELLED
            assert entry.gpu_seconds == pytest.approx(1.05, rel=0.05)
        kinds.update(env.by_kind())

    run(play())
    assert kinds["cancelled"] == pytest.approx(1.05, rel=0.05)
    assert kinds["work"] == pytest.approx(0.0, abs=0.05)


def test_measured_time_is_taken_as_it_is_and_what_no_call_owns_is_unattributed() -> None:
    kinds = dict[str, float]()

    async def play() -> None:
        async with served(Engine(gpus=2, measures=True)) as env:
            await env.call("a")
            env.worker.busy_s += 0.25  # steps of no call of the gateway
            await asyncio.sleep(1.0)
            entry = env.entry("a")
            assert (entry.gpu_seconds, entry.gpu_estimated) == (1.0, False)
        kinds.update(env.by_kind())

    run(play())
    assert kinds["work"] == pytest.approx(1.0)
    assert kinds["unattributed"] == pytest.approx(0.5)


def test_a_worker_without_gpus_of_its_own_has_no_gpu_time() -> None:
    async def play() -> None:
        async with served(Engine(gpus=0)) as env:
            await env.call("a")
            assert (env.entry("a").gpu_seconds, env.entry("a").gpu_estimated) == (None, None)
        assert env.ledger.gpu_time == []

    run(play())


def test_metrics_have_the_gpu_seconds_by_kind_and_the_busy_part_of_the_last_interval() -> None:
    async def play() -> None:
        async with served(Engine()) as env:
            await env.call("a")
            env.gateway.account_gpu_time(env.clock.now())
            page = env.metrics.render()[0].decode()
            values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
            assert float(values['inferry_gpu_seconds_total{worker="w",kind="work"}']) == pytest.approx(2.0, rel=0.05)
            assert float(values['inferry_worker_gpu_utilization_ratio{worker="w"}']) >= 0.95
            await asyncio.sleep(5.0)
            env.gateway.account_gpu_time(env.clock.now())
            assert 'inferry_worker_gpu_utilization_ratio{worker="w"} 0.0' in env.metrics.render()[0].decode()

    run(play())
