"""The costs of an engine moved to where its model, playing the probes, sees what was seen."""

import math
from collections.abc import Sequence

import msgspec

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.nnls import solve
from inferry.sim.observations import Observation
from inferry.sim.replay import Figures, measured, predicted
from inferry.sim.rows import COSTS, KNEE, MAY_BE_NEGATIVE, NOISE, cost_model, huber

PULL = 0.15
"""How far, as a part of itself, a cost may go from what the rows say before that counts as much as one error."""
MOST_MOVE = 0.2
PROBE_MOVE = 0.05
TURNS = 6
SHARES = 40


def share_out(observations: Sequence[Observation], costs: CostModel, flags: EngineFlags) -> CostModel:
    """How much of what every call pays is the server's, and so is paid one after the other by calls that come at once.

    For a call alone `request_s` and `reply_s` are the same; crowds tell them apart.
    """
    crowds = [one for one in observations if one.kind in ("burst", "decode") and len(one.calls) > 4]
    both = costs.request_s + costs.reply_s
    if not crowds or not both:
        return costs
    figures = [{name: value for name, value in measured(one).items() if name in ("first", "total")} for one in crowds]

    def shared(share: float) -> CostModel:
        return msgspec.structs.replace(costs, request_s=share * both, reply_s=(1 - share) * both)

    def loss(share: float) -> float:
        model = shared(share)
        return sum(map(huber, _errors(figures, [predicted(one, model, flags) for one in crowds])))

    return shared(min((number / SHARES for number in range(SHARES + 1)), key=loss))


def polish(observations: Sequence[Observation], start: CostModel, flags: EngineFlags, turns: int = TURNS) -> CostModel:
    """Move the costs to where the model, playing the probes, sees what was seen: steps of Gauss and Newton.

    What the rows say pulls back: the model jumps where a request just misses a step, and must not be led by that.
    """
    figures = [measured(one) for one in observations]
    scale = _Scale(start, observations)
    first = scale.point(start)
    point = first

    def errors_at(point: Sequence[float]) -> list[float]:
        costs = scale.costs(point)
        return _errors(figures, [predicted(one, costs, flags) for one in observations])

    def loss_of(errors: Sequence[float], point: Sequence[float]) -> float:
        return sum(map(huber, errors)) + sum(((z - z0) / PULL) ** 2 for z, z0 in zip(point, first, strict=True))

    errors = errors_at(point)
    loss = loss_of(errors, point)
    for _ in range(turns):
        slopes = []
        for axis in range(len(COSTS)):
            moved = errors_at([z + PROBE_MOVE * (i == axis) for i, z in enumerate(point)])
            slopes.append([(b - a) / PROBE_MOVE for a, b in zip(errors, moved, strict=True)])
        trust = [1.0 if abs(error) <= KNEE else KNEE / abs(error) for error in errors]
        gram = [[sum(w * a * b for w, a, b in zip(trust, x, y, strict=True)) for y in slopes] for x in slopes]
        target = [-sum(w * a * e for w, a, e in zip(trust, x, errors, strict=True)) for x in slopes]
        for axis in range(len(COSTS)):
            gram[axis][axis] += 1 / PULL**2
            target[axis] -= (point[axis] - first[axis]) / PULL**2
        step = [max(-MOST_MOVE, min(MOST_MOVE, move)) for move in solve(gram, target)]
        gained = 0.0
        for part in (1.0, 0.5, 0.2):
            there = [z + part * move for z, move in zip(point, step, strict=True)]
            errors_there = errors_at(there)
            loss_there = loss_of(errors_there, there)
            if loss_there < loss:
                gained = loss - loss_there
                point, errors, loss = there, errors_there, loss_there
                break
        if gained < 0.005 * loss:
            break
    return scale.costs(point)


class _Scale:
    """Costs as coordinates: logarithms, but for the one cost that can be negative, which is counted in base steps."""

    def __init__(self, start: CostModel, observations: Sequence[Observation]) -> None:
        prompts = max(call.prompt_tokens for one in observations for call in one.calls)
        crowd = max(len(one.calls) for one in observations)
        self._unit = start.base_s or min(call.first_s for one in observations for call in one.calls)
        small = 0.01 * self._unit
        # Costs below these change nothing that was seen; from zero a logarithm could never move.
        self._least = {
            "base_s": small,
            "prefill_token_s": small / prompts,
            "sequence_s": small / crowd,
            "kv_token_s": small / (crowd * prompts),
            "attention_pair_s": small / prompts**2,
            "request_s": small,
            "request_token_s": small / prompts,
            "token_s": small / crowd,
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


def _errors(wanted: Sequence[Figures], had: Sequence[Figures]) -> list[float]:
    return [
        math.log(max(model[name], 1e-9) / seen[name]) / NOISE
        for seen, model in zip(wanted, had, strict=True)
        for name in seen
    ]
