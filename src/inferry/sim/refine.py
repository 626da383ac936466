"""Refinement of engine costs: the simulated engine plays the probes and the costs follow its errors."""

import math
from collections.abc import Sequence

import msgspec

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.nnls import solve
from inferry.sim.observations import Observation
from inferry.sim.regression import COSTS, KNEE, MAY_BE_NEGATIVE, NOISE, cost_model, huber
from inferry.sim.replay import Figures, measured, predicted

PRIOR_SCALE = 0.15
"""Distance from the regression's costs (in logarithms) that weighs as much as one error."""
MAX_STEP = 0.2
PROBE_STEP = 0.05
MAX_ITERATIONS = 6
SHARE_STEPS = 40


def split_request_cost(observations: Sequence[Observation], costs: CostModel, flags: EngineFlags) -> CostModel:
    """The share of the fixed cost per call that the server process spends, one call after the other.

    A single call cannot tell `request_s` from `reply_s`; bursts can.
    """
    batches = [one for one in observations if one.kind in ("burst", "decode") and len(one.calls) > 4]
    both = costs.request_s + costs.reply_s
    if not batches or not both:
        return costs
    figures = [{name: value for name, value in measured(one).items() if name in ("first", "total")} for one in batches]

    def shared(share: float) -> CostModel:
        return msgspec.structs.replace(costs, request_s=share * both, reply_s=(1 - share) * both)

    def loss(share: float) -> float:
        model = shared(share)
        return sum(map(huber, _errors(figures, [predicted(one, model, flags) for one in batches])))

    return shared(min((number / SHARE_STEPS for number in range(SHARE_STEPS + 1)), key=loss))


def refine(
    observations: Sequence[Observation], start: CostModel, flags: EngineFlags, max_iterations: int = MAX_ITERATIONS
) -> CostModel:
    """Gauss-Newton steps on the difference between simulated and observed probes.

    The regression's costs regularise it: the simulation is discontinuous where a request just misses a step.
    """
    figures = [measured(one) for one in observations]
    scale = _Scale(start, observations)
    first = scale.point(start)
    point = first

    def errors_at(point: Sequence[float]) -> list[float]:
        costs = scale.costs(point)
        return _errors(figures, [predicted(one, costs, flags) for one in observations])

    def loss_of(errors: Sequence[float], point: Sequence[float]) -> float:
        return sum(map(huber, errors)) + sum(((z - z0) / PRIOR_SCALE) ** 2 for z, z0 in zip(point, first, strict=True))

    errors = errors_at(point)
    loss = loss_of(errors, point)
    for _ in range(max_iterations):
        slopes = []
        for axis in range(len(COSTS)):
            moved = errors_at([z + PROBE_STEP * (i == axis) for i, z in enumerate(point)])
            slopes.append([(b - a) / PROBE_STEP for a, b in zip(errors, moved, strict=True)])
        weights = [1.0 if abs(error) <= KNEE else KNEE / abs(error) for error in errors]
        gram = [[sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) for y in slopes] for x in slopes]
        target = [-sum(w * a * e for w, a, e in zip(weights, x, errors, strict=True)) for x in slopes]
        for axis in range(len(COSTS)):
            gram[axis][axis] += 1 / PRIOR_SCALE**2
            target[axis] -= (point[axis] - first[axis]) / PRIOR_SCALE**2
        step = [max(-MAX_STEP, min(MAX_STEP, move)) for move in solve(gram, target)]
        gained = 0.0
        for part in (1.0, 0.5, 0.2):
            candidate = [z + part * move for z, move in zip(point, step, strict=True)]
            candidate_errors = errors_at(candidate)
            candidate_loss = loss_of(candidate_errors, candidate)
            if candidate_loss < loss:
                gained = loss - candidate_loss
                point, errors, loss = candidate, candidate_errors, candidate_loss
                break
        if gained < 0.005 * loss:
            break
    return scale.costs(point)


class _Scale:
    """Costs as coordinates: logarithms, except for the one cost that can be negative, in units of `base_s`."""

    def __init__(self, start: CostModel, observations: Sequence[Observation]) -> None:
        prompts = max(call.prompt_tokens for one in observations for call in one.calls)
        batch_size = max(len(one.calls) for one in observations)
        self._unit = start.base_s or min(call.first_s for one in observations for call in one.calls)
        small = 0.01 * self._unit
        # Costs below these have no observable effect; the logarithm of zero would never move.
        self._least = {
            "base_s": small,
            "prefill_token_s": small / prompts,
            "sequence_s": small / batch_size,
            "kv_token_s": small / (batch_size * prompts),
            "attention_pair_s": small / prompts**2,
            "request_s": small,
            "request_token_s": small / prompts,
            "token_s": small / batch_size,
            "reply_s": small,
        }

    def point(self, costs: CostModel) -> list[float]:
        return [
            getattr(costs, name) / self._unit
            if name == MAY_BE_NEGATIVE
            else math.log(max(getattr(costs, name), self._least[name]))
            for name in COSTS
        ]

    def costs(self, point: Sequence[float]) -> CostModel:
        values = {
            name: z * self._unit if name == MAY_BE_NEGATIVE else math.exp(z)
            for name, z in zip(COSTS, point, strict=True)
        }
        return cost_model({name: float(f"{value:.4g}") for name, value in values.items()})


def _errors(observed: Sequence[Figures], modeled: Sequence[Figures]) -> list[float]:
    return [
        math.log(max(model[name], 1e-9) / seen[name]) / NOISE
        for seen, model in zip(observed, modeled, strict=True)
        for name in seen
    ]
