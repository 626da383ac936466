"""Overflow in a burst at three times the capacity, in the simulator: deadlines met, and cost against the ceilings.

One engine (the calibrated H200 model) serves live calls with deadlines: 30 s at 0.6 of its capacity, 30 s at three
times its capacity, then 30 s at 0.6. The hosted API is modelled by its latency: a first token after 0.4 s and 15 ms for
each further one. Calls are redirected by the gateway's own `OverflowRouter`, with the predictions of its wait model.

Three arms for each seed: `off`; `ample`, with ceilings that never bind; `tight`, with the day ceiling of every tenant
at a third of what that tenant cost in `ample`. After every reservation the sum of spent and reserved is compared with
the ceiling: `calls_beyond_ceiling` counts those above it.
"""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.wait_simulation import PredictingFrontend
from inferry.admission.overflow_budget import OverflowBudget, OverflowReservation
from inferry.dispatch.overflow import OverflowRouter
from inferry.domain.attempts import Attempt
from inferry.domain.clock import ManualClock
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ports import ModelCard
from inferry.domain.prices import NANOS_PER_UNIT, Price
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.prediction.overflow_rule import OverflowRule
from inferry.prediction.wait_model import deadline_refusal
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.calls import MODEL, Call, CallRow, Run
from inferry.sim.costs import load_model
from inferry.sim.simulation import Simulation

SEEDS = tuple(range(1, 6))
QUIET_S, BURST_S = 30.0, 30.0
QUIET, BURST = 0.6, 3.0
CAPACITY_PER_S = 45.0
"""Calls of this mix that the engine serves in a second within their targets."""
LENGTHS = {Lane.P0: uniform_lengths((200, 1200), (20, 120)), Lane.P1: uniform_lengths((200, 1600), (20, 200))}
PARTS = {Lane.P0: 0.4, Lane.P1: 0.6}
DEADLINE_S = {Lane.P0: 8.0, Lane.P1: 20.0}
"""Seconds until the whole answer."""
TENANTS = ("a", "b", "c")
PRICE = Price(input=0.2, output=0.6)
HOSTED_FIRST_TOKEN_S, HOSTED_TOKEN_S = 0.4, 0.015


class WatchedBudget(OverflowBudget):
    """Counts reservations after which an account holds more than its ceiling."""

    calls_beyond_ceiling = 0

    def reserve(self, job: InferenceJob, run_id: str, now: float, wall: float) -> OverflowReservation | str:
        reservation = super().reserve(job, run_id, now, wall)
        if isinstance(reservation, OverflowReservation):
            self.calls_beyond_ceiling += any(one.committed_nanos > one.nano_ceiling for one in reservation.accounts)
        return reservation

    def spent_by_tenant(self) -> dict[str, int]:
        return {tenant: self._days[tenant].spent_nanos if tenant in self._days else 0 for tenant in TENANTS}


class HostedFleet:
    """Own workers that are up, and one hosted worker."""

    def serves(self, model: str) -> bool:
        return True

    def views(self) -> list[WorkerView]:
        return [
            WorkerView(
                worker="hosted",
                models=frozenset({MODEL}),
                phase=Phase.READY,
                capacity=Capacity(sequences=1024),
                observed_at=0.0,
                overflow=True,
            )
        ]

    def overflow_card(self, model: str, isolation: str | None) -> ModelCard:
        return ModelCard(name=model)


