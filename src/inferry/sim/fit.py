"""From what a client saw to a cost model: rows that are linear in the costs, then a few steps of the model itself.

Held-out probes are part of neither: they say by how much the model is wrong.
"""

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.flags import completed
from inferry.sim.flags import engine_flags as flags_of
from inferry.sim.observations import Flag, Observation
from inferry.sim.polish import polish, share_out
from inferry.sim.replay import measured, predicted
from inferry.sim.rows import CannotFit, solve_rows

JUDGED = ("first", "gap", "total")


class Fit(Struct, frozen=True, kw_only=True):
    """The costs, the flags they go with, and by how much the model is wrong about probes it was not fitted on."""

    costs: CostModel
    flags: EngineFlags
    known_flags: dict[str, Flag]
    residuals: dict[str, dict[str, float]]
    fitted: int
    judged: int


def fit(observations: Sequence[Observation], flags: dict[str, Flag]) -> Fit:
    """The costs that explain the observations best."""
    known = completed(observations, flags)
    engine_flags = flags_of(observations, known)
    used = [one for one in observations if not one.held_out]
    for kind, why in (("prefill", "prompts alone"), ("decode", "sequences that decode")):
        if not any(one.kind == kind for one in used):
            raise CannotFit(f"there are no probes of {why}: probe for longer")
    start = solve_rows(used, engine_flags)
    costs = polish(used, share_out(used, start, engine_flags), engine_flags)
    judged = [one for one in observations if one.held_out]
    return Fit(
        costs=costs,
        flags=engine_flags,
        known_flags=known,
        residuals=residuals(judged, costs, engine_flags),
        fitted=len(used),
        judged=len(judged),
    )


def residuals(observations: Sequence[Observation], costs: CostModel, flags: EngineFlags) -> dict[str, dict[str, float]]:
    """Predicted against measured: the size of the relative error and its middle, per figure and per kind of probe."""
    errors: dict[str, list[float]] = {}
    for one in observations:
        wanted, had = measured(one), predicted(one, costs, flags)
        for name in JUDGED:
            if name in wanted and name in had:
                error = had[name] / wanted[name] - 1
                errors.setdefault(name, []).append(error)
                errors.setdefault(f"{one.kind} {name}", []).append(error)
    return {name: _spread(found) for name, found in errors.items()}


def _spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    p95 = sizes[min(len(sizes) - 1, math.ceil(0.95 * len(sizes)) - 1)]
    return {
        "median": round(statistics.median(sizes), 4),
        "p95": round(p95, 4),
        "bias": round(statistics.median(errors), 4),
        "probes": float(len(errors)),
    }
