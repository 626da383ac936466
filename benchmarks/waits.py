"""Predicted waits against the real scheduler, in the twin: how often does a stated P90 hold?

Every job is told its wait as it arrives, by the model and the scheduler that dispatch uses, and is compared with what
came of it: the time until it was sent to a worker. Five kinds of arrivals, five loads, several seeds, on the model of
one H200. Load is in parts of what the engine serves when there is always more. Lanes have queue limits, and who is
refused comes again when told to, so that 1.5 is a steady overload; two runs without limits, whose queues only grow,
stand apart: their waits become as long as the run, and what is said early has to do.

What "covers" means. Waits and statements below 50 ms count as 50 ms, so a job that goes at once is covered by whatever
was said, and where most do, no statement can fail one time in ten. The figures are therefore given for all jobs, for
those that found somebody ahead, and for those that were told more than the floor; the last are *judged*. All three
sets are known when the statement is made. A cell holds if 87 to 93 of 100 judged jobs were covered; where fewer than 13
of 100 waited beyond the floor at all, only the lower bound is asked for. Cells of fewer than 200 judged jobs are shown
and not counted.

Jobs that stand in one queue share their fate, so the number of jobs says little about how much was seen. `waits_seen`
is the time that was judged, in typical waits of the cell's judged jobs. Where that is less than thirty, nine in ten
cannot be told from eight or ten; such cells are counted with the others, and once more apart.

Three and a half minutes are a gateway that has just started, in front of queues that take one or two of them. What it
says once it has seen more is in `long_runs`: arrivals and loads of which some counted cell has seen fewer than thirty
waits are played once more, for forty minutes and with one seed; a trace begins again where it ends. Both are given;
neither stands for the other.

The trace is read from the directory named in TRACES, or from ../shared/traces beside the repository, and left out where
there is none.
"""

import os
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from inferry.cli.checkout import ROOT
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import QueuedAhead, Tick
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.prediction.wait_model import FLOOR_S, NOTHING_AHEAD, WaitModel
from inferry.prediction.wait_prediction import WaitPrediction
from inferry.sim.arrivals import bursts, poisson, uniform_lengths
from inferry.sim.calls import Call, Run
from inferry.sim.costs import load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.harbor import harbor
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Simulation
from inferry.sim.traces import read_trace

TRACE = Path(os.environ.get("TRACES", ROOT.parent / "shared" / "traces")) / "azure2023_code.csv.gz"
SEEDS = (31, 32, 33)
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5)
SECONDS = 220.0
EVALUATED_S = (30.0, 180.0)
"""Arrivals in this time are judged: a gateway that has just started knows nothing, and the last ones have no end."""
SHORT_S = len(SEEDS) * (EVALUATED_S[1] - EVALUATED_S[0])
LONG_SEEDS = (31,)
LONG_SECONDS = 2400.0
LONG_EVALUATED_S = (60.0, 2240.0)
QUEUE_LIMITS = {Lane.P0: 64, Lane.P1: 128, Lane.P2: 128}
MIN_EVALUATED = 200
MIN_WAITS = 30
COVERED = (0.87, 0.93)
DEADLINES_S = (1.0, 5.0, 20.0)
TENANTS = ("a", "b", "c")
MIX = {
    Lane.P0: (0.25, uniform_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.35, uniform_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.40, uniform_lengths((1000, 5000), (100, 300))),
}
BURST_EVERY_S = {Lane.P0: 6.0, Lane.P1: 10.0, Lane.P2: 25.0}

Arrivals = Callable[[int, float, float], list[Run]]
"""Seed, intensity and seconds to the runs."""


class Outcome(Struct, frozen=True, gc=False):
    """What a job was told and how long it waited; `is_over` is False for one that still waits after so long."""

    prediction: WaitPrediction
    waited_s: float
    is_over: bool = True

    @property
    def is_evaluated(self) -> bool:
        return self.prediction.p90_s > FLOOR_S

    @property
    def is_covered(self) -> bool:
        return self.waited_s <= max(FLOOR_S, self.prediction.p90_s)


