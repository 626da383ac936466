"""Predicted waits against the real scheduler, in the simulator: how often does a stated P90 hold?

Every job gets a prediction on arrival, by the model and the scheduler that dispatch uses. It is compared with the time
until the job was sent to a worker. Five kinds of arrivals, five loads, three seeds, on the model of one H200. Load 1 is
the rate that the engine serves under a permanent backlog. Lanes have queue limits and refused calls come back when they
were told to, so a load of 1.5 is a steady overload. Two runs without limits, whose queues only grow, are reported
apart: their waits become as long as the run.

What "covered" means. Waits and predictions below 50 ms count as 50 ms, so a job that is sent at once is covered by any
prediction, and where most are, no prediction can fail one time in ten. The figures are therefore given for all jobs,
for jobs that found others ahead, and for jobs with a P90 above 50 ms; the last are *judged*. All three sets are known
when the prediction is made. A cell holds if 87 to 93 of 100 judged jobs were covered; where fewer than 13 of 100 waited
longer than 50 ms, only the lower bound applies. Cells of fewer than 200 judged jobs are shown and not counted.

Jobs in one queue wait together, so their number overstates the evidence. `waits_seen` is the judged time over the
typical wait of the cell's judged jobs. Below thirty, a coverage of nine in ten cannot be told from eight or ten; such
cells are counted with the others, and the others once more apart.

Three and a half minutes show a gateway that has just started, with queues of one or two minutes. `long_runs` shows it
later: arrivals and loads of which a counted cell has seen fewer than thirty waits are played again for forty minutes
with one seed. The trace is left out where there is none (`benchmarks.trace_files`).
"""

import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.wait_arrivals import Arrivals, arrivals
from benchmarks.wait_simulation import Outcome, evaluated_outcomes, full_load
from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.domain.queue_depth import QueueDepth
from inferry.prediction.wait_model import FLOOR_S, NOTHING_AHEAD, WaitModel
from inferry.prediction.wait_prediction import WaitPrediction

SEEDS = (31, 32, 33)
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5)
SECONDS = 220.0
EVALUATED_S = (30.0, 180.0)
"""Arrivals in this time are judged: a new gateway has learned nothing yet, and the last arrivals have no end."""
SHORT_S = len(SEEDS) * (EVALUATED_S[1] - EVALUATED_S[0])
LONG_SEEDS = (31,)
LONG_SECONDS = 2400.0
LONG_EVALUATED_S = (60.0, 2240.0)
QUEUE_LIMITS = {Lane.P0: 64, Lane.P1: 128, Lane.P2: 128}
MIN_EVALUATED = 200
MIN_WAITS = 30
COVERED = (0.87, 0.93)
DEADLINES_S = (1.0, 5.0, 20.0)


def short_outcomes(make: Arrivals, intensity: float, seed: int, limits: dict[Lane, int] | None) -> list[Outcome]:
    return evaluated_outcomes(make, intensity, seed, limits, SECONDS, EVALUATED_S)


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
    """If every job had a deadline: how many would be refused by P10 and by P50, and how many of them wrongly."""
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
    """Microseconds, fastest and median of seven loops: a prediction alone, and everything done for a job."""
    depth, now, number = QueueDepth(), 0.0, 20_000
    model = WaitModel(depth)
    ahead = QueuedAhead(20, 20_000, 4000)
    waiting: list[WaitPrediction] = []

    def one_job() -> None:
        nonlocal now
        now += 0.01
        prediction = model.predict(Lane.P1, 1000, 200, ahead, now)
        depth.add(Lane.P1, 1000, 200)
        model.queued(prediction, now)
        waiting.append(prediction)
        if len(waiting) > 20:
            depth.remove(Lane.P1, 1000, 200)
            model.sent(waiting.pop(0), now)

    def at_once() -> None:
        nonlocal now
        now += 0.001
        prediction = model.predict(Lane.P1, 1000, 200, NOTHING_AHEAD, now)
        depth.add(Lane.P1, 1000, 200)
        model.queued(prediction, now)
        depth.remove(Lane.P1, 1000, 200)
        model.sent(prediction, now + 0.0001)

    one_job()
    figures = {}
    for name, work in (
        ("predict_behind_20", lambda: model.predict(Lane.P1, 1000, 200, ahead, now)),
        ("predict_behind_empty_queue", lambda: model.predict(Lane.P1, 1000, 200, NOTHING_AHEAD, now)),
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
            outcomes = [one for seed in SEEDS for one in short_outcomes(make, load * full, seed, QUEUE_LIMITS)]
            table[name]["loads"][f"{load:g}"] = found = cells(outcomes)
            pooled += outcomes
            counted += [one for name, one in found.items() if name != "all" and one["holds"] is not None]
            print(f"{name:8s} {load:3.1f} {line(found)}", flush=True)
    growing: dict[str, Any] = {}
    for name in ("poisson", "agents"):
        make, full = arrivals()[name][0], table[name]["full_load"]
        outcomes = [one for seed in SEEDS for one in short_outcomes(make, 1.5 * full, seed, None)]
        growing[name] = cells(outcomes)
        print(f"{name:8s} 1.5 {line(growing[name])}  without limits", flush=True)
    over_all = cells(pooled)
    print(f"pooled       {line(over_all)}", flush=True)
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
    """Arrivals and loads with too few waits in the short runs, played long enough for queues to grow and drain."""
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
            print(f"{name:8s} {load:3.1f} {line(found)}  long", flush=True)
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


def line(found: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, one in found.items():
        mark = {True: " ", False: "*", None: "?"}[one["holds"]]
        covered = "  -  " if one["covered_judged"] is None else f"{100 * one['covered_judged']:5.1f}"
        parts.append(f"{name:>3s} {100 * (one['covered'] or 0):5.1f} {covered}{mark} of {one['judged']:5d}")
    return "  ".join(parts)


if __name__ == "__main__":
    measure()
