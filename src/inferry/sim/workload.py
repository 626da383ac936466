"""The workload of a simulation or load test, and its SLO targets."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from inferry.domain.lanes import Lane, LanePolicy
from inferry.sim.arrivals import assign_lanes, scale_rate, truncate
from inferry.sim.calls import Run
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.report import HARBOR_TTFT_S
from inferry.sim.simulation import HARBOR_ITL_S
from inferry.sim.traces import TraceError, read_trace

SCENARIOS: dict[str, Callable[..., list[Run]]] = {"harbor": harbor, "simple-harbor": simple_harbor}


class SimulationSetupError(Exception):
    """The options are invalid; the message says why."""


class Workload(Struct, frozen=True, kw_only=True):
    """A trace or a scenario, and its size. `lanes` are the fractions of a trace's runs by lane."""

    trace: Path | None = None
    scenario: str | None = None
    seconds: float | None = None
    scale: float = 1.0
    digests: int = 300
    lanes: Mapping[Lane, float] = MappingProxyType({Lane.P1: 1.0})
    session_gap_s: float = 1.0

    @property
    def name(self) -> str:
        return self.trace.name if self.trace is not None else str(self.scenario)

    @property
    def has_seeds(self) -> bool:
        """Whether different seeds give different runs."""
        return self.trace is None or len(self.lanes) > 1


def check(workload: Workload) -> Workload:
    if (workload.trace is None) == (workload.scenario is None):
        raise SimulationSetupError("name either a --trace or a --scenario")
    if workload.scenario is not None and workload.scenario not in SCENARIOS:
        raise SimulationSetupError(f"unknown scenario {workload.scenario!r}; known are {', '.join(SCENARIOS)}")
    if not 0 < workload.scale < inf:
        raise SimulationSetupError("--scale must be above 0")
    if workload.seconds is not None and not 0 < workload.seconds < inf:
        raise SimulationSetupError("--seconds must be above 0")
    return workload


def runs_by_seed(workload: Workload, seeds: Sequence[int]) -> dict[int, list[Run]]:
    """The runs of every seed. Several seeds of a workload without randomness are refused."""
    if len(seeds) > 1 and not workload.has_seeds:
        raise SimulationSetupError("a trace in one lane is the same for every seed: give one --seed, or several lanes")
    if workload.trace is None:
        make = SCENARIOS[str(workload.scenario)]
        return {
            seed: make(seed, seconds=workload.seconds or 60.0, scale=workload.scale, digests=workload.digests)
            for seed in seeds
        }
    try:
        runs = read_trace(workload.trace, next(iter(workload.lanes)), session_gap_s=workload.session_gap_s)
    except OSError as error:
        raise SimulationSetupError(f"cannot read {workload.trace}: {error.strerror or error}") from None
    except TraceError as error:
        raise SimulationSetupError(f"cannot read {error}") from None
    if workload.seconds is not None:
        runs = truncate(runs, workload.seconds)
    if not runs:
        raise SimulationSetupError(f"nothing is left of {workload.trace}")
    if workload.scale != 1.0:
        runs = scale_rate(runs, workload.scale)
    if len(workload.lanes) == 1:
        return dict.fromkeys(seeds, runs)
    return {seed: assign_lanes(runs, workload.lanes, seed) for seed in seeds}


def parse_lanes(text: str) -> dict[Lane, float]:
    """`P1`, or fractions such as `P0=0.2,P1=0.5,P2=0.3`."""
    parts: dict[Lane, float] = {}
    for word in text.split(","):
        name, _, part = word.strip().partition("=")
        try:
            parts[Lane[name]] = float(part or 1)
        except (KeyError, ValueError):
            raise SimulationSetupError(
                f"--lane must be P0, P1 or P2, or parts such as P0=0.3,P1=0.7; got {text!r}"
            ) from None
    if not all(0 <= part < inf for part in parts.values()) or not any(parts.values()):
        raise SimulationSetupError(f"the fractions of --lane must be 0 or above and not all 0; got {text!r}")
    return {lane: part for lane, part in parts.items() if part}


def parse_kills(texts: Sequence[str], engines: int) -> dict[int, float]:
    """When engines are lost, by index: `2@10` is the second of the engines, after 10 s. At least one must be left."""
    kills: dict[int, float] = {}
    for text in texts:
        number, _, seconds = text.partition("@")
        try:
            kills[int(number) - 1] = float(seconds)
        except ValueError:
            raise SimulationSetupError(f"--kill must be of the form ENGINE@SECONDS; got {text!r}") from None
    if not all(0 <= engine < engines and 0 <= at < inf for engine, at in kills.items()):
        raise SimulationSetupError(f"--kill must name an engine from 1 to {engines} and a time of 0 s or more")
    if len(kills) >= engines:
        raise SimulationSetupError("--kill must leave an engine")
    return kills


class SloTarget(Struct, frozen=True):
    """Token i is due `ttft_s + i * itl_s` after the call, later by `ttft_s_per_1k_tokens` for 1,000 uncached tokens."""

    ttft_s: float
    itl_s: float
    ttft_s_per_1k_tokens: float = 0.0


def slo_targets_for(lanes: Mapping[Lane, LanePolicy], overrides: Sequence[str] = ()) -> dict[Lane, SloTarget]:
    """The lanes' SLO targets, with those of the Harbor scenario where a lane has none; then the overrides."""
    slo_targets = {}
    for lane, policy in lanes.items():
        ttft_s = HARBOR_TTFT_S[lane] if policy.ttft_ms is None else policy.ttft_ms / 1000
        itl_s = HARBOR_ITL_S[lane] if policy.itl_ms is None else policy.itl_ms / 1000
        slo_targets[lane] = SloTarget(ttft_s, itl_s, policy.ttft_ms_per_1k_tokens / 1000)
    for text in overrides:
        name, _, values = text.partition("=")
        try:
            ttft_ms, itl_ms, *more = map(float, values.split(","))
            per_1k_tokens_ms = sum(more)
            lane = Lane[name.strip()]
        except (KeyError, ValueError):
            raise SimulationSetupError(
                f"--slo must be of the form P0=500,30 or P0=500,30,40 (milliseconds); got {text!r}"
            ) from None
        if not (0 < ttft_ms < inf and 0 < itl_ms < inf) or len(more) > 1 or not 0 <= per_1k_tokens_ms < inf:
            raise SimulationSetupError(f"--slo must be above 0; got {text!r}")
        slo_targets[lane] = SloTarget(ttft_ms / 1000, itl_ms / 1000, per_1k_tokens_ms / 1000)
    return slo_targets
