"""Runs admitted jobs: the host of single flight, and the way to the dispatch loop."""

from inferry.dispatch.admission_control import AdmissionControl, FollowerSession
from inferry.dispatch.budget import RETRY_AFTER_S
from inferry.dispatch.budget_writer import BudgetWriter
from inferry.dispatch.cancel_sender import PendingCancel
from inferry.dispatch.loop import DispatchLoop
from inferry.dispatch.pool import Pool
from inferry.dispatch.singleflight.single_flight import SharingKind
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, NoWorker
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.observe.tracing.tracer import Tracer
from inferry.streams.mailbox import JobStream


class JobHost:
    """Admits jobs and gives them to the loop; accounts for jobs that share an execution."""

    def __init__(
        self,
        pool: Pool,
        loop: DispatchLoop,
        admission: AdmissionControl,
        recorder: Recorder,
        metrics: Metrics,
        watermarks: BudgetWriter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._pool = pool
        self._loop = loop
        self._admission = admission
        self._recorder = recorder
        self._watermarks = watermarks
        self._metrics = metrics
        self._tracer = tracer
        if watermarks is not None:
            watermarks.on_written = self._start_covered

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        """Admit and run the job, or raise its refusal."""
        no_worker = self._no_worker(job)
        if no_worker is not None and not self._loop.may_overflow(job):
            raise no_worker
        job, granted_tokens, batch = self._admission.admit(job, caller)
        try:
            stream = self._loop.submit(job, granted_tokens, batch, no_worker)
        except BaseException:
            self._admission.reject(job.job_id)
            raise
        finally:
            if self._watermarks is not None:
                self._watermarks.wake()
        if stream.attempt.job.overflow is not None:
            batch = max(batch, self._loop.overflow_batch(stream.attempt.job))
        if batch and self._watermarks is not None:
            self._watermarks.wait(batch, job.job_id)
        return stream

    def _start_covered(self, job_ids: list[str]) -> list[str]:
        """Offer jobs whose batch is written; return those that are to wait for the next one.

        Where a shared limit was granted in part, the last jobs wait or are refused.
        """
        uncovered = self._admission.uncovered(job_ids)
        waiting: list[str] = []
        for job_id in job_ids:
            if job_id not in uncovered:
                self._loop.reoffer(job_id)
            elif (error := self._admission.uncovered_error(job_id)) is None:
                waiting.append(job_id)
            else:
                self._loop.cancel(job_id, error)
        return waiting

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> PendingCancel | None:
        return self._loop.cancel(job_id, error)

    def admit_follower(self, job: InferenceJob, caller: Caller) -> FollowerSession:
        return self._admission.admit_follower(job, caller)

    def follower_ended(self, job: InferenceJob, entry: LedgerEntry) -> None:
        if job.trace is not None and self._tracer is not None:
            self._tracer.shared_ended(job.trace, entry)
        self._metrics.shared_ended(entry)
        if job.is_recorded:
            self._recorder.record(entry)

    def shared(self, kind: SharingKind) -> None:
        self._metrics.shared(kind)

    def unshared(self) -> None:
        self._metrics.unshared()

    def _no_worker(self, job: InferenceJob) -> NoWorker | None:
        """The refusal of a job that own workers cannot take."""
        route = job.route
        if not self._pool.serves(route.model) and not self._may_wait_for_worker(job):
            is_drained = self._pool.is_drained(route.model, route.isolation)
            state = "every worker of model `{}` is drained" if is_drained else "no worker of model `{}` is up"
            return NoWorker(state.format(route.model), retry_after_s=RETRY_AFTER_S)
        if (route.isolation is not None or route.precision is not None) and not self._loop.has_route(route):
            return NoWorker(
                f"no worker in the tenant's pool serves model `{route.model}`"
                if route.precision is None
                else f"no worker of the tenant serves model `{route.model}` with precision {route.precision}",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def _may_wait_for_worker(self, job: InferenceJob) -> bool:
        """Whether a worker of the job's model may come back up in time."""
        model = job.route.model
        return self._pool.is_model_out(model) and self._pool.outage_timeout_s(model) > 0
