"""A gateway killed at any time: no ceiling is exceeded over all restarts, and little budget is lost."""

import random

import pytest

from admission.builders import DAY, NOON, a_call, a_caller
from inferry.admission import watermarks
from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.watermarks import WatermarkTracker
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.spending import Spending, Watermark, WatermarkBatch
from inferry.domain.streams import Usage
from inferry.domain.tenants import Limits
from inferry.domain.values import replace

PRICES = {"m": Price(input=2.0, output=10.0)}
CEILING = 3_000
KEY_CEILING = 2_000
RUN_CEILING = 900
MONEY = 0.02


class Database:
    """What outlives a process: marks, and the rows that were written."""

    def __init__(self) -> None:
        self.watermarks: dict[tuple[str, str, str, str, int], Watermark] = {}
        self.rows: list[tuple[str, int, int]] = []

    def write(self, batch: WatermarkBatch) -> None:
        for watermark in batch.upserts:
            self.watermarks[_identity(watermark)] = watermark
        for watermark in batch.deletes:
            self.watermarks.pop(_identity(watermark), None)

    def spent(self, wall: float) -> list[Spending]:
        tokens, nanos = sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)
        runs: dict[str, list[int]] = {}
        for run, used, cost in self.rows:
            runs.setdefault(run, [0, 0])
            runs[run][0] += used
            runs[run][1] += cost
        day = Spending(tenant="a", period="day", tokens=tokens, nanos=nanos, at=wall)
        key = Spending(tenant="a", period="day", tokens=tokens, nanos=nanos, at=wall, key_id="k")
        of_runs = [
            Spending(tenant="a", period="run", tokens=used, nanos=cost, at=wall, run_id=run)
            for run, (used, cost) in runs.items()
        ]
        return [day, key, *of_runs]


class Job:
    def __init__(self, job: InferenceJob, permit: Permit) -> None:
        self.job = job
        self.permit = permit
        self.written = 0
        self.is_served = False


class World:
    """One gateway after the other on one database. Counts what clients really got."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk_rate = self.random.choice([0.5, 0.1])
        self.row_rate = self.random.choice([0.3, 0.01])
        self.database = Database()
        self.delivered: dict[str, int] = {}
        self.cost = 0
        self.most_leased = 0
        self.wall = NOON
        self.now = 0.0
        self.begin()

    def begin(self) -> None:
        self.gate = QuotaGate(PRICES, lease_tokens=32, watermarks=WatermarkTracker())
        assert self.gate.watermarks is not None
        self.watermarks = self.gate.watermarks
        self.on_its_way: WatermarkBatch | None = None
        self.jobs: list[Job] = []
        self.unwritten: list[tuple[str, int, int]] = []
        self.recorded = self.settled = 0
        self.most_leased = 0
        self.gate.restore(self.database.spent(self.wall), self.now)
        self.gate.restore_watermarks(list(self.database.watermarks.values()), self.now, self.wall)

    # -- what happens ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += self.random.random()
        act = self.random.choice([self.admit, self.admit, self.serve, self.serve, self.serve, self.end])
        act()
        if self.random.random() < self.disk_rate:
            self.disk()
        if self.random.random() < self.row_rate:
            self.rows()
        if self.random.random() < 0.2:
            self.watermarks.release_idle(self.now, self.recorded, self.settled, idle_s=1.0)
        leased = max((line.leased_tokens for line in self.gate.report("a")), default=0)
        self.most_leased = max(self.most_leased, leased)

    def admit(self) -> None:
        run = self.random.choice(["r", "s", "t", "u"])
        job = a_call(self.random.randint(1, 60), self.random.randint(1, 200), run=run)
        caller = a_caller(
            key=Limits(day_token_ceiling=KEY_CEILING),
            day_token_ceiling=CEILING,
            day_money_ceiling=MONEY,
            run_token_ceiling=RUN_CEILING,
        )
        try:
            self.jobs.append(Job(job, self.gate.admit(job, caller, (run,), self.now, self.wall)))
        except GatewayError:
            pass

    def serve(self) -> None:
        """A job that may be served gets its prompt computed, then some tokens."""
        if not self.jobs:
            return
        one = self.random.choice(self.jobs)
        if one.permit.watermark_batch > self.watermarks.written:
            return
        if not one.is_served:
            one.is_served = True
            self.deliver(one, one.job.footprint.prompt.expected, 0)
        granted_tokens = self.gate.renew(one.permit, one.written)
        count = min(self.random.randint(0, 40), granted_tokens - one.written, one.permit.output_cap - one.written)
        self.deliver(one, 0, max(0, count))

    def deliver(self, one: Job, prompt: int, output: int) -> None:
        one.written += output
        self.delivered[one.job.run_id] = self.delivered.get(one.job.run_id, 0) + prompt + output
        self.cost += 2_000 * prompt + 10_000 * output

    def end(self) -> None:
        if not self.jobs:
            return
        one = self.jobs.pop(self.random.randrange(len(self.jobs)))
        prompt = one.job.footprint.prompt.expected if one.is_served else 0
        usage = Usage(prompt, 0, one.written) if one.is_served else None
        cost = self.gate.settle(one.permit, usage, self.now, self.wall)
        self.unwritten.append((one.job.run_id, prompt + one.written, cost or 0))
        self.recorded += 1

    def disk(self) -> None:
        """A batch is taken, and later it is in the database, and later yet that is known."""
        if self.on_its_way is None:
            if self.watermarks.is_due:
                self.on_its_way = self.watermarks.take_batch(self.wall)
        else:
            self.database.write(self.on_its_way)
            if self.random.random() < 0.8:
                self.watermarks.batch_written(self.on_its_way.number, self.now)
                self.on_its_way = None

    def rows(self) -> None:
        count = self.random.randint(0, len(self.unwritten))
        self.database.rows += self.unwritten[:count]
        del self.unwritten[:count]
        self.settled += count

    def stop_cleanly(self) -> None:
        while self.jobs:
            self.end()
        self.database.rows += self.unwritten
        self.settled = self.recorded
        self.unwritten = []
        self.now += 100.0
        for _ in range(4):
            while self.on_its_way is not None or self.watermarks.is_due:
                self.disk()
            self.watermarks.release_idle(self.now, self.recorded, self.settled, idle_s=0.0)

    # -- what holds --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        total = sum(self.delivered.values())
        assert total <= min(CEILING, KEY_CEILING)
        assert self.cost <= MONEY * 1e9
        assert all(tokens <= RUN_CEILING for tokens in self.delivered.values())

    def counted(self) -> int:
        """What the tenant's account of the day counts as spent, as the next call finds it."""
        self.gate.admit(a_call(1, 1, run="z"), a_caller(day_token_ceiling=10**6), ("z",), self.now, self.wall)
        return next((line.spent_tokens for line in self.gate.report("a") if line.kind == "day"), 0)


