"""Workloads of the ablation: recorded traces, the Harbor scenario and synthetic loads, each short and drawn by seed.

A workload is what is played (`runs`), the engines that serve it and the gateway in front of them. All but the last
three use one engine as the shipped model has it; `small` has little KV and few sequences, `mute` an engine without
metrics, `fleet` four engines behind a gateway that knows shared prefixes.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from msgspec import Struct

from benchmarks.trace_files import AGENTS, AZURE, CODING, MOONCAKE, trace_file
from benchmarks.wait_arrivals import burst_mix, poisson_mix
from benchmarks.windows import FanOutFrontend, fan_outs
from inferry.cli.simulate_setup import Arm, direct_arms, drop_oversized, gateway_arm, simulated_workers
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import assign_lanes, poisson, scale_rate, uniform_lengths
from inferry.sim.calls import Call, Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import EngineFlags, EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Frontend, HashMemo
from inferry.sim.traces import read_trace

LANES = {Lane.P0: 0.3, Lane.P1: 0.5, Lane.P2: 0.2}
FULL_RATE = 15.0
"""Calls per second of the mix that saturate one engine (`wait_simulation.full_load(poisson_mix, 60.0)`)."""
JITTER_S = 0.001
SMALL = EngineFlags(max_num_seqs=8, kv_tokens=40_000)
FLEET = 4

Arrivals = Callable[[int], list[Run]]
"""Seed to runs."""
ArmOf = Callable[[EngineModel], Arm]


class Load(Struct, frozen=True):
    """A workload by name, in words, with what is played and what serves it."""

    name: str
    words: str
    runs: Arrivals
    arm: ArmOf


# -- what is played --------------------------------------------------------------------------------------------------


@cache
def _trace(name: str) -> list[Run]:
    return read_trace(trace_file(name))


def trace_part(name: str, calls: int, scale: float = 1.0) -> Arrivals:
    """Consecutive runs from a position drawn by seed, with at least `calls` calls, `scale` times as dense, in lanes."""

    def made(seed: int) -> list[Run]:
        runs = sorted(_trace(name), key=lambda run: run.at)
        first = named_rng(seed, "place").randrange(len(runs))
        span_s = runs[-1].at - runs[0].at + 1.0
        chosen: list[Run] = []
        steps = 0
        for number in range(first, first + len(runs)):
            if steps >= calls:
                break
            run = runs[number % len(runs)]
            chosen.append(replace(run, at=run.at + span_s * (number // len(runs)) - runs[first].at))
            steps += len(run.steps)
        return assign_lanes(scale_rate(chosen, scale), LANES, seed)

    return made


def coding(seed: int) -> list[Run]:
    """The first calls of coding agents whose sessions begin within 50 s, from a position drawn by seed."""
    begin = named_rng(seed, "place").uniform(0.0, 149.0)
    near = [run for run in _trace(CODING) if begin <= run.at < begin + 50.0]
    return assign_lanes([replace(run, at=run.at - begin, steps=run.steps[:4]) for run in near], LANES, seed)


def long_prompts(seed: int) -> list[Run]:
    """Short live calls beside P1 and P2 calls of 8,000 to 30,000 prompt tokens."""
    long = uniform_lengths((8_000, 30_000), (50, 300))
    return [
        *poisson_mix(seed, 0.4 * FULL_RATE, 40.0),
        *poisson(seed, 0.6, 40.0, long, lane=Lane.P1, tenants=("l", "m"), name="long"),
        *poisson(seed, 0.3, 40.0, long, lane=Lane.P2, tenants=("n",), name="batch"),
    ]


def crowd(seed: int) -> list[Run]:
    """Bursts of P0 and P1 calls, more than one engine can prefill in time, and no batch jobs."""
    return [run for run in burst_mix(seed, 2.6 * FULL_RATE, 25.0) if run.lane is not Lane.P2]


def flood(seed: int, rate: float = 0.8, jobs: int = 250) -> list[Run]:
    """Batch jobs that arrive within a second, beside live calls."""
    batch = poisson(seed, float(jobs), 1.0, uniform_lengths((1000, 5000), (100, 300)), lane=Lane.P2, name="flood")
    return [*(run for run in poisson_mix(seed, rate * FULL_RATE, 30.0) if run.lane is not Lane.P2), *batch]


def fan_out(seed: int) -> list[Run]:
    """Groups of eight jobs with a shared prefix of 8,000 tokens, and live calls, before four engines."""
    live = [run for run in poisson_mix(seed, 2.5 * FULL_RATE, 12.0) if run.lane is not Lane.P2]
    return [*fan_outs(seed, FLEET, 8_000, 0.9), *live]


def jittered(runs: Sequence[Run], seed: int, number: int) -> list[Run]:
    """The same runs with arrivals moved by about a millisecond: the differences are noise."""
    rng = named_rng(seed, f"placebo/{number}")
    return [replace(run, at=max(0.0, run.at + rng.gauss(0.0, JITTER_S))) for run in runs]


# -- what serves it --------------------------------------------------------------------------------------------------


class ResumableFrontend(ControlledFrontend):
    """Preempted jobs continue where they stopped, as before engines that take token ids."""

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        super()._offer(call, replace(job, resume=ResumeMode.CONTINUE, preemptions=job.attempt - 1), now)


class PrefixGroupFrontend(FanOutFrontend, ControlledFrontend):
    """A controlled gateway whose jobs name their prefixes."""


def one_engine(model: EngineModel) -> Arm:
    return gateway_arm("defaults", DEFAULT_LANES, simulated_workers(None, model))


def direct(model: EngineModel) -> Arm:
    return direct_arms(model, 1)[0]


def _small(model: EngineModel) -> Arm:
    return Arm("small", (SMALL,), lambda: ResumableFrontend(DEFAULT_LANES))


def _mute(model: EngineModel) -> Arm:
    return Arm("mute", (model.flags,), lambda: ControlledFrontend(DEFAULT_LANES, counts=False))


def _fleet(model: EngineModel) -> Arm:
    def frontend() -> Frontend:
        return PrefixGroupFrontend(DEFAULT_LANES)

    return Arm("fleet", (model.flags,) * FLEET, frontend)


LOADS = {
    one.name: one
    for one in (
        Load("harbor", "Harbor, 150 batch jobs", lambda seed: harbor(seed, seconds=30.0, digests=150), one_engine),
        Load("azure", "Azure 2023 code, twice as dense", trace_part(AZURE, 500, 2.0), one_engine),
        Load(
            "mooncake",
            "Mooncake conversation at 0.25 of its rate",
            trace_part(MOONCAKE, 110, 0.25),
            one_engine,
        ),
        Load("coding", "coding agents, contexts to 32k", coding, one_engine),
        Load(
            "agents",
            "NAT agent sessions, six times as dense",
            trace_part(AGENTS, 300, 6.0),
            one_engine,
        ),
        Load("steady", "mix at 0.9 of saturation", lambda seed: poisson_mix(seed, 0.9 * FULL_RATE, 40.0), one_engine),
        Load("overload", "mix at 1.5 of saturation", lambda seed: poisson_mix(seed, 1.5 * FULL_RATE, 25.0), one_engine),
        Load("bursts", "mix in bursts at saturation", lambda seed: burst_mix(seed, FULL_RATE, 40.0), one_engine),
        Load("crowd", "bursts of live calls beyond saturation", crowd, one_engine),
        Load("long", "short live calls beside prompts of 8k to 30k tokens", long_prompts, one_engine),
        Load("flood", "250 batch jobs at once beside live calls", flood, one_engine),
        Load(
            "small", "batch jobs and live calls, eight sequences, little KV", lambda seed: flood(seed, 1.0, 60), _small
        ),
        Load("mute", "bursts, an engine without metrics", lambda seed: burst_mix(seed, FULL_RATE, 30.0), _mute),
        Load("fleet", "families of siblings and live calls, four engines", fan_out, _fleet),
    )
}


@cache
def engine_model() -> EngineModel:
    """The shipped model with KV in larger blocks, which are counted faster."""
    model = load_model()
    return replace(model, flags=replace(model.flags, block_tokens=64))


@lru_cache(maxsize=6)
def runs_of(load: str, seed: int) -> tuple[list[Run], HashMemo]:
    """The runs of a workload and seed, and a memo of their block hashes for all simulations of them."""
    one = LOADS[load]
    return drop_oversized(one.runs(seed), [one.arm(engine_model())]), {}
