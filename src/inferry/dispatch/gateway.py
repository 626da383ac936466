"""The facade: all that ingress and the command line know of what is behind it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from inferry.admission.queue_limiter import QueueLimiter
from inferry.admission.quota_retry_spread import QuotaRetrySpreader
from inferry.admission.reports import AccountReport, RateLimitStatus
from inferry.dispatch.admission_control import AdmissionControl
from inferry.dispatch.budget import RETRY_AFTER_S
from inferry.dispatch.budget_refusals import BudgetRefusals
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.dispatch.cancel_sender import PendingCancel
from inferry.dispatch.deadlines import Deadlines
from inferry.dispatch.fleet_adapters import FleetAdapters
from inferry.dispatch.gpu_accounting import GpuAccounting
from inferry.dispatch.job_host import JobHost
from inferry.dispatch.loop import DispatchLoop
from inferry.dispatch.model_catalog import ModelCatalog
from inferry.dispatch.pool import Pool
from inferry.dispatch.run_cancellation import RunCanceller
from inferry.dispatch.run_lineages import ReadyJob, RunLineages
from inferry.dispatch.run_watchers import RunWatchers
from inferry.dispatch.scale_monitor import ScaleMonitor
from inferry.dispatch.singleflight.single_flight import SingleFlight
from inferry.dispatch.values import CancelReport, OwnerState, WorkerReport
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import Clock
from inferry.domain.decisions import Decision
from inferry.domain.errors import CallAborted, Draining, GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import ComposedRow
from inferry.domain.workers import WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.runs.registry import Run, RunSnapshot, RunStatus, Totals
from inferry.runs.run import tree_totals
from inferry.scheduling.lane_switch import LaneTrial
from inferry.streams.mailbox import JobStream, ended_stream

__all__ = [
    "AccountReport",
    "CancelReport",
    "FleetAdapters",
    "Gateway",
    "JobStream",
    "ModelCatalog",
    "RateLimitStatus",
    "ReadyJob",
    "Run",
    "RunSnapshot",
    "RunStatus",
    "Totals",
    "WorkerReport",
    "ended_stream",
    "tree_totals",
]

CLEANUP_INTERVAL_S: Final = 60.0


class Gateway:
    """Jobs in, streams out. Belongs to the event loop it is made on; `cli.gateway_wiring` makes it."""

    def __init__(
        self,
        *,
        clock: Clock,
        models: ModelCatalog,
        pool: Pool,
        loop: DispatchLoop,
        host: JobHost,
        single_flight: SingleFlight,
        admission: AdmissionControl,
        queue_limiter: QueueLimiter,
        deadlines: Deadlines,
        recorder: Recorder,
        metrics: Metrics,
        gpu_accounting: GpuAccounting,
        scale: ScaleMonitor,
        watermarks: BudgetWriter | None = None,
    ) -> None:
        self.models = models
        self.now = clock.now
        self.wall = clock.wall
        self.adapters = FleetAdapters(pool, loop, models)
        self.drain_worker = pool.drain
        self.readmit_worker = pool.readmit
        self._pool = pool
        self._loop = loop
        self._host = host
        self._single_flight = single_flight
        self._admission = admission
        self._queue_limiter = queue_limiter
        self._deadlines = deadlines
        self._recorder = recorder
        self.record_composed: Callable[[ComposedRow], None] = recorder.record
        self._metrics = metrics
        self._gpu_accounting = gpu_accounting
        self.scale = scale
        self._watermarks = watermarks
        self._retry_spreader = QuotaRetrySpreader()
        self._budget_refusals = BudgetRefusals()
        self._is_draining = False
        self._refuses_work = False
        self._cleanup_timer: asyncio.TimerHandle | None = None
        self._announced: set[asyncio.Task[CancelReport]] = set()
        self._run_watchers = RunWatchers()
        self.lineages = RunLineages(admission.runs, clock, self.cancel_announced)
        self.on_run_cancelled: Callable[[str, str], None] | None = None
        """Tells other gateways of a run that was cancelled here. They may know runs that this one does not."""
        self._run_canceller = RunCanceller(
            admission.runs,
            clock,
            cancel=single_flight.cancel,
            evict_queued=self._evict_queued,
            attempt_of=loop.attempt_of,
            is_cancelled=lambda job_id: loop.is_evicted(job_id) or single_flight.has_left(job_id),
            is_stranded=pool.is_stranded,
        )
        deadlines.on_expired = single_flight.cancel

    # -- calls -------------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob, caller: Caller = ANONYMOUS) -> JobStream:
        """Admit the job, or raise the GatewayError that refuses it."""
        try:
            if self._refuses_work:
                raise Draining("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
            if self._single_flight.may_share(job):
                return self._single_flight.submit(job, caller)
            return self._host.execute(job, caller)
        except GatewayError as error:
            self._metrics.refused(error.code)
            self._retry_spreader.assign(error, job, caller, self.now())
            entry = self._budget_refusals.entry(job, error, self.now(), self.wall())
            if entry is not None:
                self._recorder.record(entry)
            raise

    def submit_all(self, jobs: Sequence[InferenceJob], caller: Caller = ANONYMOUS) -> list[JobStream]:
        """Admit all jobs of one call, or none: raise the refusal of the first that is refused.

        Nothing is planned before this returns. Jobs that were admitted before the refusal are cancelled, which returns
        all that they reserved.
        """
        streams: list[JobStream] = []
        try:
            self._loop.check_space(jobs[0], len(jobs))
        except GatewayError as error:
            self._metrics.refused(error.code)
            raise
        try:
            for job in jobs:
                streams.append(self.submit(job, caller))
        except GatewayError:
            for job in jobs[: len(streams)]:
                self.cancel(job.job_id, CallAborted("another prompt of the call was refused"))
            raise
        return streams

    def cancel(self, job_id: str, error: GatewayError | None = None) -> PendingCancel | None:
        """End a job for a reason of its own. A shared execution continues while another job reads it.

        Returns the cancel that a worker is to confirm; None where no worker has to.
        """
        return self._single_flight.cancel(job_id, error)

    def end_unauthorized(self, revocation_error: Callable[[str, str | None], GatewayError | None]) -> int:
        """End every job, queued or running, whose tenant or key was revoked; returns how many."""
        found: dict[str, GatewayError] = {}
        for job in (*self._single_flight.readers(), *(stream.attempt.job for stream in self._loop.streams())):
            error = revocation_error(job.tenant, job.key_id)
            if error is not None:
                found[job.job_id] = error
        for job_id, error in found.items():
            self.cancel(job_id, error)
        return len(found)

    def decision_of(self, attempt: Attempt) -> Decision | None:
        """Why the attempt waits or waited, and why its worker was picked."""
        return self._loop.decision_of(attempt)

    def attempt_of(self, job_id: str) -> Attempt | None:
        """The current attempt of a job in flight; None for a job that has ended or shares another's execution."""
        return self._loop.attempt_of(job_id)

    def is_in_flight(self, job_id: str) -> bool:
        """Whether a job of this id has not ended, or its execution continues for other jobs."""
        return self._loop.attempt_of(job_id) is not None or self._single_flight.involves(job_id)

    def rate_limit_status(self, caller: Caller) -> RateLimitStatus | None:
        """The caller's remaining requests and tokens per minute; None where neither is limited."""
        return self._admission.gate.rate_limit_status(caller, self.now())

    async def count_tokens(self, model: str, isolation: str | None, body: bytes) -> int | None:
        """Prompt tokens of a chat request, counted by a worker of the model; None where no worker can."""
        return await self._pool.count_tokens(model, isolation, body)

    @contextmanager
    def reserved_bytes(self, size: int) -> Iterator[None]:
        """Memory for a body that is no job yet, counted with the queued bytes. Raises QueueFull."""
        self._queue_limiter.reserve_bytes(size)
        try:
            yield
        finally:
            self._queue_limiter.release_bytes(size)

    @property
    def in_flight(self) -> int:
        """Admitted jobs that have not ended, without those that share another's execution."""
        return len(self._admission)

    def queue_depths(self) -> Mapping[Lane, int]:
        """Queued jobs by lane."""
        return self._loop.queue_depths()

    def queue_depth_of(self, lane: Lane, model: str) -> int:
        """Queued jobs of the lane for a model."""
        return self._loop.queue_depth_of(lane, model)

    def streams(self) -> Iterable[JobStream]:
        """Streams of all executions in flight."""
        return self._loop.streams()

    # -- runs --------------------------------------------------------------------------------------------------------

    async def cancel_run(
        self, tenant: str, run_id: str, *, wait_s: float = 1.0, is_known: bool = False
    ) -> CancelReport:
        """End a run and its sub-runs. Returns when the workers have confirmed, or after `wait_s`.

        Raises RunNotFound, unless the run is known from the ledger (`is_known`).
        """
        if self.on_run_cancelled is not None:
            self.on_run_cancelled(tenant, run_id)
            is_known = True
        return await self._cancel_here(tenant, run_id, wait_s, is_known=is_known)

    def cancel_announced(self, tenant: str, run_id: str) -> None:
        """Another gateway has cancelled the run."""
        if not self.has_run(tenant, run_id):
            self._admission.runs.restore([(tenant, run_id)], self.now())
            return
        task = asyncio.get_running_loop().create_task(self._cancel_here(tenant, run_id, 0.0, is_known=True))
        self._announced.add(task)
        task.add_done_callback(self._announced.discard)

    def watch_run(self, tenant: str, run_id: str, on_cancelled: Callable[[], None]) -> Callable[[], None]:
        """Call back when the run, or a parent of it, is cancelled here. Returns what ends the watch."""
        return self._run_watchers.watch(tenant, run_id, on_cancelled)

    def _tell_watchers(self, tenant: str, run_id: str) -> None:
        self._run_watchers.tell(tenant, {run_id, *self._admission.runs.tree_of(tenant, run_id)})

    async def _cancel_here(self, tenant: str, run_id: str, wait_s: float, *, is_known: bool) -> CancelReport:
        is_known = is_known or self._run_watchers.has(tenant, run_id)
        if self._run_watchers:
            # After the run's jobs have been told: until then its steps could still be repeated.
            asyncio.get_running_loop().call_soon(self._tell_watchers, tenant, run_id)
        try:
            return await self._run_canceller.cancel_run(tenant, run_id, wait_s=wait_s, is_known=is_known)
        finally:
            # After the cancels were sent: a stopped call keeps its KV for the run's next call until here.
            self.release_run(tenant, run_id)

    def finish_run(self, tenant: str, run_id: str) -> None:
        """The agent says that the run is over. Raises RunNotFound."""
        self._admission.runs.finish(tenant, run_id, self.now())
        self.release_run(tenant, run_id)

    def release_run(self, tenant: str, run_id: str) -> None:
        """A run is over: workers keep nothing for its next call, and it is concurrent no longer."""
        for sub_run_id in self._admission.runs.tree_of(tenant, run_id) or [run_id]:
            self._pool.end_run(tenant, sub_run_id)
            self._loop.end_run(tenant, sub_run_id)
        self._admission.gate.free_run_slot(tenant, run_id)

    def has_run(self, tenant: str, run_id: str) -> bool:
        return self._admission.runs.has_run(tenant, run_id)

    def is_run_cancelled(self, tenant: str, run_id: str) -> bool:
        """Whether the run itself was cancelled, known or not."""
        return self._admission.runs.has_tombstone(tenant, run_id)

    def run_snapshot(self, tenant: str, run_id: str) -> RunSnapshot | None:
        return self._admission.runs.snapshot(tenant, run_id, self.now(), self._sent_at)

    def newest_runs(self, tenant: str) -> Iterator[tuple[Run, RunStatus]]:
        """The tenant's named runs, the latest call first."""
        runs = self._admission.runs
        return ((run, runs.status(run)) for run in runs.newest_first(tenant))

    def all_runs(self, limit: int) -> list[tuple[Run, RunStatus]]:
        """The latest roots of all tenants, those with calls in flight first; of both kinds at most `limit`."""
        runs = self._admission.runs
        return [(run, runs.status(run)) for run in runs.newest_of_all(limit)]

    def run_budget(self, tenant: str, run_id: str) -> AccountReport | None:
        return self._admission.gate.run_report(tenant, run_id)

    def _sent_at(self, job_id: str) -> float | None:
        attempt = self._loop.attempt_of(job_id)
        return None if attempt is None else attempt.sent_at

    def _evict_queued(self, job_ids: Iterable[str]) -> set[str]:
        """Take jobs out of the queue, except those whose execution another job may share."""
        return self._loop.evict_queued(job_id for job_id in job_ids if not self._single_flight.involves(job_id))

    # -- workers -----------------------------------------------------------------------------------------------------

    def views(self) -> list[WorkerView]:
        return self._pool.views()

    def worker_reports(self) -> list[WorkerReport]:
        return self._pool.report()

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy], version: int, trial: LaneTrial | None = None) -> None:
        """Apply other lane policies to calls that arrive from now on, and those of a trial to its runs."""
        self._queue_limiter.use_lanes(lanes)
        self.models.use_lanes(lanes, None if trial is None else trial.lanes)
        self._loop.use_lanes(lanes, version, trial)

    def account_gpu_time(self, now: float) -> None:
        """Add the time since the last call to the workers' GPU time."""
        self._gpu_accounting.sample(now)

    def owner_state(self) -> OwnerState:
        """What the next owner of the workers keeps of this one."""
        adapters = tuple((name, path, base) for name, (path, base) in self.adapters.wanted.items())
        return OwnerState(adapters, tuple((advice.group, advice.desired) for advice in self.scale.report()))

    def take_over(self, last: OwnerState) -> None:
        """Want the adapters of the last owner, and no fewer workers than it has advised."""
        self.adapters.wanted = {name: (path, base) for name, path, base in last.adapters}
        for group, workers in last.desired:
            self.scale.assume_needed(group, workers, self.now())

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether some worker has generated a token, and new work is accepted."""
        return self._pool.is_ready and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def start(self) -> None:
        self._pool.start()
        if self._watermarks is not None:
            self._watermarks.start()
        self._clean_up()

    def _clean_up(self) -> None:
        """Forget idle runs and accounts, and schedule the next clean-up."""
        now = self.now()
        self._admission.runs.expire(now)
        self._admission.gate.forget_idle(now)
        self._cleanup_timer = asyncio.get_running_loop().call_later(CLEANUP_INTERVAL_S, self._clean_up)

    def announce_drain(self) -> None:
        """Not ready from now on. Work is accepted until `drain`."""
        self._is_draining = True

    async def drain(self) -> None:
        """Refuse new work and return once everything accepted has ended."""
        self._is_draining = self._refuses_work = True
        await self._loop.wait_idle()

    def abandon(self, *, immediately: bool = False) -> None:
        """The grace period is over: refuse new work and end all jobs, as workers confirm or at once."""
        self._refuses_work = True
        error = Draining("the gateway shut down before the call completed", retry_after_s=RETRY_AFTER_S)
        if immediately:
            self._loop.end_all(error)
        else:
            self._loop.cancel_all(error)

    def stop_timers(self) -> None:
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()
        self._single_flight.close()
        self._deadlines.close()

    async def close(self) -> None:
        self.stop_timers()
        self._gpu_accounting.sample(self.now())  # while the engines can be read
        await self._pool.close()
        await self._loop.close()
        self._gpu_accounting.close()
        await asyncio.to_thread(self._recorder.close)  # it writes its buffer
        if self._watermarks is not None:
            await self._watermarks.close()
