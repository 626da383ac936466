"""Batching windows: `adaptive` against `off` and `fixed`, in virtual time.

With a model of an H200 that batches continuously: slices of recorded traces, and runs that fan out to jobs with one
long shared prefix. `adaptive` must not increase TTFT there: its p95 may be at most 1.02 times that of `off`. It holds a
first job only if jobs with its prefix were seen to compute the prefix again; `adaptive_decides_as_off` is how often
both decide alike. `fixed`, which always holds jobs with a shared prefix, shows the possible gain.

With a worker that pads: one pass at a time, whose duration depends on its longest prompt, and all answers at its end;
with and without a known maximum batch. `off` sends every job as its own pass, which queues in the worker. `adaptive`
must reach 1.5 times the throughput of `off` at saturation, and its p95 must not exceed that of `fixed` at any load by
more than 1 %.

Recorded traces are left out where there are none (`benchmarks.trace_files`).
"""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from benchmarks.trace_files import find_traces
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan, Ended
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.sim.calls import Call, CallRow, Run, Step
from inferry.sim.costs import load_model
from inferry.sim.events import Events
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.prompt_memory import PrefixAwareEstimator
from inferry.sim.prompts import length
from inferry.sim.rng import named_rng
from inferry.sim.simulation import HashMemo, Simulation
from inferry.sim.traces import read_trace

Window = Literal["adaptive", "fixed", "off"]
WINDOWS: tuple[Window, ...] = ("off", "adaptive", "fixed")
SEEDS = tuple(range(1, 11))
SLICE_CALLS = 320
PROMPT_TOKENS_PER_S = 6000
"""Arrival rate of a slice: low enough that a hold is visible beside the queue."""
PREFILL_BOUND = 3072
FAN_OUTS = (
    (1, 2_000, 2.0, PREFILL_BOUND),
    (4, 2_000, 2.0, PREFILL_BOUND),
    (4, 2_000, 4.0, PREFILL_BOUND),
    (4, 12_000, 0.5, 16_384),
    (8, 12_000, 1.0, 16_384),
)
"""Workers, tokens of the shared prefix, groups per second and worker, bound on prompt tokens in prefill."""
MAX_TTFT_RATIO = 1.02
MIN_THROUGHPUT_RATIO = 1.5
MAX_P95_RATIO_TO_FIXED = 1.01


# -- continuous batching ---------------------------------------------------------------------------------------------


class PrefixFrontend(GatewayFrontend):
    """Every job names its template, which is its first prompt segment, and its prefixes."""

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        chain, prefix = 0, []
        for piece in call.step.prompt[:8]:
            chain = hash((chain, *piece))
            prefix.append(f"{chain:x}")
        super()._offer(call, replace(job, template_id=self.template(prefix), prefix=tuple(prefix)), now)

    def template(self, prefix: Sequence[str]) -> str | None:
        return prefix[0]


def trace_slice(runs: Sequence[Run], seed: int) -> list[Run]:
    """Consecutive runs of the trace from a position drawn by seed, over two lanes, at a sustainable rate."""
    rng = named_rng(seed, "slice")
    first = rng.randrange(len(runs))
    chosen: list[Run] = []
    calls = tokens = 0
    for n in range(len(runs)):
        if calls >= SLICE_CALLS:
            break
        run = runs[(first + n) % len(runs)]
        if first + n >= len(runs):
            run = replace(run, at=run.at + runs[-1].at - runs[0].at)
        chosen.append(replace(run, lane=rng.choice((Lane.P0, Lane.P1))))
        calls += len(run.steps)
        tokens += sum(length(step.prompt) for step in run.steps)
    begin = min(run.at for run in chosen)
    time_scale = tokens / PROMPT_TOKENS_PER_S / max(1e-9, max(run.at for run in chosen) - begin)
    return [replace(run, at=(run.at - begin) * time_scale) for run in chosen]


class FanOutFrontend(PrefixFrontend):
    """Jobs of a group belong to one run and name no template."""

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        super()._offer(call, replace(job, run_id=job.run_id.split("-")[0]), now)

    def template(self, prefix: Sequence[str]) -> str | None:
        return None


