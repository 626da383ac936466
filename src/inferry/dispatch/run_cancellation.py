"""Cancels a tree of runs: queued jobs are removed at once, running jobs are stopped at their workers.

The tombstone comes first, so that no job of the run is admitted or retried any more. Queued jobs are taken out and
running jobs are told to end in one call, without waiting in between, so that no queued job takes the place of a stopped
one. Each running job's cancel returns its confirmation, which is awaited once for all. Clients of queued jobs are told
afterwards, a few at a time.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from inferry.dispatch.cancel_sender import Confirmation, PendingCancel
from inferry.dispatch.values import CancelReport
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, RunCancelled
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done
from inferry.runs.registry import RunRegistry

NOTIFY_BATCH: Final = 8
"""Streams ended before the event loop serves other work (it yields, it waits for nothing). Few: each also wakes the
task of its client, and the confirmation of the workers is behind them."""


class RunCanceller:
    """Ends runs. Belongs to the event loop of the gateway whose jobs it ends.

    `cancel` returns the cancel that a worker is to confirm, or None where no worker has to. `is_cancelled`: an earlier
    cancel has ended the job, although its execution continues for others or its client is yet to be told.
    `is_stranded`: a worker that lost the job is still down; whether it holds anything there cannot be known.
    """

    def __init__(
        self,
        runs: RunRegistry,
        clock: Clock,
        cancel: Callable[[str, GatewayError], PendingCancel | None],
        evict_queued: Callable[[Iterable[str]], set[str]],
        attempt_of: Callable[[str], Attempt | None],
        is_cancelled: Callable[[str], bool],
        is_stranded: Callable[[InferenceJob], bool],
    ) -> None:
        self._runs = runs
        self._clock = clock
        self._cancel = cancel
        self._evict_queued = evict_queued
        self._notify_tasks: set[asyncio.Task[None]] = set()
        self._attempt_of = attempt_of
        self._is_cancelled = is_cancelled
        self._is_stranded = is_stranded

    async def cancel_run(
        self, tenant: str, run_id: str, *, wait_s: float = 1.0, is_known: bool = False
    ) -> CancelReport:
        """End a run and everything below it. Returns when the workers have confirmed, or after `wait_s`.

        Raises RunNotFound, unless the run is known from elsewhere (`is_known`).
        """
        started_at = self._clock.now()
        jobs = self._runs.cancel(tenant, run_id, started_at, is_known=is_known)
        cancelled_now = {job_id for job_id in jobs if not self._is_cancelled(job_id)}
        error = RunCancelled(f"run `{run_id}` was cancelled")
        attempts = {job_id: attempt for job_id in jobs if (attempt := self._attempt_of(job_id)) is not None}
        sent = {job_id for job_id, attempt in attempts.items() if attempt.plan is not None}
        stranded = {job_id for job_id, attempt in attempts.items() if self._is_stranded(attempt.job)}
        pending = [self._cancel(job_id, error) for job_id in sent]
        evicted = self._evict_queued(job_id for job_id in jobs if job_id not in sent)
        pending += [self._cancel(job_id, error) for job_id in jobs if job_id not in sent and job_id not in evicted]
        notify_task = asyncio.get_running_loop().create_task(self._notify(evicted, error))
        self._notify_tasks.add(notify_task)
        notify_task.add_done_callback(self._notify_tasks.discard)
        # A sent job without a pending cancel shares its execution with jobs of other runs, for which it continues.
        confirmations = {one.job_id: one.confirmed for one in pending if one is not None and one.job_id in sent}
        confirmed = await _confirmed(confirmations.values(), wait_s)
        running = {job_id: attempts[job_id] for job_id in confirmations.keys() | stranded}
        done = {job_id for job_id, attempt in running.items() if isinstance(attempt.end, Done)}
        freed = (confirmed | done) & running.keys() - stranded
        return _report(len(cancelled_now | running.keys()), running, len(freed), started_at, self._clock.now())

    async def _notify(self, job_ids: Iterable[str], error: GatewayError) -> None:
        """End the streams of jobs that were evicted."""
        for number, job_id in enumerate(job_ids):
            if number % NOTIFY_BATCH == 0:
                await asyncio.sleep(0)
            self._cancel(job_id, error)


async def _confirmed(confirmations: Iterable[Confirmation], wait_s: float) -> set[str]:
    """The jobs that workers confirm within the time."""
    batches = set(confirmations)
    if not batches:
        return set()
    over, _ = await asyncio.wait(batches, timeout=wait_s)
    return {job_id for batch in over for job_id in batch.result()}


def _report(jobs: int, running: dict[str, Attempt], freed: int, started_at: float, now: float) -> CancelReport:
    # A job that completed before its cancel arrived has wasted nothing.
    wasted = [one for one in running.values() if not isinstance(one.end, Done)]
    return CancelReport(
        queued=jobs - len(running),
        running=len(running),
        freed=freed,
        wasted_tokens=sum(
            max(one.output_tokens, 0 if one.end is None else one.end.usage.output_tokens) for one in wasted
        ),
        wasted_ms=round(
            sum(((one.ended_at or now) - one.sent_at) * 1000 for one in wasted if one.sent_at is not None), 1
        ),
        unconfirmed=len(running) - freed,
        took_ms=round((now - started_at) * 1000, 3),
    )
