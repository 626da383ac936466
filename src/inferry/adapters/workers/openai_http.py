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

from inferry.adapters.workers.abilities import PATHS, ServedModel, ServerQuestions
from inferry.adapters.workers.advice import Facts, advice
from inferry.adapters.workers.bodies import (
    PRIORITIES,
    RETURN_IDS,
    Salts,
    continued_body,
    engine_id,
    request_id,
    streaming_body,
    tokens_left,
    whole_body,
)
from inferry.adapters.workers.calls import Call, ContinuedCall, Flight, LastWords
from inferry.adapters.workers.cancelling import abort_and_listen, is_gone
from inferry.adapters.workers.engine_watch import EngineWatch
from inferry.adapters.workers.hosted import Limits, Pacer, read_limits
from inferry.adapters.workers.http1 import Client, Request
from inferry.adapters.workers.profiles import Profile, narrowed
from inferry.adapters.workers.questions import Questions
from inferry.adapters.workers.refusals import refusal
from inferry.adapters.workers.seams import Seams
from inferry.adapters.workers.server_life import ServerLife
from inferry.adapters.workers.stops import VERIFIED_CHARS, seam
from inferry.adapters.workers.values import EngineSteps, HttpWorkerSettings
from inferry.adapters.workers.whole_calls import WholeCall
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    NoWorker,
    WorkerLost,
    WorkerTimeout,
    WorkerUnreachable,
)
from inferry.domain.jobs import InferenceJob, Resume
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Done, Failed
from inferry.domain.values import replace
from inferry.domain.workers import Load, Phase, Room, WorkerView

log = logging.getLogger(__name__)

