"""A cost model from client-side observations: a linear regression, then a refinement with the simulated engine.

Held-out probes are used in neither; they measure the error of the model.
"""

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.flag_inference import engine_flags as flags_of
from inferry.sim.flag_inference import infer_missing_flags
from inferry.sim.observations import Flag, Observation
from inferry.sim.refine import refine, split_request_cost
from inferry.sim.regression import CannotFit, solve_rows
from inferry.sim.replay import measured, predicted

EVALUATED_FIGURES = ("first", "itl", "total")


class Fit(Struct, frozen=True, kw_only=True):
    """The costs, the engine flags, and the error of the model on held-out probes."""

    costs: CostModel
    flags: EngineFlags
    known_flags: dict[str, Flag]
    residuals: dict[str, dict[str, float]]
    fitted: int
    evaluated: int


def fit(observations: Sequence[Observation], flags: dict[str, Flag]) -> Fit:
    """The costs with the smallest error on the observations."""
    known = infer_missing_flags(observations, flags)
    engine_flags = flags_of(observations, known)
    used = [one for one in observations if not one.held_out]
    for kind, why in (("prefill", "prompts alone"), ("decode", "sequences that decode")):
        if not any(one.kind == kind for one in used):
            raise CannotFit(f"there are no probes of {why}: probe for longer")
    start = solve_rows(used, engine_flags)
    costs = refine(used, split_request_cost(used, start, engine_flags), engine_flags)
    evaluated = [one for one in observations if one.held_out]
    return Fit(
        costs=costs,
        flags=engine_flags,
        known_flags=known,
        residuals=residuals(evaluated, costs, engine_flags),
        fitted=len(used),
        evaluated=len(evaluated),
    )


def residuals(observations: Sequence[Observation], costs: CostModel, flags: EngineFlags) -> dict[str, dict[str, float]]:
    """Relative error of predictions, as median absolute value and median, per figure and kind of probe."""
    errors: dict[str, list[float]] = {}
    for one in observations:
        observed, modeled = measured(one), predicted(one, costs, flags)
        for name in EVALUATED_FIGURES:
            if name in observed and name in modeled:
                error = modeled[name] / observed[name] - 1
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
