"""The cost of a load test: GPU utilisation, cost per run, and runs over budget.

GPUs are paid by the hour, busy or idle. So the bill is for the whole time, and a run pays for its fraction of all work.
Work is the engine time of a call in a full batch: it does not depend on how calls were sent, so arms are comparable.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from inferry.loadgen.figures import after_warmup, percentile
from inferry.loadgen.rows import CallRow, RunRow
from inferry.sim.costs import EngineModel

Work = Callable[[CallRow], float]


class Price(Struct, frozen=True, kw_only=True):
    """The price of the GPUs and the budget of a run. None: not given."""

    gpu_per_hour: float | None = None
    gpus: int = 1
    run_budget: float | None = None


class CostFigures(Struct, frozen=True, kw_only=True):
    """The figures of a before/after comparison. None: an input is missing.

    `utilisation` is modelled work over time and GPUs. `step_p95_s`, `cost_per_run` and `over_budget` are of the live
    lanes if there are any; `batch_done_s` is when the batch lane had finished.
    """

    utilisation: float | None
    step_p95_s: float | None
    runs: int
    bill: float | None
    cost_per_run: float | None
    cost_per_run_by_lane: dict[str, float]
    over_budget: float | None
    batch_done_s: float | None
    wall_s: float


def compute_costs(
    rows: Sequence[CallRow], runs: Sequence[RunRow], warmup_s: float, price: Price, model: EngineModel | None
) -> CostFigures:
    """Only completed runs count; their bill includes the work of the others."""
    calls = after_warmup(rows, warmup_s)
    wall_s = max((row.ended_s for row in calls), default=warmup_s) - warmup_s
    work = tokens if model is None else engine_seconds(model, calls)
    spent: dict[str, float] = {}
    for row in calls:
        spent[row.run] = spent.get(row.run, 0.0) + work(row)
    all_work = sum(spent.values())
    finished = [run for run in runs if run.ok and run.run in spent]
    agents = [run for run in finished if run.lane != "P2"] or finished
    lanes = {run.lane for run in agents}
    steps = sorted(row.end_s for row in calls if row.lane in lanes and row.outcome != "cancelled")
    batch = [row.ended_s for row in calls if row.lane == "P2"]
    bill = None if price.gpu_per_hour is None else price.gpu_per_hour / 3600 * price.gpus * wall_s
    by_lane, over = {}, None
    if bill is not None and finished:
        # The work of runs that did not complete is paid by those that did.
        rate = bill / (sum(spent[run.run] for run in finished) or 1.0)
        by_lane = {
            lane: _mean(rate * spent[run.run] for run in finished if run.lane == lane)
            for lane in sorted({run.lane for run in finished})
        }
        cost_per_run = _mean(rate * spent[run.run] for run in agents)
        if price.run_budget is not None:
            over = _mean(rate * spent[run.run] > price.run_budget for run in agents)
    else:
        cost_per_run = None
    return CostFigures(
        utilisation=None if model is None or not wall_s else all_work / wall_s / price.gpus,
        step_p95_s=percentile(steps, 0.95),
        runs=len(agents),
        bill=bill,
        cost_per_run=cost_per_run,
        cost_per_run_by_lane=by_lane,
        over_budget=over,
        batch_done_s=max(batch) if batch else None,
        wall_s=wall_s,
    )


def tokens(row: CallRow) -> float:
    """Work without an engine model: tokens."""
    return row.prompt - min(row.cached, row.prompt) + row.produced


def engine_seconds(model: EngineModel, calls: Sequence[CallRow]) -> Work:
    """Work as engine time in full batches: as many sequences as flags and KV allow with contexts of this length."""
    costs, flags = model.costs, model.flags
    context = _mean(row.prompt + row.produced / 2 for row in calls) if calls else 1.0
    batch = max(1.0, min(flags.max_num_seqs, flags.kv_tokens / max(1.0, context)))
    per_prompt_token = costs.prefill_token_s + max(0.0, costs.prefill_step_s) / flags.max_num_batched_tokens

    def work(row: CallRow) -> float:
        if row.ttft_s is None:
            return 0.0
        cached = min(row.cached, row.prompt)
        computed = row.prompt - cached
        prefill = computed * (per_prompt_token + costs.attention_pair_s * (cached + row.prompt) / 2)
        token = costs.base_s / batch + costs.sequence_s + costs.kv_token_s * (row.prompt + row.produced / 2)
        return prefill + row.produced * token

    return work


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