CANCELLED_AT_ONCE = 50
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
        self._looks = Client(settings.url, headers, settings.connect_timeout_s)
        self._server = ServerQuestions(
            self._profile, Questions(self._http), Questions(self._looks), self._keys[0], settings.silence_timeout_s
        )
        path = self._profile.detokenize_path
        self._seams = None if path is None else Seams(Questions(self._looks), path, self._keys[0])
        self._salts: Salts | None = None
        if settings.salts and self._profile.salts:
            secret = settings.salt_secret
            self._salts = Salts(os.urandom(32) if secret is None else secret.encode())
        self._is_started = False
        self._priorities: dict[Lane, bytes] = {}
        self._pacer = Pacer(len(self._keys)) if self._profile.is_hosted else None
        self._engine: EngineWatch | None = None
        self._calls: dict[str, Call] = {}
        self._life = ServerLife(self._server, self._calls, clock, settings.liveness_timeout_s, self._fell_silent)
        self._connecting: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._reports_cached: bool | None = None
        self._advised: set[str] = set()
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
        return EngineSteps() if self._engine is None else self._engine.beliefs.steps

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def cards(self) -> Sequence[ModelCard]:
        return self._cards

    def view(self) -> WorkerView:
        now = self.clock.now()
        load, foreign = Load(running=len(self._calls)), Load()
        kv_capacity, prefix_hits, counts, counted_at = None, None, None, None
        if self._engine is not None:
            beliefs = self._engine.beliefs
            load, foreign = beliefs.load(len(self._calls), now), beliefs.foreign(now)
            if beliefs.reading is not None:
                kv_capacity, prefix_hits = beliefs.reading.kv_capacity, int(beliefs.reading.prefix_hits)
                counts, counted_at = beliefs.counts, beliefs.read_at
        return WorkerView(
            worker=self._name,
            group=self._settings.group,
            isolation=self._settings.pool,
            models=self._models,
            phase=self._phase,
            room=self._room(now, kv_capacity),
            load=load,
            foreign=foreign,
            kv_capacity=kv_capacity,
            observed_at=now,
            chunk_tokens=self._settings.chunk_tokens,
            controlled=self._settings.controlled,
            prefix_hits=prefix_hits,
            counts=counts,
            counted_at=counted_at,
            heard_at=self._life.heard_at,
        )

    @property
    def _phase(self) -> Phase:
        if not self._is_started:
            return Phase.STARTING
        return Phase.DOWN if self._life.is_silent else Phase.READY

    def _room(self, now: float, kv_capacity: int | None) -> Room:
        room = self._settings.room
        if room.kv_tokens is None and kv_capacity is not None:
            room = replace(room, kv_tokens=kv_capacity)
        allowed = None if self._pacer is None else self._pacer.room(now)
        if allowed is None or (room.sequences is not None and room.sequences <= allowed):
            return room
        return replace(room, sequences=allowed)

    def facts(self) -> Facts:
        """What is known of the engine's settings."""
        room, view = self._settings.room, self.view()
        beliefs = None if self._engine is None else self._engine.beliefs
        asked = self._is_started
        return Facts(
            worker=self._name,
            kind=self._profile.kind,
            max_sequences=room.sequences,
            prefill_tokens=room.prefill_tokens,
            kv_tokens=room.kv_tokens,
            chunk_tokens=view.chunk_tokens,
            engine_sequences=None if beliefs is None else beliefs.engine_sequences,
            kv_capacity=view.kv_capacity,
            preempts=beliefs is not None and beliefs.preemptions > 0,
            has_metrics=self._engine is not None if asked and self._settings.profile.metrics is not None else None,
            orders=bool(self._priorities) if asked and self._settings.asks_for_priorities else None,
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
        await self._learn_abilities(names[0] if names else None)
        nothing = ServedModel(id="")
        self._contexts = {name: listed.get(name, nothing).max_model_len for name in names}
        self._cards = tuple(
            ModelCard(
                name=name,
                context_tokens=self._contexts[name],
                continues=self._profile.continues,
                features=self._profile.features,
                created=listed.get(name, nothing).created,
            )
            for name in names
        )
        self._models = frozenset(names)
        self._is_started = True
        self._advise()
        if not self._profile.is_hosted:  # a hosted API is asked nothing that no call needs
            self._life.watch(self._engine, settings.liveness_interval_s)

    async def _learn_abilities(self, model: str | None) -> None:
        """Narrow the profile to what the server shows."""
        profile, asks = self._settings.profile, self._settings.asks_for_priorities
        shown = await self._server.shown(model, asks_for_priorities=asks)
        self._profile = profile = narrowed(profile, shown)
        self._priorities = PRIORITIES if asks and profile.orders and model is not None else {}
        if asks and self._settings.profile.orders:
            log.info("worker %s %s", self._name, "orders by lane" if self._priorities else "does not order by lane")
        if profile.metrics is None:
            await self._stop_watching()
        elif self._engine is None:
            self._engine = EngineWatch(self._life.metrics_page, profile.metrics, self, self.clock, self._advise)
            await self._engine.look()

    def _advise(self) -> None:
        """Say once what stands in the way of a promise."""
        if self._is_started:
            for sentence in advice(self.facts(), self._lanes):
                if sentence not in self._advised:
                    self._advised.add(sentence)
                    log.warning("%s", sentence)

    # -- plans -------------------------------------------------------------------------------------------------------

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        flight = Flight(len(plan.jobs))
        calls = [self._call(job, emit, flight) for job in plan.jobs]
        # Known from here on, so that a cancel finds them before anything is sent.
        for call in calls:
            self._calls[call.job.job_id] = call
        self._watch_for_silence()
        self._life.work_came()
        try:
            for call in calls:
                self.send(call)
            await flight.over
        finally:
            for call in calls:
                if call.end is None:
                    call.give_up()
                    self._forget(call)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """End these jobs at once; return those that the engine is known to have let go of.

        Where requests can be aborted by id, the proof is the stream's own end. Else the connection is closed, and the
        proof is that the engine does no more than the calls that are left.
        """
        freed: set[str] = set()
        listening: dict[str, tuple[str, LastWords]] = {}
        closed: list[str] = []
        found = [call for job_id in job_ids if (call := self._calls.get(job_id)) is not None]
        for number, call in enumerate(found, 1):
            if number % CANCELLED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn: thousands may leave together
            if call.end is not None:
                continue
            job_id = call.job.job_id
            if call.connection is None:
                freed.add(job_id)  # nothing of it was sent
            elif self._profile.abort_path is None:
                closed.append(job_id)
            else:
                connection = call.part()
                assert connection is not None
                words = LastWords(connection)
                connection.hand_over(words)
                listening[job_id] = (engine_id(call.job), words)
            call.fail(ClientClosed("cancelled"))
        if listening:
            aborted = await abort_and_listen(self._life.abort, listening)
            freed |= aborted
            closed += listening.keys() - aborted
        if closed and self._engine is not None and await is_gone(self._engine, self._calls, self.clock):
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
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        await self._life.close()
        await self._stop_watching()
        self._http.close()
        self._looks.close()

    async def _stop_watching(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def heard(self) -> None:
        """The server has said something that is no token."""
        self._life.heard()

    def _fell_silent(self) -> None:
        """Nothing is heard of the server. Calls that another worker can take over are lost; others wait on: they may
        go on when it thaws.
        """
        log.warning("worker %s is silent: it was asked and nothing came back", self._name)
        for call in list(self._calls.values()):
            if call.connection is None:
                call.fail(WorkerUnreachable(f"worker {self._name} is silent"))  # it never began
            elif call.can_move:
                call.break_off(WorkerLost(f"worker {self._name} is silent"))

    # -- one call ----------------------------------------------------------------------------------------------------

    def _call(self, job: InferenceJob, emit: Emit, flight: Flight) -> Call:
        if job.so_far is not None:
            return ContinuedCall(job, emit, flight, self)
        if job.payload.whole:
            return WholeCall(job, emit, flight, self)
        follows = job.resume is Resume.CONTINUE and self._profile.continues
        return Call(job, emit, flight, self, follows=follows)

    def send(self, call: Call) -> None:
        """Send the call on a connection that is free, at once, or on a new one."""
        if call.end is not None:
            return
        if self._life.is_silent:
            call.fail(WorkerUnreachable(f"worker {self._name} is silent"))
            return
        if isinstance(call, ContinuedCall):
            if not self._profile.continues:
                call.fail(NoWorker(f"worker {self._name} cannot go on from token ids"))
                return
            if self._seams is not None and not call.begins_whole:
                self._start(self._send_from_a_whole_character(call, self._seams))
                return
            if call.stops is None and call.job.payload.sampling.stop:
                call.fail(NoWorker(f"worker {self._name} cannot tell what was held back for stop strings"))
                return
            if self._left(call.job) < 1:
                call.finish_at_once()
                return
        if self._pacer is not None and call.key is None and not self._take_a_key(call, self._pacer):
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

    async def _send_from_a_whole_character(self, call: ContinuedCall, seams: Seams) -> None:
        so_far = call.job.so_far
        assert so_far is not None
        model, stops = call.job.route.model, None
        written = await seams.whole_characters(model, so_far.output_ids)
        if call.job.payload.sampling.stop:
            chars = max(map(len, call.job.payload.sampling.stop)) + VERIFIED_CHARS
            text = await seams.end_of_text(model, so_far.prompt_ids, so_far.output_ids[:written], chars)
            stops = None if text is None else seam(call.job, so_far, text)
        call.begin_after(written, stops)
        self.send(call)

    def _take_a_key(self, call: Call, pacer: Pacer) -> bool:
        now = self.clock.now()
        call.key = pacer.choose(now)
        if call.key is None:
            wait_s = pacer.retry_after_s(now)
            call.fail(NoWorker(f"worker {self._name} may not be called for now", retry_after_s=wait_s))
            return False
        call.key_heard = False
        pacer.keys[call.key].sent(call.job.footprint.peak_kv_tokens)
        return True

    def _give_back_key(self, call: Call) -> None:
        if self._pacer is not None and call.key is not None:
            key = self._pacer.keys[call.key]
            if not call.key_heard:
                key.heard(Limits(), call.job.footprint.peak_kv_tokens, self.clock.now())
            key.ended()
            call.key = None

    def answered(self, call: Call, status: int, limits: dict[bytes, bytes]) -> None:
        """The head of an answer to a call that was sent with one of several keys."""
        if self._pacer is not None and call.key is not None and not call.key_heard:
            call.key_heard = True
            key = self._pacer.keys[call.key]
            key.heard(read_limits(limits, self.clock.wall()), call.job.footprint.peak_kv_tokens, self.clock.now())
            if status == 200:
                key.accepted()

    def refused(self, call: Call, status: int, body: bytes, limits: dict[bytes, bytes]) -> GatewayError | None:
        retry_after_s = None
        if status in (429, 503):
            said = read_limits(limits, self.clock.wall())
            retry_after_s = said.retry_after_s
            if self._pacer is not None and call.key is not None:
                now = self.clock.now()
                self._pacer.keys[call.key].refused(said, now)
                self._give_back_key(call)
                call.keys_tried += 1
                if call.keys_tried < len(self._keys) and self._pacer.choose(now) is not None:
                    call.again()
                    self.send(call)
                    return None
                retry_after_s = self._pacer.retry_after_s(now)
        return refusal(self._name, status, body, retry_after_s=retry_after_s, secrets=self._secrets)

    def shape_of(self, api: str) -> dict[str, Any] | None:
        return self._server.shapes.of(api)

    def ended(self, call: Call, end: Done | Failed) -> None:
        """The call's end, which comes once."""
        self._forget(call)
        if isinstance(end, Done) and call.reports_cached is not None:
            self._reports_cached = call.reports_cached

    def _forget(self, call: Call) -> None:
        if self._calls.pop(call.job.job_id, None) is not None:
            self.ended_calls += 1
            self._life.ended(call)
        self._give_back_key(call)

    async def _connect(self, call: Call) -> None:
        try:
            connection = await self._http.connect()
        except (OSError, TimeoutError) as error:
            self._life.unreachable()
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
        if job.so_far is not None:
            body = continued_body(job, job.so_far, self._left(job), more)
            return self._http.request(b"POST", PATHS["completions"], headers, body)
        profile = self._profile
        if payload.whole:
            whole = whole_body(payload.body, more, drop=profile.refuses, output_cap=payload.output_cap)
            return self._http.request(b"POST", PATHS[payload.api], headers, *whole)
        if job.resume is Resume.CONTINUE and profile.continues:
            more += RETURN_IDS
        return self._http.request(
            b"POST",
            PATHS[payload.api],
            headers,
            *streaming_body(
                payload.body,
                payload.stream_fields,
                job.stream,
                more,
                drop=profile.refuses,
                with_usage=profile.usage_in_stream,
                output_cap=payload.output_cap,
            ),
        )

    def _left(self, job: InferenceJob) -> int:
        assert job.so_far is not None
        return tokens_left(job, job.so_far, self._contexts.get(job.route.model))

    def _watch_for_silence(self) -> None:
        # One timer for all calls: moving one for every chunk of each would cost more than reading the chunk.
        if self._watch is None:
            shortest_s = min(self._settings.silence_timeout_s, self._settings.gap_timeout_s)
            self._watch = asyncio.get_running_loop().call_later(min(1.0, shortest_s / 4), self._end_silent_calls)

    def _end_silent_calls(self) -> None:
        self._watch = None
        now = self.clock.now()
        silence_s, gap_s = self._settings.silence_timeout_s, self._settings.gap_timeout_s
        for call in list(self._calls.values()):
            limit_s = min(gap_s, silence_s) if call.has_tokens else silence_s
            if call.heard_at < now - limit_s:
                call.break_off(WorkerTimeout(f"worker {self._name} said nothing for {limit_s:g} s"))
        if self._calls:
            self._watch_for_silence()
