"""The facade: what ingress knows of everything behind it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from inferry.admission.queue_limiter import QueueLimiter
from inferry.admission.quota_gate import QuotaGate
from inferry.admission.reports import AccountReport, RateLimitStatus
from inferry.admission.retry_after import RetryAfterSpreader
from inferry.dispatch.admission_control import AdmissionControl, FollowerSession
from inferry.dispatch.loop import DispatchLoop
from inferry.dispatch.pool import Pool
from inferry.dispatch.run_cancellation import RunCanceller
from inferry.dispatch.singleflight.single_flight import SharingKind, SingleFlight
from inferry.dispatch.values import CancelReport, Sharing, WorkerReport
from inferry.dispatch.watermark_writer import WatermarkWriter
from inferry.domain.attempts import Attempt
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import Draining, GatewayError, LedgerUnavailable, NoWorker
from inferry.domain.jobs import Estimate, InferenceJob
from inferry.domain.lanes import Lane, LanePolicy, evictable_lanes
from inferry.domain.ledger import LedgerEntry
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.streams import Done, FinishReason
from inferry.domain.workers import WorkerView
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.prediction.output_length import OutputLengthModel
from inferry.prediction.prefix_hits import NO_MATCH, PrefixHitModel
from inferry.prediction.token_ratio import TokenRatios
from inferry.prediction.values import Accuracy, Coverage, LengthQuery
from inferry.runs.registry import Run, RunRegistry, RunSnapshot, RunStatus, Totals
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.mailbox import JobStream

__all__ = [
    "AccountReport",
    "CancelReport",
    "Gateway",
    "JobStream",
    "RateLimitStatus",
    "Run",
    "RunRegistry",
    "RunSnapshot",
    "RunStatus",
    "Totals",
    "WorkerReport",
]

RETRY_AFTER_S = 2.0
"""What a client is told when nothing better is known."""
CLEANUP_INTERVAL_S = 60.0
_NO_CACHED_TOKENS = Estimate.exactly(0)


class Gateway:
    """Jobs in, streams out. Belongs to the event loop it is made on."""

    def __init__(
        self,
        *,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        recorder: Recorder,
        metrics: Metrics,
        clock: Clock,
        tokenizers: Mapping[str, Tokenizer] | None = None,
        gate: QuotaGate | None = None,
        runs: RunRegistry | None = None,
        single_flight: Sharing | None = None,
        queue_limiter: QueueLimiter | None = None,
        watermarks: WatermarkWriter | None = None,
        weight_of: Callable[[str], float] | None = None,
    ) -> None:
        self.lanes = lanes
        self._watermarks = watermarks
        self.clock = clock
        self._pool = pool
        self._recorder = recorder
        self._metrics = metrics
        self._tokenizers = {} if tokenizers is None else tokenizers  # the caller's own: workers may come later
        self._ratios = TokenRatios()
        self._prefixes = PrefixHitModel()
        self._lengths = OutputLengthModel()
        self._retry_spreader = RetryAfterSpreader()
        self._draining = False
        self._cleanup_timer: asyncio.TimerHandle | None = None
        self.admission_control = AdmissionControl(gate or QuotaGate({}), runs or RunRegistry(), clock)
        if watermarks is not None:
            self.admission_control.on_renewed = watermarks.wake
        metrics.watch(output_error=lambda: self._lengths.accuracy.mean_abs_log_error)
        self._preempted = evictable_lanes(lanes)
        scheduler = Scheduler(lanes, weights=weight_of)
        self._loop = DispatchLoop(
            scheduler=scheduler,
            lanes=lanes,
            pool=pool,
            recorder=recorder,
            metrics=metrics,
            clock=clock,
            on_done=self._learn_from_end,
            on_cached=self._prefixes.learn_totals,
            budget=self.admission_control,
            queue_limiter=queue_limiter,
        )
        metrics.watch(
            pending_retries=self._loop.queue_limiter.pending_retries,
            queued_bytes=lambda: self._loop.queue_limiter.queued_bytes,
            fairness=lambda: {lane: scheduler.jain_index(lane) for lane in lanes},
            shadow_refusals=lambda: self.admission_control.gate.shadow_refused,
            overrun_tokens=lambda: self.admission_control.gate.overrun_tokens,
        )
        self._single_flight = SingleFlight(single_flight or Sharing(), self, clock)
        self.run_canceller = RunCanceller(
            self.admission_control.runs,
            clock,
            self.cancel,
            self._evict_queued,
            self._loop.attempt_of,
            self._loop.cancel_sender.confirmation,
            pool.is_stranded,
        )

    # -- what a call needs to know -----------------------------------------------------------------------------------

    def cards(self, isolation: str | None = None) -> dict[str, ModelCard]:
        """The models for tenants without workers of their own, or of those that are the named one's. Nobody can tell
        what another's pool serves from what nobody does.
        """
        return self._pool.cards(isolation)

    @property
    def are_models_known(self) -> bool:
        """Has every worker said what it serves?"""
        return all(view.models for view in self._pool.views())

    def tokenizer(self, model: str) -> Tokenizer | None:
        """The model's tokenizer where its ids are what every worker of the model wants."""
        return self._tokenizers.get(model)

    def can_resume(self, card: ModelCard, lane: Lane) -> bool:
        """Whether a plain job of the lane is to be able to go on from its token ids: that costs nothing, because the
        worker speaks ids anyway; or there is another worker that can; or jobs of the lane are stopped for others.
        """
        return card.can_resume and (
            card.name in self._tokenizers or lane in self._preempted or self._pool.worker_count(card.name) > 1
        )

    def estimate_prompt(self, tenant: str, model: str, template: str | None, size: int) -> Estimate:
        return self._ratios.estimate(model, _scoped_template(tenant, template), size)

    def match_prefix(self, model: str, tenant: str, body: bytes, prompt: Estimate) -> tuple[Estimate, tuple[str, ...]]:
        """How much of a prompt the engine will find in its prefix cache, and what it has in common with others."""
        prefix_match = self._prefixes.match(tenant, model, body)
        if prefix_match is NO_MATCH:
            return _NO_CACHED_TOKENS, ()
        known = int(prompt.expected * prefix_match.share)
        return Estimate(0, self._prefixes.expected(model, known), known), prefix_match.chain

    def predict_output(
        self, tenant: str, model: str, prompt_tokens: int, budget: int, template: str | None, hint: int | None
    ) -> Estimate:
        """How much a call will write, from what calls like it have written."""
        return self._lengths.predict(LengthQuery(tenant, model, prompt_tokens, budget, template, hint))

    @property
    def output_accuracy(self) -> Accuracy:
        """How good `predict_output` has been, lately."""
        return self._lengths.accuracy

    def wait_coverage(self, lane: Lane) -> Coverage:
        """How often the P90 wait that jobs of the lane were told has held, lately."""
        return self._loop.waits.coverage(lane)

    @property
    def is_ready(self) -> bool:
        """Some worker has really generated, and new work is welcome."""
        return self._pool.is_ready and not self._draining

    @property
    def is_draining(self) -> bool:
        return self._draining

    def rate_limit_status(self, caller: Caller) -> RateLimitStatus | None:
        """What is left to the caller of its requests and tokens per minute; None where neither is limited."""
        return self.admission_control.gate.rate_limit_status(caller, self.clock.now())

    @contextmanager
    def reserved_bytes(self, size: int) -> Iterator[None]:
        """Memory for a body that is no job yet, counted among what is queued. Raises QueueFull."""
        self._loop.queue_limiter.reserve_bytes(size)
        try:
            yield
        finally:
            self._loop.queue_limiter.release_bytes(size)

    def views(self) -> list[WorkerView]:
        return self._pool.views()

    @property
    def fleet(self) -> Pool:
        """The workers, for whoever administers them."""
        return self._pool

    # -- the path ----------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob, caller: Caller = ANONYMOUS) -> JobStream:
        """Let the job in, or raise the GatewayError that says why not."""
        try:
            if self._draining:
                raise Draining("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
            if self._single_flight.may_share(job):
                return self._single_flight.submit(job, caller)
            return self.execute(job, caller)
        except GatewayError as error:
            self._metrics.refused(error.code)
            self._retry_spreader.assign(error, job, caller, self.clock.now())
            raise

    def cancel(self, job_id: str, error: GatewayError | None = None) -> None:
        """End a job for a reason of its own. What it shares goes on for as long as somebody else wants it."""
        if not self._single_flight.leave(job_id, error):
            self.cancel_execution(job_id, error)

    def end_unauthorized(self, revocation_error: Callable[[str, str | None], GatewayError | None]) -> int:
        """End every job, queued or running, whose tenant and key may not call any more; returns how many."""
        found: dict[str, GatewayError] = {}
        for job in (*self._single_flight.readers(), *(stream.attempt.job for stream in self._loop.streams())):
            error = revocation_error(job.tenant, job.key_id)
            if error is not None:
                found[job.job_id] = error
        for job_id, error in found.items():
            self.cancel(job_id, error)
        return len(found)

    def _evict_queued(self, job_ids: Iterable[str]) -> set[str]:
        """Take jobs that are queued out of the queue, but for those whose execution somebody else may share."""
        return self._loop.evict_queued(job_id for job_id in job_ids if not self._single_flight.involves(job_id))

    def attempt_of(self, job_id: str) -> Attempt | None:
        """The attempt that a job in flight is at; None for one that has ended or shares another's."""
        return self._loop.attempt_of(job_id)

    def execute(self, job: InferenceJob, caller: Caller) -> JobStream:
        """Have the job run, or raise why not."""
        if not self._pool.serves(job.route.model) and not self._may_wait_for_worker(job):
            raise NoWorker(f"no worker of model `{job.route.model}` is up", retry_after_s=RETRY_AFTER_S)
        if job.route.isolation is not None and not self._loop.has_route(job.route):
            raise NoWorker(
                f"no worker in the tenant's pool serves model `{job.route.model}`", retry_after_s=RETRY_AFTER_S
            )
        job, granted_tokens, batch = self.admission_control.admit(job, caller)
        try:
            stream = self._loop.submit(job, granted_tokens, _watermark_timeout() if batch else None)
        except BaseException:
            self.admission_control.reject(job.job_id)
            raise
        finally:
            if self._watermarks is not None:
                self._watermarks.wake()
        if batch and self._watermarks is not None:
            self._watermarks.on_batch_written(batch, partial(self._loop.reoffer, job.job_id))
        return stream

    def _may_wait_for_worker(self, job: InferenceJob) -> bool:
        """Whether a worker of the job's model may come back before its patience, or its deadline, is over."""
        return self._pool.policy.no_worker_timeout_s > 0 and self._pool.is_model_out(job.route.model)

    def cancel_execution(self, job_id: str, error: GatewayError | None) -> None:
        self._loop.cancel(job_id, error)

    def admit_follower(self, job: InferenceJob, caller: Caller) -> FollowerSession:
        """Let in a job that shares another's execution, or raise why not."""
        return self.admission_control.admit_follower(job, caller)

    def follower_ended(self, entry: LedgerEntry) -> None:
        self._metrics.shared_ended(entry)
        self._recorder.record(entry)

    def shared(self, kind: SharingKind) -> None:
        self._metrics.shared(kind)

    def unshared(self) -> None:
        self._metrics.unshared()

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._pool.start()
        if self._watermarks is not None:
            self._watermarks.start()
        self._clean_up()

    def _clean_up(self) -> None:
        """Forget runs and accounts that nobody has used for long."""
        now = self.clock.now()
        self.admission_control.runs.expire(now)
        self.admission_control.gate.forget_idle(now)
        self._cleanup_timer = asyncio.get_running_loop().call_later(CLEANUP_INTERVAL_S, self._clean_up)

    async def drain(self) -> None:
        """Take no new work and return once everything accepted has ended."""
        self._draining = True
        await self._loop.wait_idle()

    def abandon(self, *, immediately: bool = False) -> None:
        """The grace is over: end what is left and tell its clients, as workers confirm it or at once."""
        error = Draining("the gateway shut down before the call completed", retry_after_s=RETRY_AFTER_S)
        if immediately:
            self._loop.end_all(error)
        else:
            self._loop.cancel_all(error)

    async def close(self) -> None:
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()
        self._single_flight.close()
        await self._pool.close()
        await self._loop.close()
        await asyncio.to_thread(self._recorder.close)  # it writes what is left
        if self._watermarks is not None:
            await self._watermarks.close()

    def _learn_from_end(self, job: InferenceJob, done: Done) -> None:
        predicted, prompt = job.footprint.output, job.footprint.prompt.expected
        usage = done.usage
        self._prefixes.learn(job.route.model, job.footprint.cached.high, usage.cached_tokens)
        # Only what uses all of its budget was not predicted. A prediction that is down to one value goes on learning.
        if not (predicted.is_exact and predicted.expected >= job.token_budget):
            query = LengthQuery(job.tenant, job.route.model, prompt, job.token_budget, job.template_id, job.output_hint)
            self._lengths.observe(
                query, predicted, done.usage.output_tokens, truncated=done.finish is FinishReason.LENGTH
            )
        if not job.footprint.prompt.is_exact:
            size = len(job.payload.body)
            template = _scoped_template(job.tenant, job.template_id)
            self._ratios.learn(job.route.model, template, size, done.usage.prompt_tokens)


def _watermark_timeout() -> LedgerUnavailable:
    """Why a job fails whose budgets' marks the database does not have in time."""
    message = "the budget watermark was not written in time"
    return LedgerUnavailable(message, retry_after_s=RETRY_AFTER_S)


def _scoped_template(tenant: str, template: str | None) -> str | None:
    """Two tenants may call their templates the same: neither learns from the other's."""
    return None if template is None else f"{tenant} {template}"
