"""Workers of `kind: ray`: one for every replica that runs, and a standby for those that do not. Part of the composition
root.
"""

import asyncio
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.workers import EmbeddedWorkerConfig, RayWorkerConfig, VllmInProcessWorkerConfig
from inferry.cli.engine_settings import engine_config, resolve_device
from inferry.cli.worker_wiring import engine_worker, model_directory, tool_call_format, vllm_engine
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.dispatch.pool import Pool
from inferry.dispatch.workers_file import WorkerReconciler
from inferry.domain.clock import Clock
from inferry.domain.ports import Tokenizer, Worker

if TYPE_CHECKING:
    from inferry.workers.in_process.engine_link import EngineProgram
    from inferry.workers.ray.serve import AppStatus

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
RESEND_INTERVAL_S = 10.0
"""Time until a number of replicas is sent again while Ray has another one."""


def ray_workers(config: Config) -> list[RayWorkerConfig]:
    """The workers of kind ray. Raises ConfigError where Ray is not installed."""
    found = [worker for worker in config.workers if isinstance(worker, RayWorkerConfig)]
    if found and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"worker `{found[0].name}` is of kind ray, which needs ray: install the `ray` extra "
            "(pip install 'inferry[ray]', in a clone pip install '.[ray]')"
        )
    return found


def scaling_limits(config: Config) -> dict[str, tuple[int, int]]:
    """The fewest and most replicas of the groups that the gateway scales itself."""
    workers = [worker for worker in config.workers if isinstance(worker, RayWorkerConfig)]
    return {worker.group: (worker.min_replicas, worker.max_replicas) for worker in workers}