def fan_outs(seed: int, workers: int, prefix_tokens: int, groups_per_s: float) -> list[Run]:
    """Groups of eight jobs within about 10 ms, with a long prefix of their own."""
    rng = named_rng(seed, "fan-out")
    runs: list[Run] = []
    at = 0.0
    for group in range(SLICE_CALLS // 8):
        at += rng.expovariate(groups_per_s * workers)
        for n in range(8):
            prompt = ((group + 1, 0, prefix_tokens), ((group + 1 << 16) + n, 0, rng.randint(100, 300)))
            step = Step("call", prompt, rng.randint(20, 120))
            run_id = f"{group}-{n}"
            runs.append(Run(run_id=run_id, tenant="a", lane=Lane.P1, at=at + rng.expovariate(1 / 0.01), steps=(step,)))
    return sorted(runs, key=lambda run: run.at)


def simulate(
    runs: Sequence[Run],
    window: Window,
    workers: int,
    hashes: HashMemo,
    frontend_of: type[PrefixFrontend],
    prefill_bound: int,
) -> list[CallRow]:
    model = load_model()
    lanes = {lane: replace(policy, window=window) for lane, policy in DEFAULT_LANES.items()}
    capacity = Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, prefill_bound)
    frontend = frontend_of(lanes, capacity, estimate=PrefixAwareEstimator())
    simulation = Simulation(frontend, model.costs, model.flags, workers=workers, hashes=hashes)
    simulation.play(runs)
    return simulation.rows


def compared(
    slices: Sequence[list[Run]],
    workers: int = 1,
    frontend_of: type[PrefixFrontend] = PrefixFrontend,
    prefill_bound: int = PREFILL_BOUND,
) -> dict[str, Any]:
    """TTFT of all slices together and, for the ratio to `off`, slice by slice."""
    times: dict[Window, list[list[float]]] = {window: [] for window in WINDOWS}
    cached: dict[Window, int] = dict.fromkeys(WINDOWS, 0)
    alike = True
    for runs in slices:
        hashes: HashMemo = {}
        rows = {window: simulate(runs, window, workers, hashes, frontend_of, prefill_bound) for window in WINDOWS}
        alike = alike and rows["adaptive"] == rows["off"]
        for window, all_rows in rows.items():
            times[window].append([row.ttft_s for row in all_rows if row.ttft_s is not None])
            cached[window] += sum(row.cached for row in all_rows)
    tokens = sum(length(step.prompt) for runs in slices for run in runs for step in run.steps)
    figures: dict[str, Any] = {"calls": sum(map(len, times["off"])), "adaptive_decides_as_off": alike}
    for window in WINDOWS:
        ratios = [p95(one) / p95(off) for one, off in zip(times[window], times["off"], strict=True)]
        pooled = [one for some in times[window] for one in some]
        figures[window] = {
            "ttft_ms_p50": round(1000 * statistics.median(pooled), 2),
            "ttft_ms_p95": round(1000 * p95(pooled), 2),
            "p95_to_off_worst_seed": round(max(ratios), 4),
            "p95_to_off_best_seed": round(min(ratios), 4),
            "cached_part": round(cached[window] / tokens, 4),
        }
    figures["holds"] = figures["adaptive"]["p95_to_off_worst_seed"] <= MAX_TTFT_RATIO
    return figures


# -- padded passes ---------------------------------------------------------------------------------------------------

PASS_S = 0.030
PROMPT_TOKEN_S = 20e-6
JOB_S = 0.002
PROMPT_TOKENS = (200, 1000)
MAX_BATCH = 16
SATURATED_S = 10.0
PADDED_JOBS = 1000
"""Jobs per load, including the first ones, from which `adaptive` learns."""
LOADS = (0.05, 0.1, 0.2, 0.4, 0.8)
SATURATION = 2.0
FULL_RATE = MAX_BATCH / (PASS_S + PROMPT_TOKENS[1] * PROMPT_TOKEN_S + MAX_BATCH * JOB_S)
"""Jobs per second in full passes; loads are fractions of it."""
CAPACITIES = {"says how many it takes": Capacity(sequences=2 * MAX_BATCH), "one pass at a time": Capacity()}
_ROUTE = RouteKey("m")
_PAYLOAD = Payload(api="completions", body=b"", sampling=Sampling())


