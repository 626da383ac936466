"""The ceilings of overflow: reserved before a call is sent, settled after it."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.admission.overflow_budget import DAY_CEILING, RUN_CEILING, OverflowBudget, OverflowReservation
from inferry.admission.watermarks import WatermarkTracker
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.spending import Spending, Watermark
from inferry.domain.values import replace
from support.builders import a_job

PRICE = {"m": Price(input=1.0, output=2.0)}
DAY_S = 86_400.0
DAY_CEILING_NANOS = 2_000_000


def a_call(output: int = 100, prompt: int = 50, body: bytes = b"{}", **fields: Any) -> InferenceJob:
    return replace(a_job(tokens=prompt, output=output, body=body, **fields), token_budget=output)


def reserved(
    budget: OverflowBudget, job: InferenceJob, *, run_id: str | None = None, wall: float = 0.0
) -> OverflowReservation:
    reservation = budget.reserve(job, run_id or job.run_id, 0.0, wall)
    assert isinstance(reservation, OverflowReservation)
    return reservation


def test_a_call_reserves_the_most_that_it_can_cost() -> None:
    budget = OverflowBudget(PRICE, 1.0)
    assert reserved(budget, a_call(output=100, prompt=50)).nanos == pytest.approx(50_000 + 200_000, abs=2)
    long_body = reserved(budget, a_call(output=100, prompt=50, body=b"x" * 400))
    assert long_body.nanos == pytest.approx(400_000 + 200_000, abs=2)


def test_a_reservation_beyond_the_ceiling_of_the_tenants_day_is_refused() -> None:
    one = 250_002 / NANOS_PER_UNIT
    budget = OverflowBudget(PRICE, 2 * one, tenant_day_ceilings={"rich": 3 * one, "none": 0.0})
    for tenant, calls in (("a", 2), ("b", 2), ("rich", 3), ("none", 0)):
        for number in range(calls):
            reserved(budget, a_call(tenant=tenant, run_id=f"{number}"))
        assert budget.reserve(a_call(tenant=tenant), "other", 0.0, 0.0) == DAY_CEILING


def test_the_ceiling_of_a_run_counts_its_sub_runs_and_no_other_run() -> None:
    budget = OverflowBudget(PRICE, 1.0, run_ceiling=250_002 / NANOS_PER_UNIT)
    reserved(budget, a_call(run_id="child"), run_id="root")
    assert budget.reserve(a_call(run_id="root"), "root", 0.0, 0.0) == RUN_CEILING
    reserved(budget, a_call(run_id="other"))


def test_the_rest_of_a_reservation_returns_when_the_call_has_ended() -> None:
    budget = OverflowBudget(PRICE, 300_000 / NANOS_PER_UNIT, run_ceiling=300_000 / NANOS_PER_UNIT)
    first = reserved(budget, a_call())
    assert budget.reserve(a_call(), "run", 0.0, 0.0) == DAY_CEILING
    budget.settle(first, 40_000)
    second = reserved(budget, a_call())
    budget.settle(second, 40_000)
    assert budget.spent_nanos == 80_000
    assert budget.overrun_nanos == 0


def test_a_call_that_cost_more_than_it_reserved_counts_in_full() -> None:
    budget = OverflowBudget(PRICE, 1.0)
    one = reserved(budget, a_call())
    budget.settle(one, one.nanos + 7)
    assert one.accounts[0].committed_nanos == one.nanos + 7
    assert budget.overrun_nanos == 7


def test_a_new_day_has_a_new_ceiling_and_a_call_is_charged_to_the_day_of_its_reservation() -> None:
    budget = OverflowBudget(PRICE, 260_000 / NANOS_PER_UNIT)
    yesterday = reserved(budget, a_call(run_id="1"))
    today = reserved(budget, a_call(run_id="2"), wall=DAY_S)
    budget.settle(yesterday, 250_000)
    assert today.accounts[0].committed_nanos == today.nanos
    assert budget.reserve(a_call(run_id="3"), "3", 0.0, DAY_S) == DAY_CEILING


def test_a_model_without_a_price_per_token_never_overflows() -> None:
    for prices in ({}, {"other": Price(input=1.0)}, {"m": Price(gpu_hour=2.0)}):
        assert OverflowBudget(prices, 1e6).reserve(a_call(), "run", 0.0, 0.0) == DAY_CEILING
    reserved(OverflowBudget({"*": Price(input=1.0)}, 1e6), a_call())


def test_spending_of_the_ledger_counts_after_a_restart() -> None:
    budget = OverflowBudget(PRICE, 300_000 / NANOS_PER_UNIT, run_ceiling=300_000 / NANOS_PER_UNIT)
    spent = [
        Spending(tenant="a", period="day", tokens=0, nanos=100_000, at=0.0),
        Spending(tenant="b", period="run", tokens=0, nanos=100_000, at=0.0, run_id="run"),
    ]
    budget.restore(spent, 0.0, 0.0)
    assert budget.reserve(a_call(tenant="a"), "run", 0.0, 0.0) == DAY_CEILING
    assert budget.reserve(a_call(tenant="b"), "run", 0.0, 0.0) == RUN_CEILING
    reserved(budget, a_call(tenant="b", run_id="new"))


@pytest.mark.parametrize("seed", range(20))
def test_spent_and_reserved_never_exceed_a_ceiling(seed: int) -> None:
    """Any order of reservations and ends, where no call costs more than it reserved."""
    rng = random.Random(seed)
    budget = OverflowBudget(PRICE, 0.004, run_ceiling=0.002)
    held: list[OverflowReservation] = []
    refused = 0
    for _ in range(2000):
        if held and rng.random() < 0.45:
            one = held.pop(rng.randrange(len(held)))
            budget.settle(one, rng.randint(0, one.nanos // 8))
        else:
            job = a_call(
                output=rng.randint(1, 400),
                prompt=rng.randint(1, 400),
                tenant=rng.choice("ab"),
                run_id=rng.choice("xyz"),
            )
            reservation = budget.reserve(job, job.run_id, 0.0, 0.0)
            if isinstance(reservation, str):
                refused += 1
                continue
            held.append(reservation)
        for one in held:
            assert all(account.committed_nanos <= account.nano_ceiling for account in one.accounts)
    assert refused
    for one in held:
        budget.settle(one, 0)
        assert all(account.committed_nanos >= account.spent_nanos for account in one.accounts)
    assert all(account.leased_nanos == 0 for one in held for account in one.accounts)


class KilledProcess:
    """A budget, what the database has of it, and what was sent. `kill` starts it again from the database alone."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, str, str, int], Watermark] = {}
        self.in_ledger: list[Spending] = []
        self.sent_nanos: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self.tracker = WatermarkTracker()
        self.budget = OverflowBudget(PRICE, DAY_CEILING_NANOS / NANOS_PER_UNIT, watermarks=self.tracker)
        self.budget.restore(self.in_ledger, 0.0, 0.0)
        self.budget.restore_watermarks(self.marks.values(), 0.0, 0.0)
        self.held: list[tuple[str, OverflowReservation]] = []
        self.running: list[tuple[str, OverflowReservation]] = []

    def arrive(self, tenant: str, output: int) -> None:
        job = a_call(output=output, tenant=tenant)
        reservation = self.budget.reserve(job, job.run_id, 0.0, 0.0)
        if isinstance(reservation, OverflowReservation):
            self.held.append((tenant, reservation))
            self.send_covered()

    def write(self) -> None:
        if self.tracker.is_due:
            batch = self.tracker.take_batch(0.0)
            for mark in batch.deletes:
                self.marks.pop((mark.scope, mark.tenant, mark.name, mark.number), None)
            self.marks |= {(mark.scope, mark.tenant, mark.name, mark.number): mark for mark in batch.upserts}
            self.tracker.batch_written(batch.number, 0.0)
            self.send_covered()

    def send_covered(self) -> None:
        covered = [one for one in self.held if one[1].watermark_batch <= self.tracker.written]
        self.held = [one for one in self.held if one not in covered]
        self.running += covered

    def end(self, index: int, part: float) -> None:
        """A call has ended, and its row is in the ledger."""
        tenant, reservation = self.running.pop(index)
        nanos = int(reservation.nanos * part)
        self.budget.settle(reservation, nanos)
        self.sent_nanos[tenant] += nanos
        self.in_ledger.append(Spending(tenant=tenant, period="day", tokens=0, nanos=nanos, at=0.0))

    def kill(self) -> None:
        for tenant, reservation in self.running:
            self.sent_nanos[tenant] += reservation.nanos  # the provider may charge all of it
        self.start()


