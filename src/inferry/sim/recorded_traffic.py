"""Recorded calls as runs of a simulation, and an engine model fitted to the same calls. No content is needed."""

from collections.abc import Sequence

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.traffic import RecordedCall
from inferry.scheduling.capacity.step_costs import PRIOR_COSTS, PRIOR_WEIGHT
from inferry.sim.calls import Run, Step
from inferry.sim.costs import CostModel, EngineFlags, EngineModel
from inferry.sim.nnls import nnls
from inferry.sim.prompts import Piece
from inferry.sim.report import quantile

MAX_TOOL_S = 300.0
"""A longer pause between two calls of a run is no tool: the later call does not depend on the earlier one."""
MIN_CALLS = 50
"""Calls that a fit needs."""
PROMPT_PRIOR_WEIGHT = 0.005
"""Weight of the prior of a prompt token and of the wait for a first token, as `PRIOR_WEIGHT`. Prompts of different
lengths outweigh it."""


class _Chain(Struct):
    """Calls of one run, each after the end of the one before."""

    first: RecordedCall
    steps: list[Step]
    ended_at: float


def recorded_runs(calls: Sequence[RecordedCall]) -> list[Run]:
    """Runs that make the calls again, from time 0 on.

    A call that arrived after another call of its run had ended follows it in the simulation too, after the same pause.
    Calls of a run that overlap are separate runs of the simulation. What was cached is shared with the calls of the
    same template, or of the same run.
    """
    segments: dict[tuple[str, str], int] = {}
    chains: list[_Chain] = []
    open_chains: dict[tuple[str, str], list[_Chain]] = {}
    for number, call in enumerate(calls):
        step = Step(str(number), _prompt(call, number, segments), max(1, call.output_tokens))
        ended_at = call.arrived_at + call.total_ms / 1000
        siblings = open_chains.setdefault((call.tenant, call.run_id), [])
        before = [chain for chain in siblings if chain.first.lane == call.lane and _follows(chain, call)]
        if not before:
            chain = _Chain(call, [step], ended_at)
            chains.append(chain)
            siblings.append(chain)
            continue
        chain = max(before, key=lambda one: one.ended_at)
        last = chain.steps[-1]
        chain.steps[-1] = Step(last.name, last.prompt, last.output, call.arrived_at - chain.ended_at)
        chain.steps.append(step)
        chain.ended_at = ended_at
    start = calls[0].arrived_at if calls else 0.0
    return [
        Run(
            run_id=f"{chain.first.run_id}#{number}",
            tenant=chain.first.tenant,
            lane=Lane[chain.first.lane],
            at=chain.first.arrived_at - start,
            steps=tuple(chain.steps),
        )
        for number, chain in enumerate(chains)
    ]


def _follows(chain: _Chain, call: RecordedCall) -> bool:
    return chain.ended_at <= call.arrived_at <= chain.ended_at + MAX_TOOL_S


def _prompt(call: RecordedCall, number: int, segments: dict[tuple[str, str], int]) -> tuple[Piece, ...]:
    """Cached tokens are of a segment that calls share; the others are the call's own."""
    cached = min(call.cached_tokens, max(0, call.prompt_tokens - 1))
    segment = segments.setdefault((call.tenant, call.template_id or call.run_id), -len(segments) - 1)
    own = (number + 1, 0, max(1, call.prompt_tokens - cached))
    return ((segment, 0, cached), own) if cached else (own,)


