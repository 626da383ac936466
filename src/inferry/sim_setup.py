"""From options to what is played: the runs, the promises they are measured against, and the arms that serve them."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from inferry import config as configuration
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.values import replace
from inferry.domain.workers import Room
from inferry.sim import costs as engines
from inferry.sim.arrivals import denser, first_seconds, in_lanes
from inferry.sim.calls import Run
from inferry.sim.controlled import ControlledDoor, KnowsPrefixes
from inferry.sim.doors import Direct
from inferry.sim.gateway import GatewayDoor
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.prompts import length
from inferry.sim.report import HARBOR_TTFT_S
from inferry.sim.traces import TraceError, read_trace
from inferry.sim.world import HARBOR_GAPS_S, Door

SCENARIOS: dict[str, Callable[..., list[Run]]] = {"harbor": harbor, "simple-harbor": simple_harbor}


class CannotSimulate(Exception):
    """The options make no simulation; the message says why."""


# What is played.


class Workload(Struct, frozen=True, kw_only=True):
    """A trace or a scenario, and how much of it. `lanes` are the parts that a trace's runs get of each lane."""

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
        """Whether another seed gives other runs."""
        return self.trace is None or len(self.lanes) > 1


def check(workload: Workload) -> Workload:
    if (workload.trace is None) == (workload.scenario is None):
        raise CannotSimulate("name either a --trace or a --scenario")
    if workload.scenario is not None and workload.scenario not in SCENARIOS:
        raise CannotSimulate(f"there is no scenario {workload.scenario!r}; there are {', '.join(SCENARIOS)}")
    if not 0 < workload.scale < inf:
        raise CannotSimulate("--scale must be above 0")
    if workload.seconds is not None and not 0 < workload.seconds < inf:
        raise CannotSimulate("--seconds must be above 0")
    return workload


def runs_by_seed(workload: Workload, seeds: Sequence[int]) -> dict[int, list[Run]]:
    """The runs of every seed. Seeds that would only repeat each other are refused."""
    if len(seeds) > 1 and not workload.has_seeds:
        raise CannotSimulate("a trace in one lane is the same for every seed: give one --seed, or several lanes")
    if workload.trace is None:
        make = SCENARIOS[str(workload.scenario)]
        return {
            seed: make(seed, seconds=workload.seconds or 60.0, scale=workload.scale, digests=workload.digests)
            for seed in seeds
        }
    try:
        runs = read_trace(workload.trace, next(iter(workload.lanes)), session_gap_s=workload.session_gap_s)
    except OSError as error:
        raise CannotSimulate(f"cannot read {workload.trace}: {error.strerror or error}") from None
    except TraceError as error:
        raise CannotSimulate(f"cannot read {error}") from None
    if workload.seconds is not None:
        runs = first_seconds(runs, workload.seconds)
    if not runs:
        raise CannotSimulate(f"nothing is left of {workload.trace}")
    if workload.scale != 1.0:
        runs = denser(runs, workload.scale)
    if len(workload.lanes) == 1:
        return dict.fromkeys(seeds, runs)
    return {seed: in_lanes(runs, workload.lanes, seed) for seed in seeds}


def lanes_in(text: str) -> dict[Lane, float]:
    """`P1`, or parts such as `P0=0.2,P1=0.5,P2=0.3`."""
    parts: dict[Lane, float] = {}
    for word in text.split(","):
        name, _, part = word.strip().partition("=")
        try:
            parts[Lane[name]] = float(part or 1)
        except (KeyError, ValueError):
            raise CannotSimulate(f"--lane must be P0, P1 or P2, or parts such as P0=0.3,P1=0.7; got {text!r}") from None
    if not all(0 <= part < inf for part in parts.values()) or not any(parts.values()):
        raise CannotSimulate(f"the parts of --lane must be 0 or above and not all 0; got {text!r}")
    return {lane: part for lane, part in parts.items() if part}


# What is promised.


class Promise(Struct, frozen=True):
    """The i-th token comes by `ttft_s + i * gap_s`."""

    ttft_s: float
    gap_s: float


def promises_of(lanes: Mapping[Lane, LanePolicy], overrides: Sequence[str] = ()) -> dict[Lane, Promise]:
    """What the lanes promise; where they promise nothing, what the Harbor scenario asks of them; then the overrides."""
    promises = {}
    for lane, policy in lanes.items():
        ttft_s = HARBOR_TTFT_S[lane] if policy.ttft_ms is None else policy.ttft_ms / 1000
        gap_s = HARBOR_GAPS_S[lane] if policy.gap_ms is None else policy.gap_ms / 1000
        promises[lane] = Promise(ttft_s, gap_s)
    for text in overrides:
        name, _, values = text.partition("=")
        try:
            ttft_ms, gap_ms = map(float, values.split(","))
            lane = Lane[name.strip()]
        except (KeyError, ValueError):
            raise CannotSimulate(f"--promise must look like P0=500,30 (milliseconds); got {text!r}") from None
        if not (0 < ttft_ms < inf and 0 < gap_ms < inf):
            raise CannotSimulate(f"--promise must be above 0; got {text!r}")
        promises[lane] = Promise(ttft_ms / 1000, gap_ms / 1000)
    return promises


# Who serves it.