class PredictingFrontend(GatewayFrontend):
    """The gateway, telling every job how long it will wait, as the dispatch loop does."""

    def __init__(self, lanes: dict[Lane, LanePolicy], capacity: Capacity) -> None:
        super().__init__(lanes, capacity)
        self.waits = WaitModel()
        self.outcomes: list[Outcome] = []
        self._predictions: dict[str, WaitPrediction] = {}

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        lane, footprint, waits = job.lane, job.footprint, self.waits
        ahead = self.scheduler.ahead(lane, job.tenant) if waits.has_queue_ahead(lane) else NOTHING_AHEAD
        prediction = waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)
        refused = self.refused
        super()._offer(call, job, now)
        if self.refused == refused:
            waits.queued(prediction, now)
            self._predictions[job.job_id] = prediction

    def _apply(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            for job in plan.jobs:
                prediction = self._predictions.pop(job.job_id)
                self.waits.sent(prediction, now)
                if job.attempt == 1:
                    self.outcomes.append(Outcome(prediction, now - prediction.at))
        super()._apply(tick, now)

    def cancel(self, call: Call, now: float) -> None:
        prediction = self._predictions.pop(call.job_id, None)
        if prediction is not None:
            self.waits.left(prediction, now)
        super().cancel(call, now)

    def all_outcomes(self, now: float) -> list[Outcome]:
        """With those who still wait and have done so for longer than they were told. The rest may yet come right."""
        waiting = [Outcome(prediction, now - prediction.at, False) for prediction in self._predictions.values()]
        return self.outcomes + [one for one in waiting if not one.is_covered]


# -- arrivals --------------------------------------------------------------------------------------------------------


def poisson_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """Live, standard and batch calls that know nothing of each other."""
    return [
        run
        for lane, (part, lengths) in MIX.items()
        for run in poisson(seed, rate * part, seconds, lengths, lane=lane, tenants=TENANTS, name=lane.name)
    ]


def burst_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """Seven in ten calls come in bursts, of every lane at its own period."""
    runs: list[Run] = []
    for lane, (part, lengths) in MIX.items():
        every, name = BURST_EVERY_S[lane], lane.name
        calls = max(1, round(0.7 * rate * part * every))
        runs += bursts(seed, calls, every, every / 10, seconds, lengths, lane=lane, tenants=TENANTS, name=f"{name}b")
        runs += poisson(seed, 0.3 * rate * part, seconds, lengths, lane=lane, tenants=TENANTS, name=f"{name}p")
    return runs


def stepped_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """Forty seconds of 0.72 of the rate, twenty of 1.6, and again."""
    rng = named_rng(seed, "steps")
    return [run for run in poisson_mix(seed, 1.6 * rate, seconds) if run.at % 60 >= 40 or rng.random() < 0.45]


def agent_runs(seed: int, scale: float, seconds: float) -> list[Run]:
    """Harbor's agents in their webhook bursts, with its digests spread over the time."""
    rng = named_rng(seed, "digests")
    return [
        replace(run, at=rng.uniform(0, seconds)) if run.lane is Lane.P2 else run
        for run in harbor(seed, seconds=seconds, scale=scale, digests=int(1.2 * seconds))
    ]


def trace_calls(seed: int, speed: float, seconds: float) -> list[Run]:
    """A recorded trace from some moment on, so many times as fast, over the lanes and tenants of the mix; what lasts
    longer than the trace has all of it again.
    """
    rng = named_rng(seed, "trace")
    runs = read_trace(TRACE)
    length_s = runs[-1].at
    begin = rng.uniform(0, max(0.0, length_s - seconds * speed))
    end = begin + seconds * speed
    lanes, parts = list(MIX), [part for part, _ in MIX.values()]
    return [
        replace(
            run,
            run_id=f"{run.run_id}-{repeated}" if repeated else run.run_id,
            at=(repeated * length_s + run.at - begin) / speed,
            lane=rng.choices(lanes, parts)[0],
            tenant=rng.choice(TENANTS),
        )
        for repeated in range(1 + int(end / length_s))
        for run in runs
        if begin <= repeated * length_s + run.at < end
    ]


def arrivals() -> dict[str, tuple[Arrivals, float]]:
    """What is played, and an intensity that is too much for the engine."""
    kinds: dict[str, tuple[Arrivals, float]] = {
        "poisson": (poisson_mix, 60.0),
        "bursts": (burst_mix, 60.0),
        "steps": (stepped_mix, 60.0),
        "agents": (agent_runs, 4.0),
    }
    if TRACE.exists():
        kinds["trace"] = (trace_calls, 40.0)
    return kinds


# -- playing ---------------------------------------------------------------------------------------------------------


def play(runs: Sequence[Run], limits: dict[Lane, int] | None = None, until: float | None = None) -> PredictingFrontend:
    model = load_model()
    lanes = dict(DEFAULT_LANES)
    if limits is not None:
        lanes = {lane: replace(policy, queue_limit=limits[lane]) for lane, policy in lanes.items()}
    frontend = PredictingFrontend(lanes, Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, 3072))
    Simulation(frontend, model.costs, model.flags).play(runs, until)
    return frontend