def fitted_model(calls: Sequence[RecordedCall], flags: EngineFlags) -> EngineModel | None:
    """Step costs that explain the times of the calls on their workers; None for fewer than `MIN_CALLS` calls.

    A first token takes a step, its prompt, and a wait for the step that runs or for other prompts; every further token
    takes a step. A step has a constant part and one for each sequence that runs beside. First and further tokens have
    the same weight, whatever their number and size. Calls that ran alone do not tell the two parts of a step apart, and
    prompts of one length do not tell the cost of a token from the wait: as in `StepCostModel`, calibrated costs split
    what the calls leave open (ridge regression). The wait is left out of the model: the simulator makes its own.
    """
    known = [call for call in calls if call.first_token_ms is not None and call.queue_ms is not None]
    if len(known) < MIN_CALLS:
        return None
    first, further = _Rows(), _Rows()
    for call in known:
        assert call.first_token_ms is not None
        assert call.queue_ms is not None
        batch = max(1.0, call.engine_batch or 1.0)
        uncached = float(max(1, call.prompt_tokens - call.cached_tokens))
        first.add((1.0, batch, uncached, 1.0), (call.first_token_ms - call.queue_ms) / 1000)
        if call.output_tokens > 1:
            seconds = (call.total_ms - call.first_token_ms) / 1000 / (call.output_tokens - 1)
            further.add((1.0, batch, 0.0, 0.0), seconds)
    rows, values = first.rows + further.rows, first.values + further.values
    weights = [*first.weights(), *further.weights()]
    priors_s = (further if further.rows else first).prior_s()
    squares = [sum(weight * row[i] ** 2 for row, weight in zip(rows, weights, strict=True)) for i in range(4)]
    for i, (prior_s, of) in enumerate(zip((*priors_s, 0.0), squares, strict=True)):
        rows.append((float(i == 0), float(i == 1), float(i == 2), float(i == 3)))
        values.append(prior_s)
        weights.append((PRIOR_WEIGHT if i < 2 else PROMPT_PRIOR_WEIGHT) * of)
    base_s, sequence_s, token_s, _ = nnls(rows, values, weights)
    costs = CostModel(
        base_s=max(base_s, 1e-6), sequence_s=sequence_s, prefill_token_s=max(token_s, 1e-9), kv_token_s=0.0
    )
    return EngineModel(name="fitted to the recorded calls", costs=costs, flags=flags)


class _Rows:
    """Equations of one kind."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, float]] = []
        self.values: list[float] = []

    def add(self, row: tuple[float, float, float, float], value: float) -> None:
        self.rows.append(row)
        self.values.append(max(1e-6, value))

    def weights(self) -> list[float]:
        mean = sum(self.values) / len(self.values) if self.values else 1.0
        return [1 / (mean * mean * len(self.values))] * len(self.values)

    def prior_s(self) -> tuple[float, float, float]:
        """Seconds of a step, of a sequence in it and of a prompt token, in their calibrated ratio, that explain the
        mean value of steps without prompts."""
        step, sequence, token = PRIOR_COSTS
        scale = sum(self.values) / sum(step + sequence * batch for _, batch, _, _ in self.rows)
        return scale * step, scale * sequence, scale * token


class LanePrediction(Struct, frozen=True, kw_only=True):
    """What a simulation says of one lane. `throughput` is output tokens per second of a call, `cost` is per 1,000
    output tokens: money, or GPU-seconds where there are no prices. Times are seconds."""

    calls: int
    attainment: float
    ttft_p50: float | None
    ttft_p95: float | None
    throughput: float
    cost: float


class LaneMeasurement(Struct, frozen=True, kw_only=True):
    """What the ledger says of one lane, in the units of `LanePrediction`. `attainment` is of the calls that were
    judged by the targets of their time. None where nothing was recorded."""

    calls: int
    attainment: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    throughput: float | None
    cost: float | None


def measured_lanes(calls: Sequence[RecordedCall], *, in_money: bool) -> dict[str, LaneMeasurement]:
    """The recorded figures of each lane. Cost is GPU-seconds unless `in_money`."""
    return {
        lane.name: _measured(mine, in_money=in_money)
        for lane in Lane
        if (mine := [call for call in calls if call.lane == lane.name])
    }


def _measured(calls: Sequence[RecordedCall], *, in_money: bool) -> LaneMeasurement:
    firsts = [call.first_token_ms / 1000 for call in calls if call.first_token_ms is not None]
    judged = [call.attained for call in calls if call.attained is not None]
    costs = [None if call.cost_nanos is None else call.cost_nanos / 1e9 for call in calls]
    known = [cost for cost in (costs if in_money else [call.gpu_seconds for call in calls]) if cost is not None]
    tokens, total_s = sum(call.output_tokens for call in calls), sum(call.total_ms for call in calls) / 1000
    return LaneMeasurement(
        calls=len(calls),
        attainment=sum(judged) / len(judged) if judged else None,
        ttft_p50=quantile(firsts, 0.5),
        ttft_p95=quantile(firsts, 0.95),
        throughput=tokens / total_s if total_s > 0 else None,
        cost=1000 * sum(known) / tokens if len(known) == len(calls) and tokens else None,
    )
