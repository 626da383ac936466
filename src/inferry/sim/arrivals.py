"""Synthetic arrivals by seed, and ways to shape them and recorded ones (`traces`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from random import Random

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import Piece
from inferry.sim.rng import named_rng

Lengths = Callable[[Random], tuple[int, int]]
"""Draws the prompt and output tokens of a call."""


def uniform_lengths(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    return lambda rng: (rng.randint(*prompt), rng.randint(*output))


def poisson(
    seed: int,
    rate_per_s: float,
    seconds: float,
    lengths: Lengths,
    *,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "call",
) -> Iterator[Run]:
    """Independent calls with Poisson arrivals."""
    arrive, shape = named_rng(seed, f"{name}/arrive"), named_rng(seed, f"{name}/shape")
    number, at = 0, 0.0
    while (at := at + arrive.expovariate(rate_per_s)) < seconds:
        yield single_call_run(f"{name}-{number}", shape.choice(tenants), lane, at, lengths(shape))
        number += 1


def bursts(
    seed: int,
    calls: int,
    period_s: float,
    duration_s: float,
    seconds: float,
    lengths: Lengths,
    *,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "burst",
) -> Iterator[Run]:
    """Periodic bursts, each within `duration_s`. The first one starts after half a period."""
    arrive, shape = named_rng(seed, f"{name}/arrive"), named_rng(seed, f"{name}/shape")
    number, start = 0, period_s / 2
    while start < seconds:
        for at in sorted(start + arrive.random() * duration_s for _ in range(calls)):
            yield single_call_run(f"{name}-{number}", shape.choice(tenants), lane, at, lengths(shape))
            number += 1
        start += period_s


def agents(
    seed: int,
    count: int,
    steps: int,
    lengths: Lengths,
    *,
    tool_s: tuple[float, float] = (0.05, 0.5),
    ramp_s: float = 1.0,
    lane: Lane = Lane.P1,
    tenants: Sequence[str] = ("a",),
    name: str = "agent",
) -> Iterator[Run]:
    """A closed loop: each agent calls, waits for the answer, uses a tool, and calls again with the grown context."""
    arrive, shape = named_rng(seed, f"{name}/arrive"), named_rng(seed, f"{name}/shape")
    segment = 0
    for number in range(count):
        context: tuple[Piece, ...] = ()
        run_steps = []
        for index in range(steps):
            prompt, output = lengths(shape)
            segment += 1
            context = (*context, (segment, 0, prompt))
            run_steps.append(Step(f"step-{index}", context, output, shape.uniform(*tool_s)))
            segment += 1
            context = (*context, (segment, 0, output))
        yield Run(
            run_id=f"{name}-{number}",
            tenant=shape.choice(tenants),
            lane=lane,
            at=arrive.uniform(0, ramp_s),
            steps=tuple(run_steps),
        )


# Shaping of synthetic and recorded runs.


def scale_rate(runs: Iterable[Run], scale: float) -> list[Run]:
    """The same runs at `scale` times the arrival rate. Times within a run stay the same."""
    return [replace(run, at=run.at / scale) for run in runs]


def truncate(runs: Iterable[Run], seconds: float) -> list[Run]:
    """The runs that begin before this time."""
    return [run for run in runs if run.at < seconds]


def assign_lanes(runs: Iterable[Run], parts: Mapping[Lane, float], seed: int) -> list[Run]:
    """A lane for every run, drawn by seed with these probabilities."""
    rng = named_rng(seed, "lanes")
    lanes, weights = list(parts), list(parts.values())
    return [replace(run, lane=rng.choices(lanes, weights)[0]) for run in runs]


def busiest_window(runs: Sequence[Run], calls: int) -> list[Run]:
    """The shortest time window with at least `calls` calls, or all runs; it begins at 0."""
    ordered = sorted(runs, key=lambda run: run.at)
    best: tuple[float, int, int] | None = None
    begin = calls_inside = 0
    for end, run in enumerate(ordered, 1):
        calls_inside += len(run.steps)
        while calls_inside - len(ordered[begin].steps) >= calls:
            calls_inside -= len(ordered[begin].steps)
            begin += 1
        if calls_inside >= calls:
            window = (run.at - ordered[begin].at, begin, end)
            best = window if best is None else min(best, window)
    chosen = ordered if best is None else ordered[best[1] : best[2]]
    return [replace(run, at=run.at - chosen[0].at) for run in chosen]


def single_call_run(run_id: str, tenant: str, lane: Lane, at: float, lengths: tuple[int, int]) -> Run:
    """A run of one call with these prompt and output tokens."""
    prompt, output = lengths
    # Derived from the name, so that calls of different arrival streams share no prefix.
    segment = int.from_bytes(blake2b(run_id.encode(), digest_size=7).digest(), "big")
    step = Step("call", ((segment, 0, max(1, prompt)),), max(1, output))
    return Run(run_id=run_id, tenant=tenant, lane=lane, at=at, steps=(step,))
