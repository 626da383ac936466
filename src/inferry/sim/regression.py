"""Engine costs from probes: rows that are linear in the costs, solved by least squares.

The time of a step is a sum of costs, and probes are designed so that steps can be identified. Effects that are not
linear (a server and an engine that wait for each other, bursts) give no rows.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.nnls import nnls
from inferry.sim.observations import CallTiming, Observation
from inferry.sim.replay import measured

COSTS = (
    "base_s",
    "prefill_step_s",
    "prefill_token_s",
    "sequence_s",
    "kv_token_s",
    "attention_pair_s",
    "request_s",
    "request_token_s",
    "token_s",
    "reply_s",
)
MAY_BE_NEGATIVE = "prefill_step_s"
NOISE = 0.05
"""Relative error that counts as noise."""
KNEE = 2.0
"""Errors above this multiple of the noise count linearly instead of squared (Huber loss)."""
STEADY_EVENTS = 6
NEGLIGIBLE_S = 1e-9

Costs = dict[str, float]


class CannotFit(Exception):
    """The observations do not determine the costs; the message says why."""


class Row(Struct, frozen=True):
    """`value` seconds were observed where the model has the sum of `terms`."""

    terms: Costs
    value: float


def solve_rows(observations: Sequence[Observation], flags: EngineFlags) -> CostModel:
    """Costs by least squares. Which bursts the server delayed is not known in advance: the best guess is kept."""
    fixed: list[Row] = []
    batches: list[tuple[int, Row]] = []
    for one in observations:
        fixed += [
            row for row in (*_first_rows(one, flags), *_inject_rows(one, flags), *_spread_rows(one)) if row.value > 0
        ]
        batches += _itl_rows(one)
    if not batches:
        raise CannotFit("no answer was long enough to tell a token's time: the server ends them early")
    best: tuple[float, Costs] | None = None
    sizes = sorted({batch for batch, _ in batches})
    for engine_up_to in sizes:
        rows = list(fixed)
        for batch, row in batches:
            rows.append(row if batch <= engine_up_to else Row({"token_s": float(batch)}, row.value))
        costs = _least_squares(rows)
        loss = sum(huber(_log_error(max(_sum(row, costs), costs["token_s"] * batch), row)) for batch, row in batches)
        loss += sum(huber(_log_error(_sum(row, costs), row)) for row in fixed)
        # At equal error the engine is the cause: that needs one cost fewer.
        if best is None or loss <= best[0]:
            best = (loss, costs)
    assert best is not None
    return cost_model(best[1])


def _sum(row: Row, costs: Costs) -> float:
    return sum(costs[name] * times for name, times in row.terms.items())


def _log_error(predicted_s: float, row: Row) -> float:
    """Error of a row in units of noise, on a logarithmic scale."""
    return math.log(max(predicted_s, NEGLIGIBLE_S) / row.value) / NOISE


def _least_squares(rows: Sequence[Row]) -> Costs:
    """Least squares on relative errors, with outliers weighted down.

    A value that is far too small would get the largest weight. So errors are relative to at least the median of similar
    rows, and in later rounds to at least the prediction of the other rows.
    """
    # The last column is the prefill step with the opposite sign: prompt work may overlap with the rest of the step.
    matrix = [[*(row.terms.get(name, 0.0) for name in COSTS), -row.terms.get(MAY_BE_NEGATIVE, 0.0)] for row in rows]
    values = [row.value for row in rows]
    scales = [max(row.value, typical_values) for row, typical_values in zip(rows, _typical_values(rows), strict=True)]
    trust = [1.0] * len(rows)
    costs = dict.fromkeys(COSTS, 0.0)
    for _ in range(8):
        weights = [part / (scale * scale) for part, scale in zip(trust, scales, strict=True)]
        *found, hidden_s = nnls(matrix, values, weights)
        costs = dict(zip(COSTS, found, strict=True))
        costs[MAY_BE_NEGATIVE] -= hidden_s
        predicted_values = [_sum(row, costs) for row in rows]
        errors = [abs(_log_error(predicted_s, row)) for predicted_s, row in zip(predicted_values, rows, strict=True)]
        trust = [1.0 if size <= KNEE else KNEE / size for size in errors]
        scales = [max(row.value, predicted_s) for row, predicted_s in zip(rows, predicted_values, strict=True)]
    return costs


def _typical_values(rows: Sequence[Row]) -> list[float]:
    """For each row the median of the rows with the same costs and the same burst size."""
    by_kind: dict[tuple[frozenset[str], float], list[float]] = {}
    kinds = [(frozenset(row.terms), row.terms.get("sequence_s", 0.0)) for row in rows]
    for kind, row in zip(kinds, rows, strict=True):
        by_kind.setdefault(kind, []).append(row.value)
    medians = {kind: statistics.median(values) for kind, values in by_kind.items()}
    return [medians[kind] for kind in kinds]


def _first_rows(one: Observation, flags: EngineFlags) -> list[Row]:
    """Single prompts: request, prefill in chunks, reply. A repeated prompt is computed again if it is not cached."""
    if one.kind != "hit" and len(one.calls) > 1:
        return []
    rows = []
    for number, call in enumerate(one.calls):
        cached = 0
        if one.kind == "hit" and number and flags.prefix_caching:
            block = flags.block_tokens
            cached = call.cached_tokens or (call.prompt_tokens - 1) // block * block
        prompt, computed = call.prompt_tokens, call.prompt_tokens - cached
        steps = math.ceil(computed / flags.max_num_batched_tokens)
        engine = {
            "base_s": steps,
            "prefill_step_s": steps,
            "prefill_token_s": computed,
            "attention_pair_s": computed * (cached + prompt) / 2,
        }
        server = {"request_s": 1.0, "request_token_s": prompt, "token_s": 0.5, "reply_s": 1.0}
        rows.append(Row({**engine, **server}, call.first_s))
    engine_first_s = measured(one).get("engine_first")
    if engine_first_s is not None and len(one.calls) == 1:
        rows.append(Row(engine, engine_first_s))
    return rows


def _itl_rows(one: Observation) -> list[tuple[int, Row]]:
    """Pure decode steps, with the number of decoding sequences."""
    if one.kind not in ("prefill", "decode", "context"):
        return []
    window = _steady_state(one.calls)
    if window is None:
        return []
    itl, context = window
    batch = len(one.calls)
    return [(batch, Row({"base_s": 1.0, "sequence_s": batch, "kv_token_s": batch * context}, itl))]


def _steady_state(calls: Sequence[CallTiming]) -> tuple[float, float] | None:
    """The inter-token latency while all calls decode, and the context of each at half of that time."""
    begin = max(call.heard_s[0] for call in calls)
    end = min(call.heard_s[-1] for call in calls)
    itls, contexts = [], []
    for call in calls:
        inside = [(i, at) for i, at in enumerate(call.heard_s) if begin <= at <= end]
        if len(inside) >= STEADY_EVENTS:
            (i, at), (j, end_at) = inside[0], inside[-1]
            # An event can carry more than one token.
            tokens = (j - i) * (call.output_tokens - 1) / max(1, len(call.heard_s) - 1)
            itls.append((end_at - at) / tokens)
            contexts.append(call.prompt_tokens + (i + j) / 2)
    itl = statistics.median(itls) if itls else 0.0
    # No row: the streams were too short, or a delayed client received all events at once.
    return (itl, statistics.fmean(contexts)) if itl > 0 else None


def _inject_rows(one: Observation, flags: EngineFlags) -> list[Row]:
    """Time that a prompt added to the steps of sequences decoding beside it: pure engine time."""
    rows = []
    for injected, batch, steady_s in injections(one):
        stretches = []
        for call in batch:
            before = [i for i, at in enumerate(call.heard_s) if at <= injected.sent_s]
            after = [i for i, at in enumerate(call.heard_s) if at >= injected.heard_s[0]]
            if before and after:
                i, j = before[-1], after[0]
                stretches.append(call.heard_s[j] - call.heard_s[i] - (j - i) * steady_s)
        stretch = statistics.median(stretches) if stretches else 0.0
        tokens = injected.prompt_tokens
        if stretch > steady_s / 2:
            steps = math.ceil(tokens / max(1, flags.max_num_batched_tokens - len(batch)))
            terms = {"prefill_step_s": steps, "prefill_token_s": tokens, "attention_pair_s": tokens * tokens / 2}
            rows.append(Row(terms, stretch))
    return rows


def injections(one: Observation) -> list[tuple[CallTiming, list[CallTiming], float]]:
    """The injected prompts, the decoding calls beside them, and their undisturbed inter-token latency."""
    if one.kind != "inject":
        return []
    started_s = min(call.heard_s[0] for call in one.calls)
    batch = [call for call in one.calls if call.sent_s <= started_s]
    found = []
    for injected in one.calls:
        if injected.sent_s > started_s:
            itls = [
                b - a
                for call in batch
                for a, b in pairwise(call.heard_s)
                if b <= injected.sent_s or a >= injected.ended_s
            ]
            if itls:
                found.append((injected, batch, statistics.median(itls)))
    return found


def _spread_rows(one: Observation) -> list[Row]:
    """Server time per token, from the spread of one step's tokens over their clients.

    The longest pauses, one per step, separate the bursts of events.
    """
    if one.kind != "decode" or len(one.calls) < 8:
        return []
    steady = _steady_state(one.calls)
    if steady is None:
        return []
    begin = max(call.heard_s[0] for call in one.calls)
    end = min(call.heard_s[-1] for call in one.calls)
    events = sorted(at for call in one.calls for at in call.heard_s if begin < at < end)
    steps = round(len(events) / len(one.calls))
    if steps < STEADY_EVENTS:
        return []
    pauses = sorted(range(len(events) - 1), key=lambda i: events[i] - events[i + 1])[: steps - 1]
    edges = [-1, *sorted(pauses), len(events) - 1]
    bursts = [(events[j] - events[i + 1], j - i - 1) for i, j in pairwise(edges) if j - i - 1 >= len(one.calls) / 2]
    if not bursts:
        return []
    each = statistics.median(spread / others for spread, others in bursts)
    return [Row({"token_s": 1.0}, each)] if each > 0 else []


def cost_model(costs: Costs) -> CostModel:
    return msgspec.convert(costs, CostModel)


def huber(error: float) -> float:
    size = abs(error)
    return size * size if size <= KNEE else 2 * KNEE * size - KNEE * KNEE
