"""Parents of runs that several gateways see: announced to the others, and known before a ceiling is applied.

Belongs to the gateway's loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from inferry.admission.evaluation import limits_runs
from inferry.dispatch.budget import BUDGET_HOLD_S
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import LedgerUnavailable
from inferry.domain.jobs import InferenceJob
from inferry.runs.registry import RunRegistry

_RETRY_AFTER_S: Final = 2.0

ReadyJob = Callable[[], Awaitable[InferenceJob]]
"""Waits for what a job needs before its admission."""


class LinkLog(Protocol):
    """The links that gateways have announced, in one order for all of them."""

    def announce(self, tenant: str, run_id: str, parent_id: str) -> None:
        """Tell all gateways, this one included, the parent of a run."""

    def synced(self) -> "asyncio.Future[None]":
        """Done once all links that were announced before are known here."""


class RunLineages:
    """`cancel(tenant, run_id)` ends a known run that turns out to belong to a cancelled one."""

    def __init__(self, runs: RunRegistry, clock: Clock, cancel: Callable[[str, str], None]) -> None:
        self.log: LinkLog | None = None
        self._runs = runs
        self._clock = clock
        self._cancel = cancel

    async def after(self, make_job: ReadyJob, caller: Caller) -> InferenceJob:
        """The job once it is made and the lineage of its run is known."""
        job = await make_job()
        ready = self.pending(job, caller)
        return job if ready is None else await ready()

    def pending(self, job: InferenceJob, caller: Caller) -> ReadyJob | None:
        """What gives the job once the lineage of its run is known; None where the job need not wait.

        Only the first call of a run at this gateway waits, and only where a ceiling of runs applies to it. It raises
        LedgerUnavailable where Redis is away, like a call that gets no grant.
        """
        log = self.log
        if log is None:
            return None
        runs, tenant, run_id, parent_id = self._runs, job.tenant, job.run_id, job.parent_run
        if run_id == job.job_id:
            # No later call names this run, so that only its parent matters.
            if parent_id is None or runs.has_run(tenant, parent_id):
                return None
        else:
            is_new_link = parent_id is not None and runs.parent_of(tenant, run_id) is None
            if not is_new_link and runs.has_run(tenant, run_id):
                return None
            if is_new_link and parent_id is not None and parent_id != run_id:
                log.announce(tenant, run_id, parent_id)
        return partial(_when, log.synced(), job) if limits_runs(caller) else None

    def learn(self, tenant: str, run_id: str, parent_id: str) -> None:
        """A gateway has announced the parent of a run."""
        run = self._runs.learn_parent(tenant, run_id, parent_id, self._clock.now())
        if run is not None and self._runs.is_cancelled(run):
            self._cancel(tenant, run_id)


async def _when(synced: "asyncio.Future[None]", job: InferenceJob) -> InferenceJob:
    try:
        async with asyncio.timeout(BUDGET_HOLD_S):
            await asyncio.shield(synced)
    except TimeoutError:
        message = "the parents of the run were not read in time"
        raise LedgerUnavailable(message, retry_after_s=_RETRY_AFTER_S) from None
    return job