@given(st.data())
def test_no_day_costs_more_than_its_ceiling_whenever_the_process_is_killed(data: st.DataObject) -> None:
    process = KilledProcess()
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["arrive", "arrive", "write", "end", "release", "kill"])):
            case "arrive":
                process.arrive(data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 300)))
            case "write":
                process.write()
            case "end" if process.running:
                process.end(data.draw(st.integers(0, len(process.running) - 1)), data.draw(st.floats(0, 1)))
            case "release":
                process.tracker.release_idle(100.0, 0, 0)
            case "kill":
                process.kill()
    process.kill()
    assert max(process.sent_nanos.values(), default=0) <= DAY_CEILING_NANOS


def test_a_run_that_was_in_flight_when_the_process_was_killed_counts_for_its_ceiling() -> None:
    tracker = WatermarkTracker()
    run_ceiling = 300_000 / NANOS_PER_UNIT
    assert reserved(OverflowBudget(PRICE, 1.0, run_ceiling, watermarks=tracker), a_call()).watermark_batch == 1
    marks = tracker.take_batch(0.0).upserts
    assert sorted(mark.scope for mark in marks) == ["overflow", "overflow_run"]
    after = OverflowBudget(PRICE, 1.0, run_ceiling, watermarks=(later := WatermarkTracker()))
    assert after.restore_watermarks(marks, 0.0, 0.0) == 2
    assert after.reserve(a_call(), a_call().run_id, 0.0, 0.0) == RUN_CEILING
    next_day = OverflowBudget(PRICE, 1.0, watermarks=later)
    assert next_day.restore_watermarks(marks, 0.0, 2 * DAY_S) == 0, "the day and the run are over"
    assert len(later.take_batch(0.0).deletes) == 2