class SimulatedWorker(Struct, frozen=True):
    """An engine, and what the gateway may use of it: always all of `room`, or `adaptive`, what promises leave of it."""

    flags: engines.EngineFlags
    room: Room
    group: str = "default"
    adaptive: bool = True


class Arm(Struct, frozen=True):
    """One way to serve the work. Every simulation gets a door of its own, since doors remember."""

    name: str
    flags: tuple[engines.EngineFlags, ...]
    door: Callable[[], Door]


def load_config(file: Path | None) -> configuration.Config:
    try:
        return configuration.load(file)
    except configuration.ConfigError as error:
        raise CannotSimulate(str(error) if file is None else f"{file}: {error}") from None


def load_model(path: Path | None) -> engines.EngineModel:
    try:
        return engines.load_model(path or engines.DEFAULT_MODEL)
    except OSError as error:
        raise CannotSimulate(f"cannot read the engine model {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise CannotSimulate(f"{path} is no engine model: {error}") from None


def simulated_workers(
    config: configuration.Config | None, model: engines.EngineModel, count: int | None = None
) -> tuple[SimulatedWorker, ...]:
    """The workers of a configuration in order, over and over until there are `count`.

    An HTTP worker is an engine as the model has it, and the gateway keeps inside what the configuration says. An
    embedded worker is an engine with the configured sequences, KV and chunk at the model's speed. Without a
    configuration there is one HTTP worker with the default room.
    """
    kinds: Sequence[configuration.WorkerConfig] = (
        [configuration.VllmWorkerConfig(name="default", url="")] if config is None else config.workers
    )
    made = [_simulated(one, model.flags) for one in kinds]
    return tuple(made[number % len(made)] for number in range(count or len(made)))


def _simulated(worker: configuration.WorkerConfig, flags: engines.EngineFlags) -> SimulatedWorker:
    if isinstance(worker, configuration.HttpWorkerConfig):
        if worker.chunk_tokens is not None:
            sequences = min(flags.max_num_seqs, worker.chunk_tokens)
            flags = replace(flags, max_num_seqs=sequences, max_num_batched_tokens=worker.chunk_tokens)
        room = Room(
            min(worker.max_sequences, flags.max_num_seqs), worker.kv_tokens or flags.kv_tokens, worker.prefill_tokens
        )
        return SimulatedWorker(flags, room, worker.group, worker.room == "adaptive")
    if isinstance(worker, configuration.VllmInProcessWorkerConfig):
        own = replace(flags, max_num_seqs=worker.max_sequences, max_num_batched_tokens=worker.chunk_tokens)
        return SimulatedWorker(own, Room(worker.max_sequences, own.kv_tokens), worker.group, worker.room == "adaptive")
    own = replace(
        flags,
        max_num_seqs=worker.max_sequences,
        kv_tokens=worker.kv_tokens,
        max_num_batched_tokens=worker.max_sequences + worker.chunk_tokens,
    )
    return SimulatedWorker(own, Room(worker.max_sequences, worker.kv_tokens), worker.group, worker.room == "adaptive")


def gateway_arm(name: str, lanes: Mapping[Lane, LanePolicy], workers: Sequence[SimulatedWorker]) -> Arm:
    """The gateway as `inferry serve` would run it. It expects of prompts what a tenant has sent before to be cached."""
    rooms, groups = [one.room for one in workers], [one.group for one in workers]
    fixed = [number for number, one in enumerate(workers) if not one.adaptive]

    def door() -> Door:
        if len(fixed) == len(workers):
            return GatewayDoor(lanes, rooms, groups=groups, estimate=KnowsPrefixes())
        return ControlledDoor(lanes, limits=rooms, fixed=fixed, groups=groups)

    return Arm(name, tuple(one.flags for one in workers), door)


def direct_arms(model: engines.EngineModel, workers: int) -> list[Arm]:
    """Without a gateway: every call goes straight to an engine and waits in its queue."""
    fcfs, priority = replace(model.flags, policy="fcfs"), replace(model.flags, policy="priority")
    return [
        Arm("direct, fcfs", (fcfs,) * workers, Direct),
        Arm("direct, priority", (priority,) * workers, Direct),
    ]


def arms_of(files: Sequence[Path], model: engines.EngineModel, workers: int | None, direct: bool) -> list[Arm]:
    """One arm per configuration, or one with the defaults; before them, if asked for, those without a gateway."""
    loaded = [(file, load_config(file)) for file in files]
    stems = [file.stem for file in files]
    arms = [
        gateway_arm(
            file.stem if stems.count(file.stem) == 1 else str(file),
            config.lane_policies(),
            simulated_workers(config, model, workers),
        )
        for file, config in loaded
    ] or [gateway_arm("defaults", DEFAULT_LANES, simulated_workers(None, model, workers))]
    return [*(direct_arms(model, len(arms[0].flags)) if direct else []), *arms]


def without_giants(runs: Sequence[Run], arms: Sequence[Arm]) -> list[Run]:
    """Those whose every call fits the KV of every engine; the gateway would refuse the others."""
    limit = min(flags.blocks * flags.block_tokens for arm in arms for flags in arm.flags)
    return [run for run in runs if all(length(step.prompt) + step.output <= limit for step in run.steps)]
