"""Workers of the `workers_file`, added and removed while the gateway runs. Part of the composition root."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from inferry.cli.config.loader import duplicate_names, load_workers, parse_workers
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.workers import (
    EmbeddedWorkerConfig,
    OpenAIWorkerConfig,
    VllmInProcessWorkerConfig,
    WorkerConfig,
)
from inferry.cli.worker_wiring import make_worker, worker_kind
from inferry.dispatch.workers_file import (
    InvalidWorkersFile,
    WatchedFile,
    WorkerReconciler,
    WorkerSet,
    WorkersFileWatcher,
)
from inferry.domain.clock import Clock
from inferry.domain.ports import Tokenizer, Worker


def load_watched_workers(config: Config) -> dict[str, WorkerConfig]:
    """The workers in the configuration's `workers_file`."""
    if config.workers_file is None:
        return {}
    return _workers_by_name(config, load_workers(Path(config.workers_file)))


def _workers_by_name(config: Config, workers: Sequence[WorkerConfig]) -> dict[str, WorkerConfig]:
    duplicates = duplicate_names(config, workers)
    if duplicates:
        raise ConfigError(
            f"{config.workers_file}: the configuration has workers of its own named {', '.join(duplicates)}"
        )
    if any(isinstance(worker, OpenAIWorkerConfig) and worker.batch_api for worker in workers):
        raise ConfigError(f"{config.workers_file}: `batch_api` is for workers of the configuration itself")
    return {worker.name: worker for worker in workers}


def watch_workers_file(
    config: Config,
    pool: WorkerSet,
    watched: dict[str, WorkerConfig],
    tokenizers: dict[str, Tokenizer],
    clock: Clock,
) -> WorkersFileWatcher[WorkerConfig]:
    """Keeps the pool in step with the `workers_file`."""
    assert config.workers_file is not None

    async def make(entry: WorkerConfig) -> tuple[Worker, str]:
        try:
            if isinstance(
                entry, EmbeddedWorkerConfig | VllmInProcessWorkerConfig
            ):  # reads a tokenizer, and may create a model
                worker, found = await asyncio.to_thread(make_worker, entry, clock)
            else:
                worker, found = make_worker(entry, clock, config.lane_policies(), config.health)
        except ConfigError as error:
            raise InvalidWorkersFile(str(error)) from None
        tokenizers.update(found)
        return worker, worker_kind(entry)

    def read(content: bytes) -> dict[str, WorkerConfig]:
        try:
            return _workers_by_name(config, parse_workers(content))
        except ConfigError as error:
            raise InvalidWorkersFile(str(error)) from None

    fleet = WorkerReconciler(pool, make, watched, grace_s=config.server.drain_timeout_s)
    return WorkersFileWatcher(WatchedFile(Path(config.workers_file)), read, fleet)
