"""The runs of a load test from its options. The same options give the same runs, to the last token."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import agents, assign_lanes, bursts, poisson, uniform_lengths
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import length, tail
from inferry.sim.workload import SimulationSetupError, Workload, check, parse_lanes, runs_by_seed

DEFAULT_SECONDS = 60.0


class EmptyLoad(Exception):
    """The options give no load; the message says why."""


class Bursts(Struct, frozen=True):
    """`calls` calls within `width_s`, every `every_s` (seconds)."""

    calls: int
    every_s: float
    width_s: float


class Agents(Struct, frozen=True):
    """`count` agents of `steps` steps each, with a tool time drawn from `tool_s` between steps."""

    count: int
    steps: int
    tool_s: tuple[float, float] = (0.05, 0.5)


class TrafficOptions(Struct, frozen=True, kw_only=True):
    """Exactly one kind of arrivals, and its size. `lanes` are the fractions of runs by lane.

    Scenarios have their own lanes, lengths and tenants; traces have their own lengths and tenants.
    """

    poisson_per_s: float | None = None
    bursts: Bursts | None = None
    agents: Agents | None = None
    scenario: str | None = None
    trace: Path | None = None
    seconds: float | None = None
    seed: int = 7
    scale: float = 1.0
    digests: int = 300
    lanes: Mapping[Lane, float] = MappingProxyType({Lane.P1: 1.0})
    prompt_tokens: tuple[int, int] = (200, 2000)
    output_tokens: tuple[int, int] = (20, 200)
    tenants: tuple[str, ...] = ("bench",)
    session_gap_s: float = 1.0

    @property
    def name(self) -> str:
        if self.poisson_per_s is not None:
            return f"Poisson, {self.poisson_per_s * self.scale:g} calls/s"
        if self.bursts is not None:
            return f"bursts of {round(self.bursts.calls * self.scale)} calls every {self.bursts.every_s:g} s"
        if self.agents is not None:
            return f"{round(self.agents.count * self.scale)} agents of {self.agents.steps} steps"
        if self.trace is not None:
            return self.trace.name
        return f"{self.scenario}, scale {self.scale:g}, seed {self.seed}"


def make_runs(traffic: TrafficOptions) -> list[Run]:
    """The runs, in the order in which they begin."""
    kinds = (traffic.poisson_per_s, traffic.bursts, traffic.agents, traffic.scenario, traffic.trace)
    if sum(kind is not None for kind in kinds) != 1:
        raise EmptyLoad("name one kind of arrivals: --poisson, --bursts, --agents, --scenario, --trace or --sweep")
    if not 0 < traffic.scale < inf:
        raise EmptyLoad("--scale must be above 0")
    if traffic.seconds is not None and not 0 < traffic.seconds < inf:
        raise EmptyLoad("--duration must be above 0")
    runs = _recorded_runs(traffic) if traffic.scenario or traffic.trace else _synthetic_runs(traffic)
    if not runs:
        raise EmptyLoad("no call would be sent: give it a longer --duration or a higher rate")
    return sorted(runs, key=lambda run: run.at)


def _recorded_runs(traffic: TrafficOptions) -> list[Run]:
    """Scenarios and traces, as the simulator plays them."""
    workload = Workload(
        trace=traffic.trace,
        scenario=traffic.scenario,
        seconds=traffic.seconds,
        scale=traffic.scale,
        digests=traffic.digests,
        lanes=traffic.lanes,
        session_gap_s=traffic.session_gap_s,
    )
    try:
        return runs_by_seed(check(workload), [traffic.seed])[traffic.seed]
    except SimulationSetupError as error:
        raise EmptyLoad(str(error).replace("--seconds", "--duration")) from None


def _synthetic_runs(traffic: TrafficOptions) -> list[Run]:
    seconds, scale, seed = traffic.seconds or DEFAULT_SECONDS, traffic.scale, traffic.seed
    lengths, tenants = uniform_lengths(traffic.prompt_tokens, traffic.output_tokens), traffic.tenants
    if traffic.poisson_per_s is not None:
        if not 0 < traffic.poisson_per_s < inf:
            raise EmptyLoad("--poisson must be above 0")
        runs = list(poisson(seed, traffic.poisson_per_s * scale, seconds, lengths, tenants=tenants))
    elif traffic.bursts is not None:
        one = traffic.bursts
        runs = list(bursts(seed, round(one.calls * scale), one.every_s, one.width_s, seconds, lengths, tenants=tenants))
    else:
        shortened = traffic.agents
        assert shortened is not None
        # Starts are spread over the duration, so that agents are not synchronised.
        runs = list(
            agents(
                seed,
                round(shortened.count * scale),
                shortened.steps,
                lengths,
                tool_s=shortened.tool_s,
                ramp_s=seconds,
                tenants=tenants,
            )
        )
    return assign_lanes(runs, traffic.lanes, seed)


def fit_to_context(runs: Sequence[Run], context_tokens: int | None) -> tuple[list[Run], int]:
    """The runs with prompts cut at the front to fit the context, and the number of cut prompts."""
    if context_tokens is None:
        return list(runs), 0
    cut = 0

    def fitting(step: Step) -> Step:
        nonlocal cut
        if length(step.prompt) + step.output <= context_tokens:
            return step
        cut += 1
        output = min(step.output, max(1, context_tokens // 2))
        return Step(step.name, tail(step.prompt, context_tokens - output), output, step.tool_s)

    return [replace(run, steps=tuple(map(fitting, run.steps))) for run in runs], cut


# Parsing of options.


def parse_bursts(text: str) -> Bursts:
    """`40,10,1`: forty calls within one second, every ten."""
    try:
        calls, every_s, width_s = text.split(",")
        made = Bursts(int(calls), float(every_s), float(width_s))
    except ValueError:
        raise EmptyLoad(f"--bursts must be of the form 40,10,1 (CALLS,PERIOD,DURATION); got {text!r}") from None
    if made.calls < 1 or not 0 < made.every_s < inf or not 0 <= made.width_s < inf:
        raise EmptyLoad(f"--bursts needs at least one call and times above 0; got {text!r}")
    return made


def parse_agents(text: str) -> Agents:
    """`20,6` or `20,6,0.1-2`: twenty agents of six steps, with tools of 0.1 to 2 s."""
    words = text.split(",")
    try:
        count, steps = int(words[0]), int(words[1])
        tool = tuple(map(float, words[2].split("-"))) if len(words) == 3 else Agents(1, 1).tool_s
        low, high = tool if len(tool) == 2 else (tool[0], tool[0])
    except (ValueError, IndexError):
        raise EmptyLoad(f"--agents must be of the form 20,6 or 20,6,0.1-2 (COUNT,STEPS,TOOL_S); got {text!r}") from None
    if count < 1 or steps < 1 or not 0 <= low <= high < inf or len(words) > 3:
        raise EmptyLoad(f"--agents needs at least one agent and one step, and tool times in order; got {text!r}")
    return Agents(count, steps, (low, high))


def parse_range(option: str, text: str) -> tuple[int, int]:
    """`200-2000`, or one number for both."""
    low, dash, high = text.partition("-")
    try:
        span = (int(low), int(high if dash else low))
    except ValueError:
        raise EmptyLoad(f"{option} must be a number or a span such as 200-2000; got {text!r}") from None
    if not 1 <= span[0] <= span[1]:
        raise EmptyLoad(f"{option} must begin at 1 or above and end no lower; got {text!r}")
    return span


def parse_lane_shares(text: str) -> dict[Lane, float]:
    try:
        return parse_lanes(text)
    except SimulationSetupError as error:
        raise EmptyLoad(str(error)) from None
