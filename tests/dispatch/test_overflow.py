"""Overflow in the dispatch loop, in virtual time: own workers, a hosted one, and a ceiling of cost."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.admission.overflow_budget import OverflowBudget
from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.errors import NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.ports import ModelCard
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.streams import Done, End
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from support.builders import a_job
from support.loop_helpers import ListLedger, read, run, run_pending
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock

PRICES = {"*": Price(input=1.0, output=1.0)}
OUTPUT = 4
COST = 50 + OUTPUT
"""Tokens of a call, which is its cost in thousandths of the smallest unit."""


class HostedWorker(ScriptedWorker):
    def view(self) -> WorkerView:
        return replace(super().view(), overflow=True)


class OwnWorker(ScriptedWorker):
    """Supports tools, which the hosted worker does not. `is_startable`: False where it never comes up."""

    is_startable = True

    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(name=model, features=frozenset({"tools"}), can_resume=True) for model in self._models]

    async def start(self) -> None:
        if not self.is_startable:
            raise WorkerLost("the script said so")
        await super().start()


class Fleet:
    """One own worker with `slots` calls at a time, each of 0.4 s, and a hosted worker that takes all calls at once.

    With `other`, there are as many own and hosted workers of another model `n`.
    """

    def __init__(
        self, budget: OverflowBudget | None, *, slots: int = 4, hosted_slots: int = 1000, other: bool = False
    ) -> None:
        self.clock = LoopClock()
        words = ("a", " b", " c", " d")
        self.own = OwnWorker("own", words=words, clock=self.clock, capacity=Capacity(sequences=slots), pause_s=0.1)
        self.hosted = HostedWorker(
            "hosted", words=words, clock=self.clock, capacity=Capacity(sequences=hosted_slots), pause_s=0.05
        )
        workers: list[ScriptedWorker] = [self.own, self.hosted]
        if other:
            own, hosted = Capacity(sequences=slots), Capacity(sequences=hosted_slots)
            workers.append(OwnWorker("own-n", models=["n"], words=words, clock=self.clock, capacity=own, pause_s=0.1))
            workers.append(
                HostedWorker("hosted-n", models=["n"], words=words, clock=self.clock, capacity=hosted, pause_s=0.05)
            )
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.pool = Pool(workers, self.clock, health=HealthPolicy())
        self.metrics = Metrics(["m", "n"], [worker.name for worker in workers])
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES,
            pool=self.pool,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
            overflow=budget,
        )

    def job(self, **fields: Any) -> InferenceJob:
        fields = {"lane": Lane.P0, "output": OUTPUT, "stream": True} | fields
        return replace(a_job(at=self.clock.now(), **fields), token_budget=OUTPUT)

    async def call(self, job: InferenceJob) -> End:
        _, end = await read(self.gateway.submit(job))
        return end

    async def load(self, seed: int, rate: float, seconds: float, **fields: Any) -> list["asyncio.Task[End]"]:
        """Calls at random times, `rate` a second."""
        rng = random.Random(seed)
        calls = []
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            calls.append(asyncio.create_task(self.call(self.job(**fields))))
            await asyncio.sleep(rng.expovariate(rate))
        return calls

    def set_own(self, phase: Phase) -> None:
        """The own worker goes down, or comes back."""
        self.own.phase = phase
        self.pool.refresh_view("own")

    def entries(self) -> list[LedgerEntry]:
        self.recorder.flush(120)
        return self.ledger.entries

    def metric(self, line: str) -> float:
        rows = self.metrics.render()[0].decode().splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(line))


@asynccontextmanager
async def a_fleet(budget: OverflowBudget | None, *, is_own_up: bool = True, **fields: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(budget, **fields)
    fleet.own.is_startable = is_own_up
    fleet.gateway.start()
    while any(view.phase is not Phase.READY for view in fleet.pool.views() if is_own_up or view.overflow):
        await asyncio.sleep(0)
    try:
        yield fleet
    finally:
        await fleet.gateway.close()


def a_budget(calls: float = 1e6, **fields: Any) -> OverflowBudget:
    """A day ceiling for this many calls."""
    return OverflowBudget(PRICES, calls * (COST * 1000 + 2) / NANOS_PER_UNIT, **fields)


async def burst(fleet: Fleet, seed: int, **fields: Any) -> tuple[list[End], list[End | BaseException]]:
    """10 s at 0.6 of the capacity, then 10 s at three times the capacity: the answers of each."""
    before = await fleet.load(seed, 6.0, 10.0, **fields)
    during = await fleet.load(seed + 100, 30.0, 10.0, **fields)
    return list(await asyncio.gather(*before)), list(await asyncio.gather(*during, return_exceptions=True))


def overflow_of(entry: LedgerEntry) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(entry.decision or "{}").get("overflow")
    return found


@pytest.mark.parametrize("seed", range(3))
def test_in_a_burst_at_three_times_the_capacity_targets_are_met_and_own_workers_stay_busy(seed: int) -> None:
    async def act() -> None:
        async with a_fleet(a_budget()) as fleet:
            _, answers = await burst(fleet, seed)
            assert all(isinstance(end, Done) for end in answers)
            rows = fleet.entries()
            late = [row for row in rows if (row.first_token_ms or 0.0) > 500]
            assert len(late) <= 0.05 * len(rows)
            hosted = [row for row in rows if row.worker == "hosted"]
            assert 0.5 * len(answers) < len(hosted) < 0.75 * len(answers)
            assert {row.worker for row in rows if overflow_of(row)} == {"hosted"}

    run(act())


def test_without_overflow_the_hosted_worker_gets_no_call() -> None:
    async def act() -> None:
        async with a_fleet(None) as fleet:
            await burst(fleet, 1)
            assert {row.worker for row in fleet.entries()} == {"own"}

    run(act())


@pytest.mark.parametrize("seed", range(3))
def test_not_one_call_goes_beyond_the_ceiling(seed: int) -> None:
    async def act() -> None:
        async with a_fleet(a_budget(calls=25)) as fleet:
            await burst(fleet, seed)
            rows = [row for row in fleet.entries() if row.worker == "hosted"]
            assert len(rows) == 25
            assert sum((overflow_of(row) or {})["cost_nanos"] for row in rows) == 25 * COST * 1000
            assert fleet.metric('inferry_overflow_refusals_total{limit="day_money_ceiling"}') > 0
            assert fleet.metric("inferry_overflow_cost_total") == pytest.approx(25 * COST * 1000 / NANOS_PER_UNIT)

    run(act())


def test_a_call_with_a_deadline_that_would_be_refused_overflows() -> None:
    async def act() -> None:
        async with a_fleet(a_budget()) as fleet:
            now = fleet.clock.now
            calls = await fleet.load(1, 30.0, 10.0, lane=Lane.P2)
            calls += [asyncio.create_task(fleet.call(fleet.job(lane=Lane.P2, deadline=now() + 2.0))) for _ in range(5)]
            assert all(isinstance(end, Done) for end in await asyncio.gather(*calls))
            overflowed = [row for row in fleet.entries() if row.worker == "hosted"]
            assert [(overflow_of(row) or {})["reason"] for row in overflowed] == ["deadline"] * 5
            assert all((overflow_of(row) or {})["wait_ms"] > 2000 for row in overflowed)

    run(act())


def test_while_own_workers_are_down_live_calls_overflow_within_the_run_ceiling() -> None:
    async def act() -> None:
        budget = a_budget(run_ceiling=2 * (COST * 1000 + 2) / NANOS_PER_UNIT)
        async with a_fleet(budget) as fleet:
            fleet.set_own(Phase.DOWN)
            calls = [asyncio.create_task(fleet.call(fleet.job(run_id="r"))) for _ in range(4)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await run_pending()
            fleet.set_own(Phase.READY)
            await asyncio.gather(*calls, return_exceptions=True)
            rows = fleet.entries()
            assert sorted(str(row.worker) for row in rows if overflow_of(row)) == ["hosted", "hosted"]
            assert all(overflow_of(row) == {"reason": "target", "cost_nanos": COST * 1000} for row in rows[:2])
            assert fleet.metric('inferry_overflow_refusals_total{limit="run_money_ceiling"}') == 2

    run(act())


def test_a_hosted_worker_takes_no_more_than_its_capacity() -> None:
    async def act() -> None:
        async with a_fleet(a_budget(), hosted_slots=2) as fleet:
            await burst(fleet, 1)
            assert fleet.metric('inferry_overflow_refusals_total{limit="capacity"}') > 0
            assert all(len(plan.jobs) <= 2 for plan in fleet.hosted.plans)

    run(act())


def test_a_lost_hosted_attempt_is_charged_in_full_and_retried_on_own_workers() -> None:
    async def act() -> None:
        budget = a_budget()
        async with a_fleet(budget) as fleet:
            fleet.set_own(Phase.DOWN)
            fleet.hosted.dies_after = 0
            call = asyncio.create_task(fleet.call(fleet.job()))
            await run_pending()
            assert fleet.hosted.plans
            fleet.set_own(Phase.READY)
            assert isinstance(await call, Done)
            first, second = fleet.entries()
            assert (first.worker, first.outcome) == ("hosted", Outcome.FAILED)
            assert (second.worker, second.outcome, overflow_of(second)) == ("own", Outcome.DONE, None)
            assert (overflow_of(first) or {})["cost_nanos"] == budget.spent_nanos > COST * 1000

    run(act())


def test_a_call_that_is_cancelled_returns_what_it_had_reserved() -> None:
    async def act() -> None:
        budget = a_budget(calls=1)
        async with a_fleet(budget, hosted_slots=1) as fleet:
            fleet.set_own(Phase.DOWN)
            fleet.hosted.gate.clear()
            stream = fleet.gateway.submit(fleet.job())
            fleet.gateway.cancel(stream.attempt.job.job_id)  # before the tick that would have sent it
            await read(stream)
            assert budget.spent_nanos == 0
            fleet.hosted.gate.set()
            assert isinstance(await fleet.call(fleet.job()), Done)

    run(act())


def test_own_workers_decide_what_a_model_supports() -> None:
    async def act() -> None:
        async with a_fleet(a_budget()) as fleet:
            card = fleet.gateway.models.cards()["m"]
            assert (card.features, card.can_resume) == (frozenset({"tools"}), True)
            assert fleet.pool.worker_count("m") == 1, "a hosted worker resumes nothing"

    run(act())


def test_a_call_with_a_feature_that_the_hosted_worker_lacks_does_not_overflow() -> None:
    async def act() -> None:
        async with a_fleet(a_budget()) as fleet:
            fleet.set_own(Phase.DOWN)
            tools = asyncio.create_task(fleet.call(replace(fleet.job(), features=("tools",))))
            plain = asyncio.create_task(fleet.call(fleet.job()))
            await plain
            assert not tools.done()
            fleet.set_own(Phase.READY)
            assert isinstance(await tools, Done)
            assert [row.worker for row in fleet.entries()] == ["hosted", "own"]

    run(act())


def test_a_prompt_beyond_the_context_of_the_hosted_worker_does_not_overflow() -> None:
    async def act() -> None:
        async with a_fleet(a_budget(calls=1e9)) as fleet:
            fleet.set_own(Phase.DOWN)
            call = asyncio.create_task(fleet.call(fleet.job(tokens=4096 - OUTPUT + 1)))
            await run_pending()
            assert not fleet.hosted.plans
            await fleet.call(fleet.job(tokens=4096 - OUTPUT))
            fleet.set_own(Phase.READY)
            assert isinstance(await call, Done)

    run(act())


def test_the_queue_of_one_model_makes_no_call_of_another_overflow() -> None:
    async def act() -> None:
        async with a_fleet(a_budget(), other=True) as fleet:
            calls = await fleet.load(1, 30.0, 10.0, lane=Lane.P2)
            in_two_seconds = fleet.clock.now() + 2.0
            others = [fleet.call(fleet.job(lane=Lane.P2, model="n", deadline=in_two_seconds)) for _ in range(3)]
            same = [fleet.call(fleet.job(lane=Lane.P2, deadline=in_two_seconds)) for _ in range(3)]
            await asyncio.gather(*others, *same, *calls)
            rows = fleet.entries()
            assert {row.worker for row in rows if row.model == "n"} == {"own-n"}
            assert len([row for row in rows if row.worker == "hosted"]) == 3

    run(act())


def test_hosted_calls_of_one_model_take_no_capacity_of_another() -> None:
    async def act() -> None:
        async with a_fleet(a_budget(), hosted_slots=1, other=True) as fleet:
            for name in ("own", "own-n"):
                worker = fleet.pool.worker(name)
                assert isinstance(worker, OwnWorker)
                worker.phase = Phase.DOWN
                fleet.pool.refresh_view(name)
            calls = [asyncio.create_task(fleet.call(fleet.job(model=model))) for model in ("m", "n")]
            assert all(isinstance(end, Done) for end in await asyncio.gather(*calls))
            assert sorted(str(row.worker) for row in fleet.entries()) == ["hosted", "hosted-n"]

    run(act())


def test_calls_overflow_where_no_own_worker_has_ever_been_up_until_the_ceiling() -> None:
    async def act() -> None:
        async with a_fleet(a_budget(calls=2), is_own_up=False) as fleet:
            for _ in range(2):
                assert isinstance(await fleet.call(fleet.job()), Done)
            with pytest.raises(NoWorker):
                await fleet.call(fleet.job())
            assert [row.worker for row in fleet.entries()] == ["hosted", "hosted"]

    run(act())