def evaluated_outcomes(
    make: Arrivals,
    intensity: float,
    seed: int,
    limits: dict[Lane, int] | None,
    seconds: float = SECONDS,
    evaluated_s: tuple[float, float] = EVALUATED_S,
) -> list[Outcome]:
    frontend = play(make(seed, intensity, seconds), limits, seconds)
    return [one for one in frontend.all_outcomes(seconds) if evaluated_s[0] <= one.prediction.at < evaluated_s[1]]


def full_load(make: Arrivals, overload_intensity: float, seconds: float = 20.0) -> float:
    """The intensity at which as many calls come as the engine serves when there is always more."""
    runs = make(1, overload_intensity, seconds)
    calls = sum(len(run.steps) for run in runs)
    model = load_model()
    simulation = Simulation(
        GatewayFrontend(dict(DEFAULT_LANES), Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, 3072)),
        model.costs,
        model.flags,
    )
    simulation.play(runs)
    ended = max(row.at + row.end_s for row in simulation.rows)
    return overload_intensity * (calls / ended) / (calls / seconds)


# -- figures ---------------------------------------------------------------------------------------------------------


def cell(outcomes: Sequence[Outcome], evaluated_s: float = SHORT_S) -> dict[str, Any]:
    evaluated = [one for one in outcomes if one.is_evaluated]
    behind = [one for one in outcomes if one.prediction.ahead.jobs]
    beyond_floor = _part(evaluated, lambda one: one.waited_s > FLOOR_S)
    is_covered = _part(evaluated, lambda one: one.is_covered)
    figures: dict[str, Any] = {
        "jobs": len(outcomes),
        "covered": _part(outcomes, lambda one: one.is_covered),
        "behind_somebody": len(behind),
        "covered_behind_somebody": _part(behind, lambda one: one.is_covered),
        "judged": len(evaluated),
        "covered_judged": is_covered,
        "median_covers": _part(evaluated, lambda one: one.waited_s <= one.prediction.p50_s),
        "p90_over_p50": _median(
            [(one.prediction.p90_s + FLOOR_S) / (one.prediction.p50_s + FLOOR_S) for one in evaluated]
        ),
        "waited_s_p50": _median([one.waited_s for one in outcomes]),
        "waits_seen": _waits_seen(evaluated, evaluated_s),
        "holds": None,
    }
    if len(evaluated) >= MIN_EVALUATED and is_covered is not None and beyond_floor is not None:
        figures["holds"] = is_covered >= COVERED[0] and (is_covered <= COVERED[1] or beyond_floor < 1 - COVERED[0])
    return figures


