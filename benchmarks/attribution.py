"""GPU-seconds of jobs estimated from outside, against the true division of every step, in the simulator.

The truth divides each step by what it did: the fixed part evenly among the sequences in it, and what each sequence adds
to the step is its own. The estimate sees what the gateway sees of an HTTP server: when jobs are sent, their tokens and
ends, and where the server has them, its counters of steps, prompt tokens and output tokens.

- `per_run_error`: 95th percentile over runs of |estimate / truth - 1|, of runs with at least `MIN_RUN_S` of GPU time.
- `per_job_error_p95`: the same over jobs.
- `total_error`: estimated over true GPU time of all jobs, less 1.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import Tick
from inferry.domain.streams import End
from inferry.domain.workers import Capacity, EngineCounts, Load
from inferry.ledger.attribution import GpuTimeEstimator
from inferry.sim.calls import Call, Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.sequence import EngineEvent, EngineSequence
from inferry.sim.simulation import Simulation

SETTLE_S = 0.25
COUNTS_INTERVAL_S = 0.5


class MeteredEngine(Engine):
    """Divides the time of its steps among its sequences, in `spent_s` by key."""

    def __init__(self, costs: CostModel, flags: EngineFlags) -> None:
        super().__init__(costs, flags, fast_forward=False)
        self.spent_s: dict[str, float] = defaultdict(float)

    def _end_steps(self, now: float) -> list[EngineEvent]:
        count, costs, chunks = self._steps_in_flight, self.costs, self._chunks
        present = len(self._decoding) + len(chunks)
        base_s = costs.base_s * count / present
        for sequence in self._decoding:
            context = sequence.computed + self.steps - (sequence.decoding_since or 0)
            kv_tokens = count * context + count * (count - 1) / 2
            self.spent_s[sequence.key] += base_s + costs.sequence_s * count + costs.kv_token_s * kv_tokens
        for sequence, tokens in chunks:
            pairs = tokens * (sequence.computed + tokens / 2)
            self.spent_s[sequence.key] += (
                base_s
                + costs.prefill_step_s / len(chunks)
                + costs.prefill_token_s * tokens
                + costs.attention_pair_s * pairs
            )
        return super()._end_steps(now)


class EstimatingFrontend(ControlledFrontend):
    """The gateway, which estimates the GPU time of its jobs. `seconds` is by job."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], *, counts: bool = True) -> None:
        super().__init__(lanes, counts=counts)
        self.seconds: dict[str, float] = defaultdict(float)
        self.estimators: list[GpuTimeEstimator] = []
        self._settle_at = 0.0
        self._counts_at: list[tuple[float, EngineCounts] | None] = []

    def open(self, simulation: Simulation) -> None:
        super().open(simulation)
        for engine in simulation.engines:
            self.estimators.append(GpuTimeEstimator(0.0, engine.flags.max_num_batched_tokens))
            self._counts_at.append(None)

    def first_token(self, call: Call, now: float) -> None:
        attempt = self._open[call.job_id][1]
        self.estimators[call.worker or 0].first_token(attempt, now)
        super().first_token(call, now)

    def _apply(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            for job in plan.jobs:
                self.estimators[int(plan.worker)].sent(self._open[job.job_id][1], now)
        super()._apply(tick, now)

    def _close(self, job_id: str, end: End, now: float) -> None:
        call, attempt = self._open[job_id]
        self._count_tokens(call.worker or 0, now)
        share = self.estimators[call.worker or 0].ended(attempt, end.usage, now)
        if share is not None:
            self.seconds[job_id] += share.seconds
        super()._close(job_id, end, now)

    def _compute_capacity(self, worker: int, engine: Engine, now: float) -> Capacity:
        if now >= self._settle_at:
            self._settle_at = now + SETTLE_S
            self.settle(worker, engine, now)
        return super()._compute_capacity(worker, engine, now)

    def _count_tokens(self, worker: int, now: float) -> None:
        """Bring the output of the attempts up to date, as deltas do in dispatch."""
        engine = self._simulation.engines[worker]
        for call, attempt in self._open.values():
            if call.worker == worker and isinstance(call.sequence, EngineSequence) and call.first_at is not None:
                attempt.output_tokens = engine.output_tokens_at(call.sequence, now)

    def settle(self, worker: int, engine: Engine, now: float) -> None:
        self._count_tokens(worker, now)
        last = self._counts_at[worker]
        if self._counts and (last is None or now >= last[0] + COUNTS_INTERVAL_S):
            last = self._counts_at[worker] = (
                now,
                EngineCounts(engine.steps, self._prompt_tokens[worker], engine.output_tokens),
            )
        load = Load(engine.running, engine.waiting, engine.kv_tokens)
        self.estimators[worker].settle(now, last[1] if last else None, last[0] if last else None, load)


def play(runs: Sequence[Run], costs: CostModel, flags: EngineFlags, *, counts: bool = True) -> dict[str, float]:
    """Errors of the estimate in one simulation."""
    frontend = EstimatingFrontend(DEFAULT_LANES, counts=counts)
    simulation = Simulation(frontend, costs, flags)
    engine = MeteredEngine(costs, flags)
    simulation.engines[0] = engine
    simulation.play(runs)
    estimator = frontend.estimators[0]
    true_jobs, true_runs = engine.spent_s, _by_run(engine.spent_s)
    runs_found = _by_run(frontend.seconds)
    return {
        "jobs": len(true_jobs),
        "busy_s": engine.busy_s,
        "total_error": sum(frontend.seconds.values()) / engine.busy_s - 1,
        "true_closure": sum(true_jobs.values()) / engine.busy_s - 1,
        "run_error_p50": _quantile(0.5, [abs(runs_found[run] / s - 1) for run, s in true_runs.items()]),
        "run_error_p95": _quantile(0.95, [abs(runs_found[run] / s - 1) for run, s in true_runs.items()]),
        "job_error_p50": _quantile(0.5, [abs(frontend.seconds[job] / s - 1) for job, s in true_jobs.items()]),
        "job_error_p95": _quantile(0.95, [abs(frontend.seconds[job] / s - 1) for job, s in true_jobs.items()]),
        "unattributed": estimator.unattributed_s / estimator.busy_s,
    }


def _by_run(seconds: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for job, one in seconds.items():
        found[job.rpartition("/")[0]] += one
    return found


def _quantile(q: float, values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure() -> dict[str, Any]:
    return {}
