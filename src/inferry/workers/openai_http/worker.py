"""A worker behind HTTP: an engine's server with the OpenAI API, or a hosted API.

Calls are streamed upstream where the API can stream them. Events are forwarded as bytes and scanned only for tokens and
ends. A cancelled job ends at once; whether the engine has freed it is confirmed afterwards (`cancellation`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from inferry.domain.clock import Clock
from inferry.domain.errors import NOT_OWNER, ConnectFailed, GatewayError, NoWorker, WorkerLost, WorkerUnreachable
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.routes import GENERATES, Task
from inferry.domain.streams import Done, Failed
from inferry.domain.workers import Load, Phase, WorkerView
from inferry.workers.http_client import Client
from inferry.workers.openai_http.advice import EngineFacts, advice
from inferry.workers.openai_http.call_timeouts import CallTimeouts
from inferry.workers.openai_http.calls import Call
from inferry.workers.openai_http.cancellation import cancel_jobs
from inferry.workers.openai_http.continuation_call import ContinuationCall
from inferry.workers.openai_http.load_estimate import limited
from inferry.workers.openai_http.metrics_poller import MetricsPoller
from inferry.workers.openai_http.non_streaming_calls import NonStreamingCall
from inferry.workers.openai_http.pooled_calls import PooledCalls
from inferry.workers.openai_http.prefill_call import PrefillCall
from inferry.workers.openai_http.profiles import Profile, restrict_profile
from inferry.workers.openai_http.request_bodies import PRIORITIES, CacheSalts
from inferry.workers.openai_http.request_builder import RequestBuilder
from inferry.workers.openai_http.resume_points import ResumePoints
from inferry.workers.openai_http.served_models import model_cards, model_parents
from inferry.workers.openai_http.server_client import ServerClient
from inferry.workers.openai_http.server_monitor import ServerMonitor
from inferry.workers.openai_http.server_queries import ServerQueries
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.silent_refusals import SilentRefusalCall
from inferry.workers.openai_http.upstream_errors import upstream_error
from inferry.workers.openai_http.upstream_keys import UpstreamKeys
from inferry.workers.plan_completion import PlanCompletion

log = logging.getLogger(__name__)


class OpenAIHttpWorker:
    """One OpenAI-compatible server. Belongs to the event loop it is started on."""

    def __init__(
        self,
        name: str,
        settings: HttpWorkerSettings,
        clock: Clock,
        lanes: Mapping[Lane, LanePolicy] = DEFAULT_LANES,
    ) -> None:
        self._name, self._settings, self._lanes, self.clock = name, settings, lanes, clock
        self.may_send: Callable[[], bool] = lambda: True
        self._profile = profile = settings.profile
        parents = model_parents(settings, {})
        self._set_cards(tuple(ModelCard(name=n, features=profile.features, parent=p) for n, p in parents.items()))
        secrets = settings.api_keys or ((settings.api_key,) if settings.api_key else ())
        self._keys = keys = UpstreamKeys(secrets, clock, is_hosted=profile.is_hosted)
        headers = {"content-type": "application/json"}
        self._http = Client(settings.url, headers, settings.connect_timeout_s)
        # Monitoring has a connection of its own, so that probes and calls do not wait for each other.
        self._monitor_http = Client(settings.url, headers, settings.connect_timeout_s)
        monitor_client = ServerClient(self._monitor_http)
        self._server = ServerQueries(
            profile, ServerClient(self._http), monitor_client, keys.header(), settings.first_token_timeout_s
        )
        self._resume_points = ResumePoints.of(profile, monitor_client, keys.header())
        is_salted = settings.cache_salts and profile.cache_salts
        self._salts = CacheSalts.from_secret(settings.salt_secret) if is_salted else None
        self._priorities: dict[Lane, bytes] = {}
        self._requests = self._request_builder({})
        self._is_started = False
        self._poller: MetricsPoller | None = None
        self._calls: dict[str, Call] = {}
        self._timeouts = CallTimeouts(
            name, self._calls, clock, settings.first_token_timeout_s, settings.inter_token_timeout_s
        )
        self._monitor = ServerMonitor(
            self._server, self._calls, clock, settings.liveness_timeout_s, self._on_unresponsive
        )
        self._pooled = PooledCalls(self, self._calls, settings.max_inputs)
        self._connecting: set[asyncio.Task[None]] = set()
        self._reports_cached: bool | None = None
        self._logged_advice: set[str] = set()
        self._ended_calls = self.cancelled_confirmed = self.cancelled_unconfirmed = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def profile(self) -> Profile:
        """What the server can do. Narrowed to what it was seen to do once it is started."""
        return self._profile

    @property
    def open_calls(self) -> int:
        return len(self._calls) + self._pooled.further_open  # engines count inputs

    @property
    def ended_calls(self) -> int:
        return self._ended_calls + self._pooled.further_ended

    def cards(self) -> Sequence[ModelCard]:
        return self._cards

    def view(self) -> WorkerView:
        now = self.clock.now()
        load, foreign = Load(running=self.open_calls), Load()
        kv_capacity = prefix_hits = counts = counted_at = None
        if self._poller is not None:
            estimate = self._poller.estimate
            load, foreign = estimate.load(self.open_calls, now), estimate.foreign(now)
            if estimate.snapshot is not None:
                kv_capacity, prefix_hits = estimate.snapshot.kv_capacity, int(estimate.snapshot.prefix_hits)
                counts, counted_at = estimate.counts, estimate.read_at
        return WorkerView(
            worker=self._name,
            group=self._settings.group,
            isolation=self._settings.pool,
            models=self._models,
            adapters=self._adapters,
            precision=self._settings.precision,
            output_length=self._settings.output_length,
            kv_packing=self._settings.kv_packing,
            phase=self._phase,
            capacity=limited(self._settings.capacity, kv_capacity, self._keys.capacity(now)),
            load=load,
            foreign=foreign,
            kv_capacity=kv_capacity,
            observed_at=now,
            gpus=self._settings.gpus,
            overflow=self._settings.overflow,
            role=self._settings.role,
            min_prefill_tokens=self._settings.min_prefill_tokens,
            chunk_tokens=self._settings.chunk_tokens,
            controlled=self._settings.controlled,
            prefix_hits=prefix_hits,
            counts=counts,
            counted_at=counted_at,
            last_activity_at=self._monitor.last_activity_at,
        )

    @property
    def _phase(self) -> Phase:
        if not self._is_started:
            return Phase.STARTING
        return Phase.DOWN if self._monitor.is_unresponsive else Phase.READY

    def engine_facts(self) -> EngineFacts:
        """The engine's settings as far as they are known, for `advice`."""
        capacity, view, is_probed = self._settings.capacity, self.view(), self._is_started
        estimate = None if self._poller is None else self._poller.estimate
        return EngineFacts(
            worker=self._name,
            kind=self._profile.kind,
            max_sequences=capacity.sequences,
            prefill_tokens=capacity.prefill_tokens,
            kv_tokens=capacity.kv_tokens,
            chunk_tokens=view.chunk_tokens,
            decodes=self._settings.role != "prefill" and Task.GENERATE in (self._settings.tasks or GENERATES),
            engine_sequences=None if estimate is None else estimate.engine_sequences,
            kv_capacity=view.kv_capacity,
            preempts=estimate is not None and estimate.preemptions > 0,
            has_metrics=self._poller is not None if is_probed and self._settings.profile.metrics is not None else None,
            supports_priority=bool(self._priorities) if is_probed and self._settings.wants_priorities else None,
            reports_cached=self._reports_cached,
            shares_cache=self._settings.shares_cache,
            may_ignore_salts=self._salts is not None and self._server.is_other_than_vllm,
        )

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask the server for its models, their context lengths, and its capabilities."""
        settings = self._settings
        listed = await self._server.models(settings.models)
        parents = model_parents(settings, listed)
        missing = [name for name in parents if name not in listed]
        if missing:
            log.warning("worker %s does not list the models %s", self._name, ", ".join(missing))
        tasks = settings.tasks or await self._server.tasks(list(parents))
        await self._detect_capabilities(next(iter(parents), None) if Task.GENERATE in tasks else None)
        self._set_cards(model_cards(parents, listed, self._profile, settings, tasks))
        self._requests = self._request_builder({card.name: card.context_tokens for card in self._cards})
        self._is_started = True
        self._log_advice()
        if not self._profile.is_hosted:  # probes of a hosted API would count against its rate limit
            self._monitor.start_probing(self._poller, settings.liveness_interval_s)

    def _request_builder(self, contexts: Mapping[str, int | None]) -> RequestBuilder:
        takes_kv, priorities = self._settings.role == "decode", self._priorities
        return RequestBuilder(self._http, self._keys, self._profile, self._salts, priorities, contexts, takes_kv)

    def _set_cards(self, cards: tuple[ModelCard, ...]) -> None:
        self._cards = cards
        self._models = frozenset(card.name for card in cards)
        self._adapters = frozenset(card.name for card in cards if card.parent is not None)

    async def _detect_capabilities(self, model: str | None) -> None:
        """Narrow the profile to what the server supports."""
        profile, asks = self._settings.profile, self._settings.wants_priorities
        capabilities = await self._server.capabilities(model, wants_priorities=asks)
        self._profile = profile = restrict_profile(profile, capabilities)
        self._priorities = PRIORITIES if asks and profile.supports_priority and model is not None else {}
        if asks and self._settings.profile.supports_priority:
            verb = "schedules" if self._priorities else "does not schedule"
            log.info("worker %s %s requests by priority", self._name, verb)
        if profile.metrics is None:
            await self._close_poller()
        elif self._poller is None:
            self._poller = MetricsPoller(
                self._monitor.metrics_page, profile.metrics, self, self.clock, self._log_advice
            )
            await self._poller.poll()

    def _log_advice(self) -> None:
        """Log each finding about settings that endanger SLO targets once."""
        if self._is_started:
            for message in advice(self.engine_facts(), self._lanes):
                if message not in self._logged_advice:
                    self._logged_advice.add(message)
                    log.warning("%s", message)

    async def count_tokens(self, body: bytes) -> int | None:
        """Prompt tokens of a chat request; None where the server cannot count them."""
        return await self._server.count_tokens(body)

    # -- plans -------------------------------------------------------------------------------------------------------

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        completion = PlanCompletion(len(plan.jobs))
        calls: list[Call] = [self._call(job, emit, completion) for job in plan.jobs if job.payload.pooled is None]
        # Registered before anything is sent, so that a cancel finds them.
        for call in calls:
            self._calls[call.job.job_id] = call
        self._timeouts.arm()
        self._monitor.on_calls()
        try:
            for call in calls:
                self.send(call)
            if len(calls) != len(plan.jobs):
                self._pooled.open(plan.jobs, emit, completion)
            await completion.finished
        finally:
            for call in (*calls, *self._pooled.take(completion)):
                if call.end is None:
                    call.abandon()
                    self._remove_call(call)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """End these jobs at once; return those that the engine is known to have freed."""
        abort = None if self._profile.abort_path is None else self._monitor.abort
        freed, unconfirmed = await cancel_jobs(job_ids, self._pooled, self._calls, abort, self._poller, self.clock)
        self.cancelled_confirmed += len(freed)
        self.cancelled_unconfirmed += unconfirmed
        return freed

    async def close(self) -> None:
        for call in list(self._calls.values()):
            call.fail(WorkerLost(f"worker {self._name} was closed"))
        for task in self._connecting:
            task.cancel()
        self._timeouts.close()
        await self._monitor.close()
        await self._close_poller()
        self._http.close()
        self._monitor_http.close()

    async def _close_poller(self) -> None:
        poller, self._poller = self._poller, None
        if poller is not None:
            await poller.close()

    def _on_unresponsive(self) -> None:
        """Fail the calls that another worker can take over. The others wait: the server may recover."""
        log.warning("worker %s is unresponsive: probes were not answered", self._name)
        for call in list(self._calls.values()):
            if call.connection is None:
                call.fail(WorkerUnreachable(f"worker {self._name} is unresponsive"))  # it was not sent
            elif call.can_fail_over:
                call.connection_lost(WorkerLost(f"worker {self._name} is unresponsive"))

    # -- one call ----------------------------------------------------------------------------------------------------

    def _call(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> Call:
        if job.resume_point is not None:
            return ContinuationCall(job, emit, completion, self)
        if job.route.role == "prefill":
            return PrefillCall(job, emit, completion, self)
        if job.payload.non_streaming:
            return NonStreamingCall(job, emit, completion, self)
        if self._profile.refuses_silently:
            return SilentRefusalCall(job, emit, completion, self)
        trace_tokens = job.resume is ResumeMode.CONTINUE and self._profile.can_resume
        return Call(job, emit, completion, self, trace_tokens=trace_tokens)

    def send(self, call: Call) -> None:
        """Send the call at once on an idle connection, or on a new one."""
        if call.end is not None:
            return
        if self._monitor.is_unresponsive:
            call.fail(WorkerUnreachable(f"worker {self._name} is unresponsive"))
            return
        if isinstance(call, ContinuationCall) and not self._can_continue(call):
            return
        if (exhausted := self._keys.acquire(call, self._name)) is not None:
            call.fail(exhausted)
            return
        if (connection := self._http.free()) is not None:
            call.start(connection, self._requests.build(call))
        else:
            self._start(self._connect(call))

    def _can_continue(self, call: ContinuationCall) -> bool:
        """Whether a resumed call can be sent now. Else it has ended, or is sent once its resume point is known."""
        if not self._profile.can_resume:
            call.fail(NoWorker(f"worker {self._name} cannot resume from token ids"))
            return False
        if self._resume_points is not None and not call.starts_at_character:
            self._start(self._resume_at_character(call, self._resume_points))
            return False
        if call.stops is None and call.job.payload.sampling.stop:
            call.fail(NoWorker(f"worker {self._name} cannot resume a job with stop strings"))
            return False
        if self._requests.remaining_tokens(call.job) < 1:
            call.finish_immediately()
            return False
        return True

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _resume_at_character(self, call: ContinuationCall, resume_points: ResumePoints) -> None:
        call.resume_after(*await resume_points.locate(call.job))
        if not self.may_send():
            call.fail(WorkerUnreachable(NOT_OWNER))
        self.send(call)

    async def _connect(self, call: Call) -> None:
        try:
            connection = await self._http.connect()
        except (OSError, TimeoutError) as error:
            self._monitor.on_unreachable()
            call.fail(ConnectFailed(f"worker {self._name} cannot be reached: {type(error).__name__}"))
            return
        if call.end is None and not self.may_send():
            call.fail(WorkerUnreachable(NOT_OWNER))
        if call.end is None:
            call.start(connection, self._requests.build(call))
        else:
            connection.close()  # the call ended meanwhile

    # -- callbacks of calls ------------------------------------------------------------------------------------------

    def on_response(self) -> None:
        self._monitor.on_response()

    def on_response_head(self, call: Call, status: int, rate_limit_headers: dict[bytes, bytes]) -> None:
        self._keys.on_response_head(call, status, rate_limit_headers)

    def refused(
        self, call: Call, status: int, body: bytes, rate_limit_headers: dict[bytes, bytes]
    ) -> GatewayError | None:
        retry_after_s = None
        if status in (429, 503):
            can_retry, retry_after_s = self._keys.refused(call, rate_limit_headers)
            if can_retry:
                call.reset()
                self.send(call)
                return None
        return upstream_error(self._name, status, body, retry_after_s=retry_after_s, secrets=self._keys.secrets)

    def shape_of(self, api: str) -> dict[str, Any] | None:
        return self._server.shapes.of(api)

    def ended(self, call: Call, end: Done | Failed) -> None:
        self._remove_call(call)
        if isinstance(end, Done) and call.reports_cached is not None:
            self._reports_cached = call.reports_cached

    def _remove_call(self, call: Call) -> None:
        if self._calls.pop(call.job.job_id, None) is not None:
            self._ended_calls += 1
            self._monitor.ended(call)
        self._keys.release(call)