class ReplicaRequests:
    """Sends the number of replicas to Ray: a new one at once, and the same one again while Ray has another number of
    them. `inferry ray deploy` resets the number.
    """

    def __init__(self, config: RayWorkerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._target: int | None = None
        self._sent_at = 0.0

    async def follow(self, desired: int | None, replicas: int, set_replicas: Callable[[str, int], None]) -> None:
        """`desired` is the gateway's advice, `replicas` what Ray reports. Raises RayUnavailable."""
        now = self._clock.now()
        is_ignored = desired != replicas and now - self._sent_at >= RESEND_INTERVAL_S
        if desired is None or (desired == self._target and not is_ignored):
            return
        await asyncio.to_thread(set_replicas, self._config.app_name, desired)
        if desired != self._target:  # replicas that start slowly, or do not fit on the cluster, are no news
            log.info("worker %s: %d replicas are requested", self._config.name, desired)
        self._target, self._sent_at = desired, now


class RayFleet:
    """Keeps the pool in step with the replicas of one application, and their number in step with the gateway's advice.

    One task polls Ray every `POLL_INTERVAL_S`. While Ray cannot be reached, workers are unchanged.
    """

    def __init__(self, config: RayWorkerConfig, gateway: Gateway, pool: Pool, clock: Clock) -> None:
        from inferry.workers.ray.standby import Standby

        self._config = config
        self._scale = gateway.scale
        self._clock = clock
        self._replicas: dict[str, Worker] = {}
        template, self.tokenizers = self._worker((config.name, ""))
        pool.add(Standby(config.name, template, self._replicas, config.max_scale_up_wait_s, clock), "ray")
        self._reconciler: WorkerReconciler[tuple[str, str]] = WorkerReconciler(
            pool, self._make, {}, grace_s=config.drain_timeout_s
        )
        self._requests = ReplicaRequests(config, clock)
        self._is_connected = False
        self._last_error = ""
        self._polling = PeriodicTask(self.poll, POLL_INTERVAL_S, f"replicas of {config.name}")

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close()
        await self._reconciler.close()

    async def poll(self) -> None:
        # Imported in a thread: Ray takes seconds.
        serve = await asyncio.to_thread(_serve_module)
        try:
            await asyncio.to_thread(serve.connect, self._config.address)
            actors = await asyncio.to_thread(serve.replicas, self._config.app_name)
            entries = {f"{self._config.name}-{replica}": actor for replica, actor in actors.items()}
            await self._reconciler.reconcile({name: (name, actor) for name, actor in entries.items()})
            for gone in self._replicas.keys() - entries.keys():
                del self._replicas[gone]
            if not self._is_connected:
                self._scale.assume_needed(self._config.group, len(actors), self._clock.now())
                self._is_connected = True
            desired = self._scale.desired(self._config.group)
            await self._requests.follow(desired, len(actors), serve.set_replicas)
            self._last_error = ""
        except serve.RayUnavailable as error:
            if str(error) != self._last_error:
                log.error("worker %s: %s", self._config.name, error)
                self._last_error = str(error)

    async def _make(self, entry: tuple[str, str]) -> tuple[Worker, str]:
        worker, _ = await asyncio.to_thread(self._worker, entry)  # reads a tokenizer
        self._replicas[worker.name] = worker
        return worker, "ray"

    def _worker(self, entry: tuple[str, str]) -> tuple[Worker, dict[str, Tokenizer]]:
        from inferry.workers.ray.link import RayLink

        name, actor = entry
        return engine_worker(replace(_placed(self._config), name=name), self._clock, partial(RayLink.open, actor))


def ray_fleets(config: Config, gateway: Gateway, pool: Pool, clock: Clock) -> Sequence[RayFleet]:
    return [RayFleet(worker, gateway, pool, clock) for worker in ray_workers(config)]


def deploy(config: RayWorkerConfig) -> None:
    """Place the engines of a worker on Ray Serve. Raises ConfigError and RayUnavailable."""
    serve = _serve_module()
    serve.connect(config.address)
    serve.deploy(
        serve.AppSettings(
            app=config.app_name,
            make_program=_program_maker(_placed(config)),
            replicas=config.min_replicas,
            cpus=config.cpus_per_replica,
            gpus=config.gpus_per_replica,
            drain_timeout_s=config.drain_timeout_s,
        )
    )


def status(config: RayWorkerConfig) -> "AppStatus | None":
    """None where the application is not deployed. Raises RayUnavailable."""
    serve = _serve_module()
    serve.connect(config.address)
    found: AppStatus | None = serve.status(config.app_name)
    return found


def delete(config: RayWorkerConfig) -> bool:
    """False where the application is not deployed. Raises RayUnavailable."""
    serve = _serve_module()
    serve.connect(config.address)
    return bool(serve.delete(config.app_name))


def _serve_module() -> ModuleType:
    return importlib.import_module("inferry.workers.ray.serve")


def _placed(config: RayWorkerConfig) -> EmbeddedWorkerConfig | VllmInProcessWorkerConfig:
    """The engine where it is placed: the device does not depend on the host that reads the configuration."""
    engine = config.engine
    if isinstance(engine, EmbeddedWorkerConfig) and engine.device == "auto":
        return replace(engine, device="cuda" if config.gpus_per_replica > 0 else "cpu")
    return engine


def _program_maker(engine: EmbeddedWorkerConfig | VllmInProcessWorkerConfig) -> "Callable[[], EngineProgram]":
    """Makes the engine's program on the node of a replica."""
    directory, _ = model_directory(engine)
    if isinstance(engine, EmbeddedWorkerConfig):
        from inferry.engine.tokenizer import HfTokenizer
        from inferry.workers.in_process.embedded import embedded_program

        tool_format = HfTokenizer(directory, tool_call_format(engine)).tool_format
        config = engine_config(engine, resolve_device(engine.device))
        config = replace(config, tool_format=None if tool_format is None else tool_format.name)
        return partial(embedded_program, directory, config)
    from inferry.workers.in_process.vllm_inprocess import vllm_program

    vllm = vllm_engine(engine)
    return partial(vllm_program, vllm.python, vllm.engine_arguments(directory))
