"""GPU-seconds of jobs estimated from outside, against the true division of every step, in the simulator.

The truth divides each step by what it did: the fixed part evenly among the sequences in it, and what each sequence adds
to the step is its own. The estimate sees what the gateway sees of an HTTP server: when jobs are sent, their tokens and
ends, and where the server has them, its counters of steps, prompt tokens and output tokens.

- `run_error_p50`, `run_error_p95`: quantiles over runs of |estimate / truth - 1|; `job_error_*` the same over jobs.
- `total_error`: estimated GPU time of all jobs over the engine's true busy time, less 1.
- `unattributed`: part of the busy time that no job was charged for.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.controller import engines
from inferry.dispatch.gpu_accounting import SETTLE_INTERVAL_S
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import Tick
from inferry.domain.streams import End
from inferry.domain.workers import Capacity, EngineCounts, Load
from inferry.ledger.attribution import GpuTimeEstimator
from inferry.sim.calls import Call, Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import CostModel, EngineFlags, load_model
from inferry.sim.engine import Engine
from inferry.sim.harbor import harbor
from inferry.sim.sequence import EngineEvent, EngineSequence
from inferry.sim.simulation import Simulation

SEEDS = range(1, 6)
SECONDS = 60.0
WARM_UP_S = 10.0
"""Runs of the first seconds are not compared: the costs of the engine are learned meanwhile."""
LOADS = {"few agents": (0.1, 0), "agents and some batch jobs": (0.3, 20), "burst": (1.0, 100)}
"""Scale of the Harbor workload and number of batch jobs."""
COUNTS_INTERVAL_S = 0.5
"""Interval at which an engine publishes its counters."""


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
            self._settle_at = now + SETTLE_INTERVAL_S
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


def play(
    runs: Sequence[Run], costs: CostModel, flags: EngineFlags, *, counts: bool = True, warm_up_s: float = 0.0
) -> dict[str, float]:
    """Errors of the estimate in one simulation, of the runs that begin after `warm_up_s`."""
    frontend = EstimatingFrontend(DEFAULT_LANES, counts=counts)
    simulation = Simulation(frontend, costs, flags)
    engine = MeteredEngine(costs, flags)
    simulation.engines[0] = engine
    simulation.play(runs)
    estimator = frontend.estimators[0]
    early = {run.run_id for run in runs if run.at < warm_up_s}
    true_jobs = {job: spent_s for job, spent_s in engine.spent_s.items() if _run_of(job) not in early}
    job_errors = [abs(frontend.seconds[job] / spent_s - 1) for job, spent_s in true_jobs.items()]
    run_seconds = _by_run(frontend.seconds)
    run_errors = [abs(run_seconds[run] / spent_s - 1) for run, spent_s in _by_run(true_jobs).items()]
    return {
        "jobs": len(job_errors),
        "runs": len(run_errors),
        "engine_busy_s": engine.busy_s,
        "total_error": sum(frontend.seconds.values()) / engine.busy_s - 1,
        "run_error_p50": _quantile(0.5, run_errors),
        "run_error_p95": _quantile(0.95, run_errors),
        "job_error_p50": _quantile(0.5, job_errors),
        "job_error_p95": _quantile(0.95, job_errors),
        "unattributed": estimator.unattributed_s / estimator.busy_s,
    }


def _run_of(job: str) -> str:
    return job.rpartition("/")[0]


def _by_run(seconds: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for job, one in seconds.items():
        found[_run_of(job)] += one
    return found


def _quantile(q: float, values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure() -> dict[str, Any]:
    """Every engine and load, with and without counters: the mean over seeds, and the worst seed."""
    flags = load_model().flags
    found: dict[str, Any] = {}
    for engine, (costs, _) in engines().items():
        for load, (scale, digests) in LOADS.items():
            for counts in (True, False):
                results = [
                    play(
                        harbor(seed, seconds=SECONDS, scale=scale, digests=digests),
                        costs,
                        flags,
                        counts=counts,
                        warm_up_s=WARM_UP_S,
                    )
                    for seed in SEEDS
                ]
                name = f"{engine}, {load}, {'counters' if counts else 'no counters'}"
                found[name] = {
                    key: {
                        "mean": round(statistics.mean(one[key] for one in results), 4),
                        "worst": round(max(abs(one[key]) for one in results), 4),
                    }
                    for key in results[0]
                }
                print(name, found[name]["run_error_p95"], found[name]["job_error_p95"], flush=True)
    return {"seeds": len(SEEDS), "seconds": SECONDS, "warm_up_s": WARM_UP_S, "cases": found}