def _waits_seen(evaluated: Sequence[Outcome], evaluated_s: float) -> int | None:
    typical_s = _median([max(FLOOR_S, one.waited_s) for one in evaluated])
    return None if typical_s is None else round(evaluated_s / typical_s)


def cells(outcomes: Sequence[Outcome], evaluated_s: float = SHORT_S) -> dict[str, dict[str, Any]]:
    lanes = {lane.name: cell([one for one in outcomes if one.prediction.lane is lane], evaluated_s) for lane in Lane}
    return {**lanes, "all": cell(outcomes, evaluated_s)}


def refusals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Had every job come with a deadline: whom would P10, and whom would P50, turn away, and how rightly?"""
    over = [one for one in outcomes if one.is_over]
    table: dict[str, Any] = {}
    for deadline in DEADLINES_S:
        late = [one for one in over if one.waited_s > deadline]
        row: dict[str, Any] = {"jobs": len(over), "would_expire": len(late)}
        for name in ("p10", "p50"):
            refused = [one for one in over if getattr(one.prediction, f"{name}_s") > deadline]
            wrongly = sum(one.waited_s <= deadline for one in refused)
            row[name] = {
                "refused": len(refused),
                "wrongly": round(wrongly / max(1, len(refused)), 4),
                "wrongly_of_all_feasible": round(wrongly / max(1, len(over) - len(late)), 4),
                "spotted": round((len(refused) - wrongly) / max(1, len(late)), 4),
            }
        table[f"{deadline:g} s"] = row
    return table


def costs() -> dict[str, float]:
    """Microseconds, fastest and median of many loops: a prediction, and all that is done for a job."""
    model, now, number = WaitModel(), 0.0, 20_000
    ahead = QueuedAhead(20, 20_000, 4000)
    waiting: list[WaitPrediction] = []

    def one_job() -> None:
        nonlocal now
        now += 0.01
        prediction = model.predict(Lane.P1, 1000, 200, ahead, now)
        model.queued(prediction, now)
        waiting.append(prediction)
        if len(waiting) > 20:
            model.sent(waiting.pop(0), now)

    def at_once() -> None:
        nonlocal now
        now += 0.001
        prediction = model.predict(Lane.P1, 1000, 200, NOTHING_AHEAD, now)
        model.queued(prediction, now)
        model.sent(prediction, now + 0.0001)

    one_job()
    figures = {}
    for name, work in (
        ("predict_behind_20", lambda: model.predict(Lane.P1, 1000, 200, ahead, now)),
        ("predict_behind_nobody", lambda: model.predict(Lane.P1, 1000, 200, NOTHING_AHEAD, now)),
        ("all_for_a_job_behind_20_at_100_a_second", one_job),
        ("all_for_a_job_that_goes_at_once", at_once),
    ):
        times = [one / number * 1e6 for one in timeit.repeat(work, number=number, repeat=7)]
        figures[name] = round(min(times), 2)
        figures[f"{name}_median"] = round(statistics.median(times), 2)
    return figures


def measure() -> dict[str, Any]:
    table: dict[str, Any] = {}
    pooled: list[Outcome] = []
    counted: list[dict[str, Any]] = []
    for name, (make, overload_intensity) in arrivals().items():
        full = full_load(make, overload_intensity)
        table[name] = {"full_load": round(full, 3), "loads": {}}
        for load in LOADS:
            outcomes = [one for seed in SEEDS for one in evaluated_outcomes(make, load * full, seed, QUEUE_LIMITS)]
            table[name]["loads"][f"{load:g}"] = found = cells(outcomes)
            pooled += outcomes
            counted += [one for name, one in found.items() if name != "all" and one["holds"] is not None]
            print(f"{name:8s} {load:3.1f} {_line(found)}", flush=True)
    growing: dict[str, Any] = {}
    for name in ("poisson", "agents"):
        make, full = arrivals()[name][0], table[name]["full_load"]
        outcomes = [one for seed in SEEDS for one in evaluated_outcomes(make, 1.5 * full, seed, None)]
        growing[name] = cells(outcomes)
        print(f"{name:8s} 1.5 {_line(growing[name])}  without limits", flush=True)
    over_all = cells(pooled)
    print(f"pooled       {_line(over_all)}", flush=True)
    return {
        "seeds": list(SEEDS),
        "seconds": SECONDS,
        "judged_s": list(EVALUATED_S),
        "queue_limits": {lane.name: limit for lane, limit in QUEUE_LIMITS.items()},
        "floor_s": FLOOR_S,
        "cells": _coverage(counted),
        "cells_of_thirty_waits_or_more": _coverage(_with_enough_waits(counted)),
        "pooled": over_all,
        "long_runs": long_runs(table),
        "arrivals": table,
        "without_queue_limits_at_1.5": growing,
        "deadlines": refusals(pooled),
        "microseconds": costs(),
    }


def long_runs(short: Mapping[str, Any]) -> dict[str, Any]:
    """Arrivals and loads that the short runs could tell too little of, for so long that their queues come and go."""
    evaluated_s = len(LONG_SEEDS) * (LONG_EVALUATED_S[1] - LONG_EVALUATED_S[0])
    table: dict[str, Any] = {}
    pooled: list[Outcome] = []
    counted: list[dict[str, Any]] = []
    for name, (make, _) in arrivals().items():
        table[name] = {}
        for load in LOADS:
            by_lane = [short[name]["loads"][f"{load:g}"][lane.name] for lane in Lane]
            if all(one["holds"] is None or one["waits_seen"] >= MIN_WAITS for one in by_lane):
                continue
            intensity = load * short[name]["full_load"]
            outcomes = [
                one
                for seed in LONG_SEEDS
                for one in evaluated_outcomes(make, intensity, seed, QUEUE_LIMITS, LONG_SECONDS, LONG_EVALUATED_S)
            ]
            table[name][f"{load:g}"] = found = cells(outcomes, evaluated_s)
            pooled += outcomes
            counted += [found[lane.name] for lane in Lane if found[lane.name]["holds"] is not None]
            print(f"{name:8s} {load:3.1f} {_line(found)}  long", flush=True)
    return {
        "seeds": list(LONG_SEEDS),
        "seconds": LONG_SECONDS,
        "judged_s": list(LONG_EVALUATED_S),
        "cells": _coverage(counted),
        "cells_of_thirty_waits_or_more": _coverage(_with_enough_waits(counted)),
        "pooled": cells(pooled, evaluated_s),
        "arrivals": table,
        "deadlines": refusals(pooled),
    }


def _with_enough_waits(counted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in counted if one["waits_seen"] >= MIN_WAITS]


def _coverage(counted: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Cells of one lane, arrivals and load each."""
    low = sum(one["covered_judged"] < COVERED[0] for one in counted)
    hold = sum(one["holds"] for one in counted)
    return {"cells": len(counted), "hold": hold, "cover_too_little": low, "cover_too_much": len(counted) - hold - low}


def _part(outcomes: Sequence[Outcome], predicate: Callable[[Outcome], bool]) -> float | None:
    return round(sum(map(predicate, outcomes)) / len(outcomes), 4) if outcomes else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _line(found: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, one in found.items():
        mark = {True: " ", False: "*", None: "?"}[one["predicate"]]
        covered = "  -  " if one["covered_judged"] is None else f"{100 * one['covered_judged']:5.1f}"
        parts.append(f"{name:>3s} {100 * (one['covered'] or 0):5.1f} {covered}{mark} of {one['judged']:5d}")
    return "  ".join(parts)


if __name__ == "__main__":
    measure()
