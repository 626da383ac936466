"""Whatever is killed whenever: over all incarnations of a gateway, no ceiling is exceeded, and little of it is lost."""

import random

import pytest

from admission.callers import DAY, NOON, a_call, a_caller
from inferry.admission import marks
from inferry.admission.gate import Gate
from inferry.admission.marks import Marks
from inferry.admission.permits import Permit
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.spending import Mark, MarkBatch, Spent
from inferry.domain.streams import Usage
from inferry.domain.tenants import Limits, Price
from inferry.domain.values import replace

PRICES = {"m": Price(input=2.0, output=10.0)}
CEILING = 3_000
KEY_CEILING = 2_000
RUN_CEILING = 900
MONEY = 0.02


class Database:
    """What outlives a process: marks, and the rows that were written."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, str, str, str, int], Mark] = {}
        self.rows: list[tuple[str, int, int]] = []

    def write(self, batch: MarkBatch) -> None:
        for mark in batch.kept:
            self.marks[_identity(mark)] = mark
        for mark in batch.gone:
            self.marks.pop(_identity(mark), None)

    def spent(self, wall: float) -> list[Spent]:
        tokens, nanos = sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)
        runs: dict[str, list[int]] = {}
        for run, used, cost in self.rows:
            runs.setdefault(run, [0, 0])
            runs[run][0] += used
            runs[run][1] += cost
        day = Spent(tenant="a", period="day", tokens=tokens, nanos=nanos, at=wall)
        key = Spent(tenant="a", period="day", tokens=tokens, nanos=nanos, at=wall, key_id="k")
        of_runs = [
            Spent(tenant="a", period="run", tokens=used, nanos=cost, at=wall, run_id=run)
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
        self.gate = Gate(PRICES, lease_tokens=32, marks=Marks())
        assert self.gate.marks is not None
        self.marks = self.gate.marks
        self.on_its_way: MarkBatch | None = None
        self.jobs: list[Job] = []
        self.unwritten: list[tuple[str, int, int]] = []
        self.recorded = self.settled = 0
        self.most_leased = 0
        self.gate.restore(self.database.spent(self.wall), self.now)
        self.gate.restore_marks(list(self.database.marks.values()), self.now, self.wall)

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
            self.marks.retire(self.now, self.recorded, self.settled, idle_s=1.0)
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
        if one.permit.batch > self.marks.written:
            return
        if not one.is_served:
            one.is_served = True
            self.deliver(one, one.job.footprint.prompt.expected, 0)
        may_write = self.gate.renew(one.permit, one.written)
        count = min(self.random.randint(0, 40), may_write - one.written, one.permit.output_cap - one.written)
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
            if self.marks.is_due:
                self.on_its_way = self.marks.take(self.wall)
        else:
            self.database.write(self.on_its_way)
            if self.random.random() < 0.8:
                self.marks.wrote(self.on_its_way.number, self.now)
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
            while self.on_its_way is not None or self.marks.is_due:
                self.disk()
            self.marks.retire(self.now, self.recorded, self.settled, idle_s=0.0)

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


def _identity(mark: Mark) -> tuple[str, str, str, str, int]:
    return mark.scope, mark.tenant, mark.name, mark.period, mark.number


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of a test are small; so are its blocks."""
    monkeypatch.setattr(marks, "LEAST_BLOCK_TOKENS", 100)
    monkeypatch.setattr(marks, "LEAST_BLOCK_NANOS", 500_000)


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
def test_a_clean_stop_costs_nothing_and_leaves_no_mark(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(1, 150)):
        world.step()
    world.stop_cleanly()
    assert world.database.marks == {}
    world.begin()
    assert world.counted() == sum(world.delivered.values())


@pytest.mark.plain
def test_marks_of_another_day_and_of_runs_long_over_are_deleted() -> None:
    world = World(1)
    for _ in range(60):
        world.step()
    while world.on_its_way is not None or world.marks.is_due:
        world.disk()
    assert world.database.marks
    world.database.rows.clear()
    world.wall += 2 * DAY
    world.begin()
    while world.on_its_way is not None or world.marks.is_due:
        world.disk()
    assert world.database.marks == {}
    assert world.counted() == 0


def test_without_a_database_for_marks_no_job_waits() -> None:
    gate = Gate(PRICES)
    caller = a_caller(day_token_ceiling=CEILING, run_token_ceiling=RUN_CEILING)
    assert gate.admit(a_call(), caller, ("r",), 0.0, NOON).batch == 0


def test_a_job_waits_for_a_mark_once_per_block_and_not_for_the_one_that_is_raised_ahead() -> None:
    kept = Marks()
    gate = Gate({}, marks=kept)
    caller = a_caller(day_token_ceiling=10_000_000)
    waited = 0
    for _ in range(2_000):
        permit = gate.admit(a_call(100, 100), caller, ("r",), 0.0, NOON)
        waited += permit.batch > kept.written
        if kept.is_due:
            kept.wrote(kept.take(NOON).number, 0.0)
        gate.settle(permit, Usage(100, 0, 100), 0.0, NOON)
    assert waited == 1
    assert kept.written <= 2 * 2_000 * 200 // marks.block(10_000_000, marks.LEAST_BLOCK_TOKENS) + 2


def test_a_call_that_names_no_run_writes_no_mark_for_it() -> None:
    kept = Marks()
    gate = Gate({}, marks=kept)
    job = replace(a_call(), run_id="j", job_id="j")
    assert gate.admit(job, a_caller(run_token_ceiling=1_000), ("j",), 0.0, NOON).batch == 0
    assert not kept.is_due


def test_a_stream_gets_no_more_than_the_database_knows_of() -> None:
    kept = Marks()
    gate = Gate({}, lease_tokens=50, marks=kept)
    caller = a_caller(run_token_ceiling=1_000_000)
    permit = gate.admit(a_call(10, 100_000), caller, ("run",), 0.0, NOON)
    kept.wrote(kept.take(NOON).number, 0.0)
    block = marks.block(1_000_000, marks.LEAST_BLOCK_TOKENS)
    may_write = permit.may_write
    while (more := gate.renew(permit, may_write)) > may_write:
        may_write = more
    assert 10 + may_write == 10 + 50 + block
    assert gate.exhausted(permit).code == "ledger_unavailable"
    kept.wrote(kept.take(NOON).number, 0.0)
    assert gate.renew(permit, may_write) > may_write
