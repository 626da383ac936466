"""A worker behind HTTP: vLLM, SGLang, TGI, TensorRT-LLM, a hosted API, or anything else that speaks the OpenAI API.

Calls are always streamed upstream. The events pass through as bytes; each is looked at only as closely as it takes to
tell a token from an end. What a server can do beyond the plain API is in its profile. A cancelled job ends at once;
that it is also gone from the engine is confirmed afterwards, where the engine lets itself be asked.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, GatewayError, NoWorker, WorkerLost, WorkerTimeout, WorkerUnreachable
from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Load, Phase, WorkerView
from inferry.workers.http_client import Client, Request
from inferry.workers.openai_http.advice import EngineFacts, advice
from inferry.workers.openai_http.calls import Call, ContinuationCall, PlanCompletion, StreamEndListener
from inferry.workers.openai_http.cancellation import abort_and_confirm, confirm_gone
from inferry.workers.openai_http.capability_probe import PATHS, CapabilityProbe, ServedModel
from inferry.workers.openai_http.metrics_poller import MetricsPoller
from inferry.workers.openai_http.non_streaming_calls import NonStreamingCall
from inferry.workers.openai_http.profiles import Profile, restrict_profile
from inferry.workers.openai_http.rate_limits import KeyRateLimiters, RateLimits, parse_rate_limits
from inferry.workers.openai_http.request_bodies import (
    PRIORITIES,
    RETURN_TOKEN_IDS,
    CacheSalts,
    engine_id,
    non_streaming_body,
    remaining_tokens,
    request_id,
    resumed_body,
    streaming_body,
)
from inferry.workers.openai_http.resume_points import ResumePoints
from inferry.workers.openai_http.server_client import ServerClient
from inferry.workers.openai_http.server_monitor import ServerMonitor
from inferry.workers.openai_http.settings import EngineSteps, HttpWorkerSettings
from inferry.workers.openai_http.upstream_errors import upstream_error
from inferry.workers.stop_strings import COMPARED_CHARS, resume_stop_matcher

log = logging.getLogger(__name__)

CANCELS_PER_YIELD = 50
"""To end a call takes some fifty microseconds, with all that hangs on it."""


class OpenAIHttpWorker:
    """One OpenAI-compatible server. Belongs to the event loop it is started on."""

    def __init__(
        self,
        name: str,
        settings: HttpWorkerSettings,
        clock: Clock,
        lanes: Mapping[Lane, LanePolicy] = DEFAULT_LANES,
    ) -> None:
        self._name = name
        self._settings = settings
        self._lanes = lanes
        self.clock = clock
        self._profile = settings.profile
        self._cards = tuple(ModelCard(name=model, features=self._profile.features) for model in settings.models)
        self._models = frozenset(settings.models)
        self._contexts: dict[str, int | None] = {}
        self._secrets = settings.api_keys or ((settings.api_key,) if settings.api_key else ())
        self._keys = [f"authorization: Bearer {key}\r\n".encode("latin-1") for key in self._secrets] or [b""]
        headers = {"content-type": "application/json"}
        self._http = Client(settings.url, headers, settings.connect_timeout_s)
        # Looking at the engine has a connection of its own: it must not wait behind calls, nor they behind it.
        self._monitor_http = Client(settings.url, headers, settings.connect_timeout_s)
        self._server = CapabilityProbe(
            self._profile,
            ServerClient(self._http),
            ServerClient(self._monitor_http),
            self._keys[0],
            settings.first_token_timeout_s,
        )
        path = self._profile.detokenize_path
        self._resume_points = (
            None if path is None else ResumePoints(ServerClient(self._monitor_http), path, self._keys[0])
        )
        self._salts: CacheSalts | None = None
        if settings.cache_salts and self._profile.cache_salts:
            secret = settings.salt_secret
            self._salts = CacheSalts(os.urandom(32) if secret is None else secret.encode())
        self._is_started = False
        self._priorities: dict[Lane, bytes] = {}
        self._rate_limiter = KeyRateLimiters(len(self._keys)) if self._profile.is_hosted else None
        self._poller: MetricsPoller | None = None
        self._calls: dict[str, Call] = {}
        self._monitor = ServerMonitor(
            self._server, self._calls, clock, settings.liveness_timeout_s, self._on_unresponsive
        )
        self._connecting: set[asyncio.Task[None]] = set()
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._reports_cached: bool | None = None
        self._logged_advice: set[str] = set()
        self.ended_calls = 0
        self.cancelled_confirmed = 0
        self.cancelled_unconfirmed = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def profile(self) -> Profile:
        """What the server can do, as far as it is known."""
        return self._profile

    @property
    def engine_steps(self) -> EngineSteps:
        """The engine's pace, where it says so."""
        return EngineSteps() if self._poller is None else self._poller.estimate.steps

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def cards(self) -> Sequence[ModelCard]:
        return self._cards

    def view(self) -> WorkerView:
        now = self.clock.now()
        load, foreign = Load(running=len(self._calls)), Load()
        kv_capacity, prefix_hits, counts, counted_at = None, None, None, None
        if self._poller is not None:
            estimate = self._poller.estimate
            load, foreign = estimate.load(len(self._calls), now), estimate.foreign(now)
            if estimate.snapshot is not None:
                kv_capacity, prefix_hits = estimate.snapshot.kv_capacity, int(estimate.snapshot.prefix_hits)
                counts, counted_at = estimate.counts, estimate.read_at
        return WorkerView(
            worker=self._name,
            group=self._settings.group,
            isolation=self._settings.pool,
            models=self._models,
            phase=self._phase,
            capacity=self._capacity(now, kv_capacity),
            load=load,
            foreign=foreign,
            kv_capacity=kv_capacity,
            observed_at=now,
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

    def _capacity(self, now: float, kv_capacity: int | None) -> Capacity:
        capacity = self._settings.capacity
        if capacity.kv_tokens is None and kv_capacity is not None:
            capacity = replace(capacity, kv_tokens=kv_capacity)
        allowed = None if self._rate_limiter is None else self._rate_limiter.capacity(now)
        if allowed is None or (capacity.sequences is not None and capacity.sequences <= allowed):
            return capacity
        return replace(capacity, sequences=allowed)

    def engine_facts(self) -> EngineFacts:
        """What is known of the engine's settings."""
        capacity, view = self._settings.capacity, self.view()
        estimate = None if self._poller is None else self._poller.estimate
        is_probed = self._is_started
        return EngineFacts(
            worker=self._name,
            kind=self._profile.kind,
            max_sequences=capacity.sequences,
            prefill_tokens=capacity.prefill_tokens,
            kv_tokens=capacity.kv_tokens,
            chunk_tokens=view.chunk_tokens,
            engine_sequences=None if estimate is None else estimate.engine_sequences,
            kv_capacity=view.kv_capacity,
            preempts=estimate is not None and estimate.preemptions > 0,
            has_metrics=self._poller is not None if is_probed and self._settings.profile.metrics is not None else None,
            supports_priority=bool(self._priorities) if is_probed and self._settings.wants_priorities else None,
            reports_cached=self._reports_cached,
        )

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect once to learn what the server serves, how long its contexts are, and what it can do."""
        settings = self._settings
        listed = await self._server.models()
        names = settings.models or tuple(listed)
        missing = [name for name in names if name not in listed]
        if missing:
            log.warning("worker %s does not list %s", self._name, ", ".join(missing))
        await self._detect_capabilities(names[0] if names else None)
        unlisted = ServedModel(id="")
        self._contexts = {name: listed.get(name, unlisted).max_model_len for name in names}
        self._cards = tuple(
            ModelCard(
                name=name,
                context_tokens=self._contexts[name],
                can_resume=self._profile.can_resume,
                features=self._profile.features,
                created=listed.get(name, unlisted).created,
            )
            for name in names
        )
        self._models = frozenset(names)
        self._is_started = True
        self._log_advice()
        if not self._profile.is_hosted:  # a hosted API is asked nothing that no call needs
            self._monitor.start_probing(self._poller, settings.liveness_interval_s)

    async def _detect_capabilities(self, model: str | None) -> None:
        """Narrow the profile to what the server shows."""
        profile, asks = self._settings.profile, self._settings.wants_priorities
        capabilities = await self._server.capabilities(model, wants_priorities=asks)
        self._profile = profile = restrict_profile(profile, capabilities)
        self._priorities = PRIORITIES if asks and profile.supports_priority and model is not None else {}
        if asks and self._settings.profile.supports_priority:
            log.info("worker %s %s", self._name, "orders by lane" if self._priorities else "does not order by lane")
        if profile.metrics is None:
            await self._stop_watching()
        elif self._poller is None:
            self._poller = MetricsPoller(
                self._monitor.metrics_page, profile.metrics, self, self.clock, self._log_advice
            )
            await self._poller.poll()

    def _log_advice(self) -> None:
        """Say once what stands in the way of a promise."""
        if self._is_started:
            for message in advice(self.engine_facts(), self._lanes):
                if message not in self._logged_advice:
                    self._logged_advice.add(message)
                    log.warning("%s", message)

    # -- plans -------------------------------------------------------------------------------------------------------

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        completion = PlanCompletion(len(plan.jobs))
        calls = [self._call(job, emit, completion) for job in plan.jobs]
        # Known from here on, so that a cancel finds them before anything is sent.
        for call in calls:
            self._calls[call.job.job_id] = call
        self._arm_timeout_timer()
        self._monitor.on_calls()
        try:
            for call in calls:
                self.send(call)
            await completion.finished
        finally:
            for call in calls:
                if call.end is None:
                    call.abandon()
                    self._remove_call(call)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """End these jobs at once; return those that the engine is known to have let go of.

        Where requests can be aborted by id, the proof is the stream's own end. Else the connection is closed, and the
        proof is that the engine does no more than the calls that are left.
        """
        freed: set[str] = set()
        listeners: dict[str, tuple[str, StreamEndListener]] = {}
        closed: list[str] = []
        found = [call for job_id in job_ids if (call := self._calls.get(job_id)) is not None]
        for number, call in enumerate(found, 1):
            if number % CANCELS_PER_YIELD == 0:
                await asyncio.sleep(0)  # others have their turn: thousands may leave together
            if call.end is not None:
                continue
            job_id = call.job.job_id
            if call.connection is None:
                freed.add(job_id)  # nothing of it was sent
            elif self._profile.abort_path is None:
                closed.append(job_id)
            else:
                connection = call.detach_connection()
                assert connection is not None
                listener = StreamEndListener(connection)
                connection.transfer(listener)
                listeners[job_id] = (engine_id(call.job), listener)
            call.fail(ClientClosed("cancelled"))
        if listeners:
            aborted = await abort_and_confirm(self._monitor.abort, listeners)
            freed |= aborted
            closed += listeners.keys() - aborted
        if closed and self._poller is not None and await confirm_gone(self._poller, self._calls, self.clock):
            freed.update(closed)
            closed = []
        self.cancelled_confirmed += len(freed)
        self.cancelled_unconfirmed += len(closed)
        return frozenset(freed)

    async def close(self) -> None:
        for call in list(self._calls.values()):
            call.fail(WorkerLost(f"worker {self._name} was closed"))
        for task in self._connecting:
            task.cancel()
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
        await self._monitor.close()
        await self._stop_watching()
        self._http.close()
        self._monitor_http.close()

    async def _stop_watching(self) -> None:
        poller, self._poller = self._poller, None
        if poller is not None:
            await poller.close()

    def on_response(self) -> None:
        """The server has said something that is no token."""
        self._monitor.on_response()

    def _on_unresponsive(self) -> None:
        """Nothing is heard of the server. Calls that another worker can take over are lost; others wait on: they may
        go on when it thaws.
        """
        log.warning("worker %s is silent: it was asked and nothing came back", self._name)
        for call in list(self._calls.values()):
            if call.connection is None:
                call.fail(WorkerUnreachable(f"worker {self._name} is silent"))  # it never began
            elif call.can_fail_over:
                call.connection_lost(WorkerLost(f"worker {self._name} is silent"))

    # -- one call ----------------------------------------------------------------------------------------------------

    def _call(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> Call:
        if job.resume_point is not None:
            return ContinuationCall(job, emit, completion, self)
        if job.payload.non_streaming:
            return NonStreamingCall(job, emit, completion, self)
        trace_tokens = job.resume is ResumeMode.CONTINUE and self._profile.can_resume
        return Call(job, emit, completion, self, trace_tokens=trace_tokens)

    def send(self, call: Call) -> None:
        """Send the call on a connection that is free, at once, or on a new one."""
        if call.end is not None:
            return
        if self._monitor.is_unresponsive:
            call.fail(WorkerUnreachable(f"worker {self._name} is silent"))
            return
        if isinstance(call, ContinuationCall):
            if not self._profile.can_resume:
                call.fail(NoWorker(f"worker {self._name} cannot go on from token ids"))
                return
            if self._resume_points is not None and not call.starts_at_character:
                self._start(self._resume_at_character(call, self._resume_points))
                return
            if call.stops is None and call.job.payload.sampling.stop:
                call.fail(NoWorker(f"worker {self._name} cannot tell what was held back for stop strings"))
                return
            if self._remaining_tokens(call.job) < 1:
                call.finish_immediately()
                return
        if self._rate_limiter is not None and call.key is None and not self._acquire_key(call, self._rate_limiter):
            return
        connection = self._http.free()
        if connection is not None:
            call.start(connection, self._request(call))
        else:
            self._start(self._connect(call))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _resume_at_character(self, call: ContinuationCall, resume_points: ResumePoints) -> None:
        resume_point = call.job.resume_point
        assert resume_point is not None
        model, stops = call.job.route.model, None
        written = await resume_points.complete_characters(model, resume_point.output_ids)
        if call.job.payload.sampling.stop:
            chars = max(map(len, call.job.payload.sampling.stop)) + COMPARED_CHARS
            text = await resume_points.text_tail(
                model, resume_point.prompt_ids, resume_point.output_ids[:written], chars
            )
            stops = None if text is None else resume_stop_matcher(call.job, resume_point, text)
        call.resume_after(written, stops)
        self.send(call)

    def _acquire_key(self, call: Call, rate_limiter: KeyRateLimiters) -> bool:
        now = self.clock.now()
        call.key = rate_limiter.choose(now)
        if call.key is None:
            wait_s = rate_limiter.retry_after_s(now)
            call.fail(NoWorker(f"worker {self._name} may not be called for now", retry_after_s=wait_s))
            return False
        call.key_responded = False
        rate_limiter.keys[call.key].sent(call.job.footprint.peak_kv_tokens)
        return True

    def _release_key(self, call: Call) -> None:
        if self._rate_limiter is not None and call.key is not None:
            key = self._rate_limiter.keys[call.key]
            if not call.key_responded:
                key.on_response(RateLimits(), call.job.footprint.peak_kv_tokens, self.clock.now())
            key.ended()
            call.key = None

    def on_response_head(self, call: Call, status: int, rate_limit_headers: dict[bytes, bytes]) -> None:
        """The head of an answer to a call that was sent with one of several keys."""
        if self._rate_limiter is not None and call.key is not None and not call.key_responded:
            call.key_responded = True
            key = self._rate_limiter.keys[call.key]
            key.on_response(
                parse_rate_limits(rate_limit_headers, self.clock.wall()),
                call.job.footprint.peak_kv_tokens,
                self.clock.now(),
            )
            if status == 200:
                key.accepted()

    def refused(
        self, call: Call, status: int, body: bytes, rate_limit_headers: dict[bytes, bytes]
    ) -> GatewayError | None:
        retry_after_s = None
        if status in (429, 503):
            retry_after = parse_rate_limits(rate_limit_headers, self.clock.wall())
            retry_after_s = retry_after.retry_after_s
            if self._rate_limiter is not None and call.key is not None:
                now = self.clock.now()
                self._rate_limiter.keys[call.key].refused(retry_after, now)
                self._release_key(call)
                call.keys_tried += 1
                if call.keys_tried < len(self._keys) and self._rate_limiter.choose(now) is not None:
                    call.reset()
                    self.send(call)
                    return None
                retry_after_s = self._rate_limiter.retry_after_s(now)
        return upstream_error(self._name, status, body, retry_after_s=retry_after_s, secrets=self._secrets)

    def shape_of(self, api: str) -> dict[str, Any] | None:
        return self._server.shapes.of(api)

    def ended(self, call: Call, end: Done | Failed) -> None:
        """The call's end, which comes once."""
        self._remove_call(call)
        if isinstance(end, Done) and call.reports_cached is not None:
            self._reports_cached = call.reports_cached

    def _remove_call(self, call: Call) -> None:
        if self._calls.pop(call.job.job_id, None) is not None:
            self.ended_calls += 1
            self._monitor.ended(call)
        self._release_key(call)

    async def _connect(self, call: Call) -> None:
        try:
            connection = await self._http.connect()
        except (OSError, TimeoutError) as error:
            self._monitor.on_unreachable()
            call.fail(WorkerUnreachable(f"worker {self._name} cannot be reached: {type(error).__name__}"))
            return
        if call.end is None:
            call.start(connection, self._request(call))
        else:
            connection.close()  # given up while connecting

    def _request(self, call: Call) -> Request:
        job = call.job
        payload = job.payload
        headers = b"x-request-id: %b\r\n%b" % (request_id(job).encode(), self._keys[call.key or 0])
        more = self._priorities.get(job.lane, b"")
        if self._salts is not None and job.salted:
            more = self._salts.field(job.tenant) + more
        if job.resume_point is not None:
            body = resumed_body(job, job.resume_point, self._remaining_tokens(job), more)
            return self._http.request(b"POST", PATHS["completions"], headers, body)
        profile = self._profile
        if payload.non_streaming:
            whole = non_streaming_body(
                payload.body, more, drop=profile.unsupported_fields, output_cap=payload.output_cap
            )
            return self._http.request(b"POST", PATHS[payload.api], headers, *whole)
        if job.resume is ResumeMode.CONTINUE and profile.can_resume:
            more += RETURN_TOKEN_IDS
        return self._http.request(
            b"POST",
            PATHS[payload.api],
            headers,
            *streaming_body(
                payload.body,
                payload.stream_fields,
                job.stream,
                more,
                drop=profile.unsupported_fields,
                with_usage=profile.usage_in_stream,
                output_cap=payload.output_cap,
            ),
        )

    def _remaining_tokens(self, job: InferenceJob) -> int:
        assert job.resume_point is not None
        return remaining_tokens(job, job.resume_point, self._contexts.get(job.route.model))

    def _arm_timeout_timer(self) -> None:
        # One timer for all calls: moving one for every chunk of each would cost more than reading the chunk.
        if self._timeout_timer is None:
            interval_s = min(self._settings.first_token_timeout_s, self._settings.inter_token_timeout_s)
            self._timeout_timer = asyncio.get_running_loop().call_later(
                min(1.0, interval_s / 4), self._fail_timed_out_calls
            )

    def _fail_timed_out_calls(self) -> None:
        self._timeout_timer = None
        now = self.clock.now()
        first_token_s, itl_s = self._settings.first_token_timeout_s, self._settings.inter_token_timeout_s
        for call in list(self._calls.values()):
            limit_s = min(itl_s, first_token_s) if call.has_tokens else first_token_s
            if call.last_activity_at < now - limit_s:
                call.connection_lost(WorkerTimeout(f"worker {self._name} said nothing for {limit_s:g} s"))
        if self._calls:
            self._arm_timeout_timer()