class PaddedSimulation:
    """One worker that pads, behind the real scheduler. `waits` are seconds from arrival to answer."""

    def __init__(self, window: Window, capacity: Capacity) -> None:
        policy = LanePolicy(max_wait_ms=120, coalesce_ms=25, window=window, max_batch=MAX_BATCH, queue_limit=10**6)
        self.waits: list[float] = []
        self.passes = 0
        self._scheduler = Scheduler({Lane.P1: policy})
        self._events = Events()
        self._plans: deque[BatchPlan] = deque()
        self._is_running = False
        view = WorkerView(
            worker="w", models=frozenset({"m"}), phase=Phase.READY, capacity=capacity, observed_at=0.0, pads=True
        )
        self._scheduler.observe(view, 0.0)

    def play(self, jobs: Iterator[InferenceJob], until: float | None = None) -> None:
        for job in jobs:
            self._events.at(job.arrived_at, self._arrive, job)
        self._events.run(until)

    def _arrive(self, now: float, job: InferenceJob) -> None:
        self._scheduler.offer(job, now)
        self._tick(now)

    def _tick(self, now: float, _: object = None) -> None:
        tick = self._scheduler.tick(now)
        self._plans.extend(tick.plans)
        if not self._is_running:
            self._start(now)
        if tick.wake_at is not None:
            self._events.at(tick.wake_at, self._tick)

    def _start(self, now: float) -> None:
        if self._plans:
            self._is_running = True
            self.passes += 1
            plan = self._plans.popleft()
            took = PASS_S + (plan.padded_tokens or 0) * PROMPT_TOKEN_S + len(plan.jobs) * JOB_S
            self._events.at(now + took, self._end, plan)

    def _end(self, now: float, plan: BatchPlan) -> None:
        self._is_running = False
        for job in plan.jobs:
            self.waits.append(now - job.arrived_at)
            self._scheduler.progress(job.job_id, Ended(), now)
        self._start(now)
        self._tick(now)


def padded_jobs(seed: int, jobs: int, rate: float, fan_out: int = 1) -> Iterator[InferenceJob]:
    """Groups of `fan_out` jobs within a few milliseconds; 1: independent jobs."""
    rng = named_rng(seed, f"padded/{fan_out}")
    number, at = 0, 0.0
    while number < jobs:
        at += rng.expovariate(rate / fan_out)
        for _ in range(fan_out):
            number += 1
            tokens = Estimate.exactly(rng.randint(*PROMPT_TOKENS))
            yield InferenceJob(
                job_id=str(number),
                tenant="a",
                run_id="r",
                step_id=str(number),
                lane=Lane.P1,
                route=_ROUTE,
                batch_key=BatchKey(_ROUTE),
                footprint=Footprint(tokens, Estimate.exactly(0), Estimate.exactly(1)),
                token_budget=tokens.expected + 1,
                prompt_hash="",
                arrived_at=at + (rng.uniform(0, 0.006) if fan_out > 1 else 0.0),
                max_wait_s=0.120,
                payload=_PAYLOAD,
            )


