"""Arms of a simulation from configurations and engine models."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from inferry.cli.config.loader import load
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.workers import (
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    PythonWorkerConfig,
    RayWorkerConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
)
from inferry.cli.engine_settings import engine_config
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.scheduling.sessions import SessionLimits
from inferry.sim import costs as engines
from inferry.sim.baselines import Direct
from inferry.sim.calls import Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.gateway import GatewayFrontend, capped_output
from inferry.sim.length_predictor import LengthPredictor, LengthSource, true_output
from inferry.sim.prompt_memory import PrefixAwareEstimator, PromptPrefixes
from inferry.sim.prompts import length
from inferry.sim.simulation import Frontend
from inferry.sim.workload import SimulationSetupError

_Engine = HttpWorkerConfig | EmbeddedWorkerConfig | VllmInProcessWorkerConfig | RayWorkerConfig


class SimulatedWorker(Struct, frozen=True):
    """An engine, its capacity limits, and its configuration. With `capacity: adaptive` the capacity controller decides
    within the limits.
    """

    flags: engines.EngineFlags
    capacity: Capacity
    config: HttpWorkerConfig | EmbeddedWorkerConfig | VllmInProcessWorkerConfig


class Arm(Struct, frozen=True):
    """One way to serve the workload. Every simulation gets a new frontend, because frontends have state."""

    name: str
    flags: tuple[engines.EngineFlags, ...]
    frontend: Callable[[], Frontend]


def load_config(file: Path | None) -> Config:
    try:
        return load(file)
    except ConfigError as error:
        raise SimulationSetupError(str(error) if file is None else f"{file}: {error}") from None


def load_model(path: Path | None) -> engines.EngineModel:
    try:
        return engines.load_model(path or engines.DEFAULT_MODEL)
    except OSError as error:
        raise SimulationSetupError(f"cannot read the engine model {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise SimulationSetupError(f"{path} is not an engine model: {error}") from None


def simulated_workers(
    config: Config | None, model: engines.EngineModel, count: int | None = None
) -> tuple[SimulatedWorker, ...]:
    """The workers of a configuration in order, repeated up to `count`.

    An HTTP worker is the modelled engine, limited by the configuration. An embedded worker has the configured
    sequences, KV and chunk at the model's speed; `kv_tokens: auto` is the KV cache of the model. Without a
    configuration there is one HTTP worker with defaults. Python functions are left out.
    """
    kinds: Sequence[WorkerConfig] = [VllmWorkerConfig(name="default", url="")] if config is None else config.workers
    made = [_simulated_worker(one, model.flags) for one in kinds if not isinstance(one, PythonWorkerConfig)]
    if not made:
        raise SimulationSetupError("the configuration has Python functions only, which cannot be simulated")
    return tuple(made[number % len(made)] for number in range(count or len(made)))


def _simulated_worker(worker: _Engine, flags: engines.EngineFlags) -> SimulatedWorker:
    if isinstance(worker, RayWorkerConfig):
        return _simulated_worker(worker.engine, flags)
    if isinstance(worker, HttpWorkerConfig):
        if worker.chunk_tokens is not None:
            sequences = min(flags.max_num_seqs, worker.chunk_tokens)
            flags = replace(flags, max_num_seqs=sequences, max_num_batched_tokens=worker.chunk_tokens)
        capacity = Capacity(
            min(worker.max_sequences, flags.max_num_seqs), worker.kv_tokens or flags.kv_tokens, worker.prefill_tokens
        )
        return SimulatedWorker(flags, capacity, worker)
    if isinstance(worker, VllmInProcessWorkerConfig):
        own = replace(flags, max_num_seqs=worker.max_sequences, max_num_batched_tokens=worker.chunk_tokens)
        return SimulatedWorker(own, Capacity(worker.max_sequences, own.kv_tokens), worker)
    # Results must not depend on the machine that simulates: `auto` is a CPU.
    engine = engine_config(worker, "cpu" if worker.device == "auto" else worker.device)
    kv_tokens = flags.kv_tokens if engine.kv_tokens == "auto" else engine.kv_tokens
    own = replace(
        flags,
        max_num_seqs=engine.max_sequences,
        kv_tokens=kv_tokens,
        max_num_batched_tokens=engine.max_sequences + engine.chunk_tokens,
    )
    return SimulatedWorker(own, Capacity(engine.max_sequences, kv_tokens), worker)


def gateway_arm(
    name: str,
    lanes: Mapping[Lane, LanePolicy],
    workers: Sequence[SimulatedWorker],
    sessions: SessionLimits | None = None,
    output_source: LengthSource = "capped",
) -> Arm:
    """The gateway as in `inferry serve`. It expects what a tenant has sent to an engine to be cached there."""
    capacities, configs = [one.capacity for one in workers], [one.config for one in workers]
    fixed = [number for number, config in enumerate(configs) if config.capacity == "fixed"]
    groups = [config.group for config in configs]
    lengths = [config.output_length for config in configs]
    packings = [config.kv_packing for config in configs]

    def frontend() -> Frontend:
        predictor = LengthPredictor() if output_source == "predicted" else None
        estimate = PrefixAwareEstimator(predictor or (true_output if output_source == "true" else capped_output))
        if len(fixed) == len(workers):
            return GatewayFrontend(
                lanes,
                capacities,
                groups=groups,
                output_lengths=lengths,
                kv_packings=packings,
                estimate=estimate,
                predictor=predictor,
                prefix_of=PromptPrefixes(),
                sessions=sessions,
            )
        return ControlledFrontend(
            lanes,
            limits=capacities,
            fixed=fixed,
            groups=groups,
            output_lengths=lengths,
            kv_packings=packings,
            estimate=estimate,
            predictor=predictor,
            sessions=sessions,
        )

    return Arm(name, tuple(one.flags for one in workers), frontend)


def direct_arms(model: engines.EngineModel, workers: int) -> list[Arm]:
    """Without a gateway: every call goes directly to an engine's queue."""
    fcfs, priority = replace(model.flags, policy="fcfs"), replace(model.flags, policy="priority")
    return [
        Arm("direct, fcfs", (fcfs,) * workers, Direct),
        Arm("direct, priority", (priority,) * workers, Direct),
    ]


def build_arms(
    files: Sequence[Path],
    model: engines.EngineModel,
    workers: int | None,
    direct: bool,
    output_source: LengthSource = "capped",
) -> list[Arm]:
    """One arm per configuration, or one with the defaults; preceded by the direct arms if `direct`."""
    loaded = [(file, load_config(file)) for file in files]
    stems = [file.stem for file in files]
    arms = [
        gateway_arm(
            file.stem if stems.count(file.stem) == 1 else str(file),
            config.lane_policies(),
            simulated_workers(config, model, workers),
            config.sessions.limits(),
            output_source,
        )
        for file, config in loaded
    ] or [gateway_arm("defaults", DEFAULT_LANES, simulated_workers(None, model, workers), output_source=output_source)]
    return [*(direct_arms(model, len(arms[0].flags)) if direct else []), *arms]


def drop_oversized(runs: Sequence[Run], arms: Sequence[Arm]) -> list[Run]:
    """The runs whose calls all fit the KV of every engine; the gateway would refuse the others."""
    limit = min(flags.blocks * flags.block_tokens for arm in arms for flags in arm.flags)
    return [run for run in runs if all(length(step.prompt) + step.output <= limit for step in run.steps)]