def _identity(watermark: Watermark) -> tuple[str, str, str, str, int]:
    return watermark.scope, watermark.tenant, watermark.name, watermark.period, watermark.number


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of a test are small; so are its blocks."""
    monkeypatch.setattr(watermarks, "MIN_BLOCK_TOKENS", 100)
    monkeypatch.setattr(watermarks, "MIN_BLOCK_NANOS", 500_000)


@pytest.mark.plain
@pytest.mark.parametrize("seed", range(150))
def test_no_ceiling_is_exceeded_over_all_incarnations_of_a_killed_gateway(seed: int) -> None:
    world = World(seed)
    for _ in range(12):
        for _ in range(world.random.randint(1, 120)):
            world.step()
            world.check()
        if world.random.random() < 0.3:
            world.stop_cleanly()
        world.begin()  # killed where it stood, or after a clean stop
    assert sum(world.delivered.values()) > 100


@pytest.mark.plain
@pytest.mark.parametrize("seed", range(60))
def test_a_crash_costs_an_account_at_most_one_block_and_its_leases(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(1, 150)):
        world.step()
    leased = world.most_leased
    world.begin()
    assert 0 <= world.counted() - sum(world.delivered.values()) <= 100 + leased


@pytest.mark.plain
@pytest.mark.parametrize("seed", range(30))
def test_a_clean_stop_leaves_no_watermark(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(1, 150)):
        world.step()
    world.stop_cleanly()
    assert world.database.watermarks == {}
    world.begin()
    assert world.counted() == sum(world.delivered.values())


@pytest.mark.plain
def test_watermarks_of_another_day_and_of_ended_runs_are_deleted() -> None:
    world = World(1)
    for _ in range(60):
        world.step()
    while world.on_its_way is not None or world.watermarks.is_due:
        world.disk()
    assert world.database.watermarks
    world.database.rows.clear()
    world.wall += 2 * DAY
    world.begin()
    while world.on_its_way is not None or world.watermarks.is_due:
        world.disk()
    assert world.database.watermarks == {}
    assert world.counted() == 0


def test_without_a_watermark_store_no_job_waits() -> None:
    gate = QuotaGate(PRICES)
    caller = a_caller(day_token_ceiling=CEILING, run_token_ceiling=RUN_CEILING)
    assert gate.admit(a_call(), caller, ("r",), 0.0, NOON).watermark_batch == 0


def test_a_job_waits_for_a_watermark_at_most_once_per_block() -> None:
    kept = WatermarkTracker()
    gate = QuotaGate({}, watermarks=kept)
    caller = a_caller(day_token_ceiling=10_000_000)
    waited = 0
    for _ in range(2_000):
        permit = gate.admit(a_call(100, 100), caller, ("r",), 0.0, NOON)
        waited += permit.watermark_batch > kept.written
        if kept.is_due:
            kept.batch_written(kept.take_batch(NOON).number, 0.0)
        gate.settle(permit, Usage(100, 0, 100), 0.0, NOON)
    assert waited == 1
    assert kept.written <= 2 * 2_000 * 200 // watermarks.block_size(10_000_000, watermarks.MIN_BLOCK_TOKENS) + 2


def test_a_call_without_a_run_writes_no_watermark() -> None:
    kept = WatermarkTracker()
    gate = QuotaGate({}, watermarks=kept)
    job = replace(a_call(), run_id="j", job_id="j")
    assert gate.admit(job, a_caller(run_token_ceiling=1_000), ("j",), 0.0, NOON).watermark_batch == 0
    assert not kept.is_due


def test_a_stream_gets_no_more_than_the_database_knows_of() -> None:
    kept = WatermarkTracker()
    gate = QuotaGate({}, lease_tokens=50, watermarks=kept)
    caller = a_caller(run_token_ceiling=1_000_000)
    permit = gate.admit(a_call(10, 100_000), caller, ("run",), 0.0, NOON)
    kept.batch_written(kept.take_batch(NOON).number, 0.0)
    block_size = watermarks.block_size(1_000_000, watermarks.MIN_BLOCK_TOKENS)
    granted_tokens = permit.granted_tokens
    while (more := gate.renew(permit, granted_tokens)) > granted_tokens:
        granted_tokens = more
    assert 10 + granted_tokens == 10 + 50 + block_size
    assert gate.exhausted_error(permit).code == "ledger_unavailable"
    kept.batch_written(kept.take_batch(NOON).number, 0.0)
    assert gate.renew(permit, granted_tokens) > granted_tokens