def padded(capacity: Capacity) -> dict[str, Any]:
    """Throughput at saturation, and p95 by load, for independent jobs and for fan-outs."""
    done: dict[Window, int] = dict.fromkeys(WINDOWS, 0)
    rate = SATURATION * FULL_RATE
    for seed in SEEDS:
        for window in WINDOWS:
            simulation = PaddedSimulation(window, capacity)
            simulation.play(padded_jobs(seed, int(rate * SATURATED_S), rate), SATURATED_S)
            done[window] += len(simulation.waits)
    seconds = SATURATED_S * len(SEEDS)
    figures: dict[str, Any] = {
        "saturated_jobs_per_s": {window: round(done[window] / seconds, 1) for window in WINDOWS},
        "adaptive_to_off": round(done["adaptive"] / done["off"], 3),
        "loads": {},
    }
    for fan_out in (1, 8):
        for load in LOADS:
            figures["loads"][f"{'alone' if fan_out == 1 else 'fan-out'} {load:g}"] = _padded_load(
                capacity, load, fan_out
            )
    figures["throughput_holds"] = figures["adaptive_to_off"] >= MIN_THROUGHPUT_RATIO
    for other in ("off", "fixed"):
        figures[f"adaptive_to_{other}_p95_worst"] = max(
            one[f"adaptive_to_{other}_p95"] for one in figures["loads"].values()
        )
    figures["no_worse_than_fixed"] = figures["adaptive_to_fixed_p95_worst"] <= MAX_P95_RATIO_TO_FIXED
    return figures


def _padded_load(capacity: Capacity, load: float, fan_out: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    waits: dict[Window, list[float]] = {window: [] for window in WINDOWS}
    for window in WINDOWS:
        passes = 0
        for seed in SEEDS:
            simulation = PaddedSimulation(window, capacity)
            simulation.play(padded_jobs(seed, PADDED_JOBS, load * FULL_RATE, fan_out))
            waits[window] += simulation.waits
            passes += simulation.passes
        figures[window] = {
            "ms_p50": round(1000 * statistics.median(waits[window]), 1),
            "ms_p95": round(1000 * p95(waits[window]), 1),
            "jobs_per_pass": round(len(waits[window]) / passes, 2),
        }
    figures["adaptive_to_off_p95"] = round(p95(waits["adaptive"]) / p95(waits["off"]), 4)
    figures["adaptive_to_fixed_p95"] = round(p95(waits["adaptive"]) / p95(waits["fixed"]), 4)
    return figures


def p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def measure() -> dict[str, Any]:
    continuous: dict[str, Any] = {}
    for path in find_traces():
        runs = read_trace(path)
        continuous[path.name.split(".")[0]] = compared([trace_slice(runs, seed) for seed in SEEDS])
    for workers, prefix_tokens, rate, bound in FAN_OUTS:
        slices = [fan_outs(seed, workers, prefix_tokens, rate) for seed in SEEDS]
        name = f"siblings, workers: {workers}, beginning: {prefix_tokens}, families/s: {rate * workers:g}"
        continuous[name] = compared(slices, workers, FanOutFrontend, bound)
    for name, one in continuous.items():
        ratios = "  ".join(
            f"{w} p50 {one[w]['ttft_ms_p50']:.1f}, p95 {one[w]['ttft_ms_p95']:.1f} ms"
            f" ({one[w]['p95_to_off_worst_seed']:.3f} x off at worst, {100 * one[w]['cached_part']:.1f} % cached)"
            for w in WINDOWS
        )
        print(f"{name:56s} {one['calls']:5d} calls  {ratios}", flush=True)
    table = {}
    for name, capacity in CAPACITIES.items():
        table[name] = one = padded(capacity)
        print(f"padded, {name}: saturated {one['saturated_jobs_per_s']} jobs/s", flush=True)
        for load, figures in one["loads"].items():
            line = "  ".join(
                f"{w} p95 {figures[w]['ms_p95']:8.1f} ms, {figures[w]['jobs_per_pass']:4.1f} a pass" for w in WINDOWS
            )
            print(f"  {load:12s} {line}", flush=True)
    return {
        "seeds": list(SEEDS),
        "slice_calls": SLICE_CALLS,
        "prompt_tokens_per_s": PROMPT_TOKENS_PER_S,
        "targets": {
            "ttft_p95_to_off_at_most": MAX_TTFT_RATIO,
            "padded_throughput_to_off_at_least": MIN_THROUGHPUT_RATIO,
        },
        "continuous_holds": all(one["holds"] for one in continuous.values()),
        "continuous": continuous,
        "padded_full_jobs_per_s": round(FULL_RATE, 1),
        "padded": table,
    }


if __name__ == "__main__":
    measure()