class OverflowFrontend(PredictingFrontend):
    """The simulator's gateway with deadlines, and with overflow where there is a budget."""

    def __init__(self, capacity: Capacity, budget: OverflowBudget | None) -> None:
        super().__init__(dict(DEFAULT_LANES), capacity)
        self._rule = OverflowRule(DEFAULT_LANES)
        self._clock = ManualClock(0.0)
        self.router: OverflowRouter | None = None
        if budget is not None:
            self.router = OverflowRouter(self._rule, budget, self._clock, HostedFleet())
        self.infeasible = 0

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        job = replace(job, deadline=now + DEADLINE_S[job.lane])
        prediction = self.predict(job, now)
        if self.router is not None:
            overflowed = self.router.redirect(job, prediction.p90_s, now)
            if overflowed is not None:
                self._send_hosted(call, overflowed, now)
                return
        if deadline_refusal(self.waits, job, prediction, now) is not None:
            self.infeasible += 1
            self._simulation.reject(call, now, "expired")
            return
        super()._offer(call, job, now)

    def _send_hosted(self, call: Call, job: InferenceJob, now: float) -> None:
        call.sent_at, call.first_at = now, now + HOSTED_FIRST_TOKEN_S
        attempt = Attempt(job)
        attempt.sent_at = now
        ended_at = call.first_at + HOSTED_TOKEN_S * (call.step.output - 1)
        self._simulation.events.at(ended_at, self._hosted_ended, (call, attempt))

    def _hosted_ended(self, now: float, argument: tuple[Call, Attempt]) -> None:
        call, attempt = argument
        usage = Usage(call.prompt, 0, call.step.output)
        assert call.first_at is not None, "it was sent"
        attempt.first_token_at, attempt.output_tokens = call.first_at, call.step.output
        attempt.ended(Done(call.job_id, FinishReason.STOP, usage), now)
        self._rule.first_token(attempt, call.first_at)
        self._rule.ended(attempt, now)
        assert self.router is not None
        self.router.settle(attempt)
        self._simulation.reject(call, now, "done")

    def first_token(self, call: Call, now: float) -> None:
        super().first_token(call, now)
        self._rule.first_token(self._open[call.job_id][1], now)

    def ended(self, call: Call, now: float) -> None:
        attempt = self._open[call.job_id][1]
        attempt.output_tokens = call.step.output
        super().ended(call, now)
        self._rule.ended(attempt, now)


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    blocks = [play_seed(seed) for seed in seeds]
    result = {
        "burst_of_capacity": BURST,
        "deadlines_s": {lane.name: seconds for lane, seconds in DEADLINE_S.items()},
        "targets": {
            "deadlines_met_in_burst_with_ample_ceiling": {
                "is": min(block["ample"]["deadlines_met_in_burst"] for block in blocks),
                "wanted": ">= 0.99",
            },
            "calls_beyond_ceiling": {
                "is": sum(block[arm]["calls_beyond_ceiling"] for block in blocks for arm in ("ample", "tight")),
                "wanted": "0",
            },
            "largest_part_of_ceiling_spent": {
                "is": max(block["tight"]["part_of_ceiling_spent"] for block in blocks),
                "wanted": "<= 1",
            },
        },
        "summary": {
            arm: {
                name: round(statistics.mean(block[arm][name] for block in blocks), 4)
                for name in ("deadlines_met_in_burst", "deadlines_met", "ttft_met_in_burst", "overflowed", "cost")
            }
            for arm in ("off", "ample", "tight")
        },
        "blocks": blocks,
    }
    print(json.dumps({name: result[name] for name in ("targets", "summary")}, indent=2), flush=True)
    return result


def play_seed(seed: int) -> dict[str, Any]:
    runs = arrivals(seed)
    ample = WatchedBudget({MODEL: PRICE}, day_ceiling=1e6)
    block = {"seed": seed, "calls": len(runs), "off": play(runs, None), "ample": play(runs, ample)}
    ceilings = {tenant: nanos / 3 / NANOS_PER_UNIT for tenant, nanos in ample.spent_by_tenant().items()}
    tight = WatchedBudget({MODEL: PRICE}, day_ceiling=0.0, tenant_day_ceilings=ceilings)
    return block | {"tight": play(runs, tight, ceilings)}


def arrivals(seed: int) -> list[Run]:
    """Quiet, burst, quiet."""
    runs: list[Run] = []
    for name, begin, intensity, seconds in (
        ("before", 0.0, QUIET, QUIET_S),
        ("burst", QUIET_S, BURST, BURST_S),
        ("after", QUIET_S + BURST_S, QUIET, QUIET_S),
    ):
        for lane, part in PARTS.items():
            rate, label = intensity * CAPACITY_PER_S * part, f"{name}{lane.name}"
            found = poisson(seed, rate, seconds, LENGTHS[lane], lane=lane, tenants=TENANTS, name=label)
            runs += [replace(run, at=begin + run.at) for run in found]
    return sorted(runs, key=lambda run: run.at)


def play(runs: Sequence[Run], budget: WatchedBudget | None, ceilings: dict[str, float] | None = None) -> dict[str, Any]:
    model = load_model()
    frontend = OverflowFrontend(Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, 3072), budget)
    simulation = Simulation(frontend, model.costs, model.flags)
    simulation.play(runs)
    rows = simulation.rows
    burst = [row for row in rows if QUIET_S <= row.at < QUIET_S + BURST_S]
    found: dict[str, Any] = {
        "deadlines_met": share_met(rows),
        "deadlines_met_in_burst": share_met(burst),
        "ttft_met_in_burst": round(statistics.mean(_met_ttft(row) for row in burst), 4),
        "overflowed": 0,
        "cost": 0.0,
    }
    if budget is not None and frontend.router is not None:
        found |= {
            "overflowed": sum(frontend.router.overflowed.values()),
            "by_reason": frontend.router.overflowed,
            "stayed": frontend.router.refused,
            "cost": round(budget.spent_nanos / NANOS_PER_UNIT, 6),
            "calls_beyond_ceiling": budget.calls_beyond_ceiling,
        }
        if ceilings is not None:
            spent = budget.spent_by_tenant()
            parts = [spent[tenant] / NANOS_PER_UNIT / ceiling for tenant, ceiling in ceilings.items() if ceiling]
            found["part_of_ceiling_spent"] = round(max(parts), 4)
    return found


def share_met(rows: Sequence[CallRow]) -> float:
    met = [row.outcome == "done" and row.end_s <= DEADLINE_S[row.lane] for row in rows]
    return round(statistics.mean(met), 4)


def _met_ttft(row: CallRow) -> bool:
    ttft_ms = DEFAULT_LANES[row.lane].ttft_ms
    assert ttft_ms is not None
    return row.outcome == "done" and row.ttft_s is not None and row.ttft_s <= ttft_ms / 1000
