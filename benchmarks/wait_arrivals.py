"""Arrivals for the measurements of waits and of constants: five kinds, each by seed and intensity."""

from collections.abc import Callable, Sequence
from functools import cache, partial

from benchmarks.trace_files import AZURE, find_trace
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import bursts, poisson, uniform_lengths
from inferry.sim.calls import Run
from inferry.sim.harbor import harbor
from inferry.sim.rng import named_rng
from inferry.sim.traces import read_trace

TENANTS = ("a", "b", "c")
MIX = {
    Lane.P0: (0.25, uniform_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.35, uniform_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.40, uniform_lengths((1000, 5000), (100, 300))),
}
BURST_EVERY_S = {Lane.P0: 6.0, Lane.P1: 10.0, Lane.P2: 25.0}

Arrivals = Callable[[int, float, float], list[Run]]
"""Seed, intensity and seconds to the runs."""


def poisson_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """Independent live, standard and batch calls."""
    return [
        run
        for lane, (part, lengths) in MIX.items()
        for run in poisson(seed, rate * part, seconds, lengths, lane=lane, tenants=TENANTS, name=lane.name)
    ]


def burst_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """Seven in ten calls arrive in bursts; every lane has its own period."""
    runs: list[Run] = []
    for lane, (part, lengths) in MIX.items():
        every, name = BURST_EVERY_S[lane], lane.name
        calls = max(1, round(0.7 * rate * part * every))
        runs += bursts(seed, calls, every, every / 10, seconds, lengths, lane=lane, tenants=TENANTS, name=f"{name}b")
        runs += poisson(seed, 0.3 * rate * part, seconds, lengths, lane=lane, tenants=TENANTS, name=f"{name}p")
    return runs


def stepped_mix(seed: int, rate: float, seconds: float) -> list[Run]:
    """40 s at 0.72 of the rate, then 20 s at 1.6, repeated."""
    rng = named_rng(seed, "steps")
    return [run for run in poisson_mix(seed, 1.6 * rate, seconds) if run.at % 60 >= 40 or rng.random() < 0.45]


def agent_runs(seed: int, scale: float, seconds: float) -> list[Run]:
    """Harbor's agents in their webhook bursts, with its batch jobs spread over the time."""
    rng = named_rng(seed, "digests")
    return [
        replace(run, at=rng.uniform(0, seconds)) if run.lane is Lane.P2 else run
        for run in harbor(seed, seconds=seconds, scale=scale, digests=int(1.2 * seconds))
    ]


def trace_calls(runs: Sequence[Run], seed: int, speed: float, seconds: float) -> list[Run]:
    """A trace from a moment drawn by seed on, `speed` times as fast, over the lanes and tenants of the mix. It begins
    again where it ends.
    """
    rng = named_rng(seed, "trace")
    length_s = runs[-1].at
    begin = rng.uniform(0, max(0.0, length_s - seconds * speed))
    end = begin + seconds * speed
    lanes, parts = list(MIX), [part for part, _ in MIX.values()]
    return [
        replace(
            run,
            run_id=f"{run.run_id}-{repeated}" if repeated else run.run_id,
            at=(repeated * length_s + run.at - begin) / speed,
            lane=rng.choices(lanes, parts)[0],
            tenant=rng.choice(TENANTS),
        )
        for repeated in range(1 + int(end / length_s))
        for run in runs
        if begin <= repeated * length_s + run.at < end
    ]


@cache
def arrivals() -> dict[str, tuple[Arrivals, float]]:
    """By name: the arrivals, and an intensity above what the engine can serve."""
    kinds: dict[str, tuple[Arrivals, float]] = {
        "poisson": (poisson_mix, 60.0),
        "bursts": (burst_mix, 60.0),
        "steps": (stepped_mix, 60.0),
        "agents": (agent_runs, 4.0),
    }
    if (path := find_trace(AZURE)) is not None:
        kinds["trace"] = (partial(trace_calls, read_trace(path)), 40.0)
    return kinds
