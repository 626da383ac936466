"""Makes async jobs and their callbacks. Part of the composition root."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.config.schema import ConfigError
from inferry.cli.queue_wiring import QueuedWork
from inferry.domain.clock import Clock
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.storage import StorageLimits
from inferry.durable.async_job_runner import AsyncJobRunner
from inferry.durable.async_jobs import AsyncJobs, JobRunner
from inferry.durable.callback_client import CallbackClient, SystemResolver
from inferry.durable.callback_secrets import CallbackSecrets
from inferry.durable.callbacks import CallbackDeliverer
from inferry.durable.execute import Execute
from inferry.durable.executor import StoreExecutor
from inferry.durable.result_recorder import ResultRecorder
from inferry.ledger.stores.async_jobs import AsyncJobStore
from inferry.ledger.stores.callback_secrets import CallbackSecretStore
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.opening import require_shared


class AsyncWork(NamedTuple):
    """Async jobs, and what works on them."""

    store: AsyncJobStore
    jobs: AsyncJobs
    runner: JobRunner
    deliverer: CallbackDeliverer
    secrets: CallbackSecrets
    resolver: SystemResolver

    def start(self) -> None:
        self.runner.start()
        self.deliverer.start()

    async def stop(self) -> None:
        await self.runner.close()
        await self.deliverer.close()

    async def close(self) -> None:
        await self.stop()
        self.resolver.close()


def make_async_work(
    database: LedgerDatabase,
    executor: StoreExecutor,
    limits: StorageLimits,
    callbacks: CallbacksConfig,
    clock: Clock,
    execute: Execute,
    write_ledger: Callable[[], object],
    queued: QueuedWork | None = None,
) -> AsyncWork:
    """Nothing is started. `execute` runs the jobs, unless they are `queued`."""
    store, secrets, policy, resolver = (
        AsyncJobStore(database),
        CallbackSecretStore(database),
        callbacks.policy(),
        SystemResolver(),
    )
    client = CallbackClient(policy, resolver, callbacks.tls())
    deliverer = CallbackDeliverer(store, secrets, executor, client, policy, clock, random.random)
    runner: JobRunner
    if queued is not None:
        runner = queued.make_jobs(store, deliverer.wake)
    else:
        runner = AsyncJobRunner(
            store,
            executor,
            execute,
            ResultRecorder(store, executor, write_ledger),
            clock,
            concurrency=limits.job_concurrency,
            ttl_s=limits.job_ttl_s,
            on_end=deliverer.wake,
        )
    jobs = AsyncJobs(store, secrets, executor, runner, execute, limits, policy, clock)
    return AsyncWork(store, jobs, runner, deliverer, CallbackSecrets(secrets, executor, clock), resolver)


@contextmanager
def open_callback_secrets(ledger: str) -> Iterator[CallbackSecretStore]:
    """The secrets in a database, for a command. Raises ConfigError."""
    try:
        require_shared(ledger)
        database = LedgerDatabase(ledger)
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None
    try:
        yield CallbackSecretStore(database)
    finally:
        database.close()
