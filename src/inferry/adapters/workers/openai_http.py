"""A worker behind HTTP: vLLM, or anything else that speaks the OpenAI API.

Calls are always streamed upstream. The events pass through as bytes; each is looked at only as closely as it takes to
tell a token from an end. Closing the upstream connection is how a job is cancelled.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw, Struct

from inferry.adapters.workers.http1 import Client, Connection, Request
from inferry.adapters.workers.sse import EventScanner
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    WorkerLost,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob, Lane
from inferry.domain.plans import BatchPlan, Load, Phase, Room, WorkerView
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, Failed, Item, Usage

log = logging.getLogger(__name__)

PATHS = {"chat": b"/v1/chat/completions", "completions": b"/v1/completions"}
FEATURES = frozenset(
    {"n", "logit_bias", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools", "audio"}
    | {"echo", "suffix"}
)
FAILURES_UNTIL_DOWN = 3
LONGEST_EVENT = 16 * 1024 * 1024
LONGEST_REFUSAL = 65_536
SLACK_TOKENS = 64
"""Beyond what was asked for, plus an eighth: events are not quite tokens."""
SLACK_EVENTS = 10_000
"""Events that say nothing, such as an engine's heartbeats, on top of those that do."""

PRIORITIES = {Lane.P0: b',"priority":-1', Lane.P1: b',"priority":0', Lane.P2: b',"priority":1'}
"""Lower goes first. Sent with every call, so that no client chooses its own."""

_STREAM = b',"stream":true,"stream_options":{"include_usage":true}}'
_USAGE = b',"stream_options":{"include_usage":true}}'

_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class HttpWorkerSettings(Struct, frozen=True, kw_only=True):
    url: str
    models: tuple[str, ...] = ()
    group: str = "default"
    api_key: str | None = None
    room: Room = Room(sequences=256)
    asks_for_priorities: bool = False
    controlled: bool = False
    chunk_tokens: int | None = None
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 120.0


class _Upstream(Struct):
    """One entry of the upstream's /v1/models."""

    id: str
    max_model_len: int | None = None
    created: int = 0


class _ModelList(Struct):
    data: list[_Upstream]


class _UpstreamError(Struct, frozen=True):
    message: str = ""
    param: str | None = None


class _ErrorBody(Struct):
    error: _UpstreamError | str = _UpstreamError()
    message: str = ""


class OpenAIHttpWorker:
    """One OpenAI-compatible server. Belongs to the event loop it is started on."""

    def __init__(self, name: str, settings: HttpWorkerSettings, clock: Clock) -> None:
        self._name = name
        self._settings = settings
        self.clock = clock
        self._cards = tuple(ModelCard(name=model, features=FEATURES) for model in settings.models)
        self._models = frozenset(settings.models)
        headers = {"content-type": "application/json"}
        if settings.api_key:
            headers["authorization"] = f"Bearer {settings.api_key}"
        self._http = Client(settings.url, headers, settings.connect_timeout_s)
        self._is_started = False
        self._priorities: dict[Lane, bytes] = {}
        self._calls: dict[str, _Call] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._failures = 0

    @property
    def name(self) -> str:
        return self._name

    def cards(self) -> Sequence[ModelCard]:
        return self._cards

    def view(self) -> WorkerView:
        down = self._failures >= FAILURES_UNTIL_DOWN
        return WorkerView(
            worker=self._name,
            group=self._settings.group,
            models=self._models,
            phase=Phase.DOWN if down else Phase.READY if self._is_started else Phase.STARTING,
            room=self._settings.room,
            load=Load(running=len(self._calls)),
            observed_at=self.clock.now(),
            chunk_tokens=self._settings.chunk_tokens,
            controlled=self._settings.controlled,
        )

    async def start(self) -> None:
        """Connect once to learn what the server serves and how long its contexts are."""
        status, body = await self._get(b"/v1/models")
        if status != 200:
            raise WorkerLost(f"GET /v1/models answered {status}")
        try:
            listed = {one.id: one for one in msgspec.json.decode(body, type=_ModelList).data}
        except msgspec.MsgspecError:
            raise WorkerLost("GET /v1/models answered something that is not a list of models") from None
        names = self._settings.models or tuple(listed)
        missing = [name for name in names if name not in listed]
        if missing:
            log.warning("worker %s does not list %s", self._name, ", ".join(missing))
        nothing = _Upstream(id="")
        self._cards = tuple(
            ModelCard(
                name=name,
                context_tokens=listed.get(name, nothing).max_model_len,
                features=FEATURES,
                created=listed.get(name, nothing).created,
            )
            for name in names
        )
        self._models = frozenset(names)
        if self._settings.asks_for_priorities and names:
            self._priorities = PRIORITIES if await self._takes_priorities(names[0]) else {}
            log.info("worker %s %s", self._name, "orders by lane" if self._priorities else "does not order by lane")
        self._is_started = True

    async def _takes_priorities(self, model: str) -> bool:
        """Whether the server's own queue can be ordered. One that cannot refuses any priority but the usual."""
        body = msgspec.json.encode({"model": model, "prompt": "ping", "max_tokens": 1, "priority": 1})
        try:
            status, _ = await self._ask(self._http.request(b"POST", PATHS["completions"], b"", body))
        except WorkerLost:
            return False
        return status == 200

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        flight = _Flight(len(plan.jobs))
        calls = [_Call(job, emit, flight, self) for job in plan.jobs]
        # Known from here on, so that a cancel finds them before anything is sent.
        for call in calls:
            self._calls[call.job.job_id] = call
        self._watch_for_silence()
        try:
            for call in calls:
                self.send(call)
            await flight.over
        finally:
            for call in calls:
                if call.end is None:
                    call.give_up()
                    self._calls.pop(call.job.job_id, None)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Close the upstream connections of these jobs; the server frees them when it notices."""
        found = [call for job_id in job_ids if (call := self._calls.get(job_id)) is not None]
        for call in found:
            call.fail(ClientClosed("cancelled"))
        return frozenset(call.job.job_id for call in found)

    async def close(self) -> None:
        await self.cancel(list(self._calls))
        for task in self._connecting:
            task.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._http.close()

    # -- one call ----------------------------------------------------------------------------------------------------

    def send(self, call: "_Call") -> None:
        """Send the call on a connection that is free, at once, or on a new one."""
        connection = self._http.free()
        if connection is not None:
            call.start(connection, self._request(call.job))
        elif call.end is None:
            task = asyncio.get_running_loop().create_task(self._connect(call))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def ended(self, call: "_Call", end: Done | Failed) -> None:
        """The call's end, which comes once."""
        self._calls.pop(call.job.job_id, None)
        # Several losses in a row, with nothing good in between, are the server's fault and not a job's.
        if isinstance(end, Done):
            self._failures = 0
        elif isinstance(end.error, WorkerLost):
            self._failures += 1

    async def _connect(self, call: "_Call") -> None:
        try:
            connection = await self._http.connect()
        except (OSError, TimeoutError) as error:
            call.fail(WorkerLost(f"worker {self._name} cannot be reached: {type(error).__name__}"))
            return
        if call.end is None:
            call.start(connection, self._request(call.job))
        else:
            connection.close()  # given up while connecting

    def _request(self, job: InferenceJob) -> Request:
        payload = job.payload
        return self._http.request(
            b"POST",
            PATHS[payload.api],
            b"x-request-id: %b\r\n" % job.job_id.encode(),
            *streaming_body(payload.body, payload.stream_fields, job.stream, self._priorities.get(job.lane, b"")),
        )

    async def _get(self, path: bytes) -> tuple[int, bytes]:
        return await self._ask(self._http.request(b"GET", path, b""))

    async def _ask(self, request: Request) -> tuple[int, bytes]:
        answer = _WholeAnswer()
        try:
            connection = self._http.free() or await self._http.connect()
            connection.start(answer, request)
            try:
                async with asyncio.timeout(self._settings.silence_timeout_s):
                    return await answer.complete
            except TimeoutError:
                connection.close()
                raise
        except (OSError, TimeoutError) as error:
            raise WorkerLost(f"cannot reach it: {type(error).__name__}") from None

    def _watch_for_silence(self) -> None:
        # One timer for all calls: moving one for every chunk of each would cost more than reading the chunk.
        if self._watch is None:
            every_s = min(1.0, self._settings.silence_timeout_s / 4)
            self._watch = asyncio.get_running_loop().call_later(every_s, self._end_silent_calls)

    def _end_silent_calls(self) -> None:
        self._watch = None
        silence_s = self._settings.silence_timeout_s
        earliest = self.clock.now() - silence_s
        for call in list(self._calls.values()):
            if call.heard_at < earliest:
                call.fail(WorkerTimeout(f"worker {self._name} said nothing for {silence_s:g} s"))
        if self._calls:
            self._watch_for_silence()


class _Flight:
    """A plan on its way: `over` when every call of it has its end, or when the sink of their items broke."""

    __slots__ = ("_left", "over")

    def __init__(self, calls: int) -> None:
        self._left = calls
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def landed(self) -> None:
        self._left -= 1
        if not self._left and not self.over.done():
            self.over.set_result(None)

    def broke(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class _Call:
    """A job on its way: reads the answer as it comes, until `end` says how it went. All of it in callbacks."""

    __slots__ = (
        "_connection",
        "_emit",
        "_flight",
        "_index",
        "_most_tokens",
        "_now",
        "_pending",
        "_scanner",
        "_status",
        "_worker",
        "end",
        "heard_at",
        "job",
    )

    def __init__(self, job: InferenceJob, emit: Emit, flight: _Flight, worker: OpenAIHttpWorker) -> None:
        self.job = job
        self.end: Done | Failed | None = None
        self._emit = emit
        self._flight = flight
        self._worker = worker
        self._now = worker.clock.now
        self.heard_at = self._now()
        self._scanner = EventScanner()
        self._connection: Connection | None = None
        self._status = 0
        self._pending = b""
        self._index = 0
        limit = job.payload.output_limit
        limit = job.token_budget if limit is None else limit
        self._most_tokens = limit + limit // 8 + SLACK_TOKENS

    def start(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self.heard_at = self._now()
        connection.start(self, request)

    def fail(self, error: GatewayError) -> None:
        """End the job, and only this job; its connection is dropped."""
        if self.end is None:
            self.drop()
            self._finish(Failed(self.job.job_id, error, self._usage()))

    def give_up(self) -> None:
        """Nobody wants the job's end any more."""
        self.drop()
        self.end = Failed(self.job.job_id, ClientClosed("nobody waits for it"))

    def _finish(self, end: Done | Failed) -> None:
        self.end = end
        self._worker.ended(self, end)
        self._tell(end)
        self._flight.landed()

    def _tell(self, item: Item) -> None:
        try:
            self._emit(item)
        except Exception as error:
            # Not the connection's to hear: whoever runs the plan ends what is left of it.
            self._flight.broke(error)

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # What the connection tells.

    def on_head(self, status: int) -> None:
        self._status = status

    def on_body(self, body: bytes) -> None:
        self.heard_at = self._now()
        chunk = self._pending + body if self._pending else body
        if self._status != 200:
            self._pending = chunk[:LONGEST_REFUSAL]
            return
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._pending = chunk
            if len(chunk) > LONGEST_EVENT:
                self.fail(WorkerLost(f"worker {self._worker.name} sent an event without an end"))
            return
        self._pending = chunk[end:]
        raw, tokens = self._scanner.scan(chunk[:end])
        if raw:
            job = self.job
            self._tell(Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), tokens, raw))
            self._index += 1
        scanner = self._scanner
        if scanner.is_done:
            connection = self._connection
            if connection is not None and not connection.is_over:
                # All has been said; whether the server also ends its answer is not for the job to wait for.
                connection.let_go()
                self.on_end()
        elif scanner.tokens > self._most_tokens or scanner.events > 2 * self._most_tokens + SLACK_EVENTS:
            self.fail(WorkerLost(f"worker {self._worker.name} wrote more than it was asked to"))

    def on_end(self) -> None:
        self._connection = None
        scanner = self._scanner
        if self._status != 200:
            self.fail(_refusal(self._worker.name, self._status, self._pending))
        elif scanner.error is not None:
            self.fail(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.finish is None:
            self.fail(WorkerLost(f"worker {self._worker.name} ended the stream before the answer was complete"))
        else:
            self._finish(Done(self.job.job_id, scanner.finish, self._usage(), scanner.usage_event))

    def on_lost(self, why: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.was_used and not self._status:
            # A kept connection that the server closed while the request was on its way: nobody has seen it.
            self._worker.send(self)
            return
        self.fail(WorkerLost(f"worker {self._worker.name} broke off: {why}"))

    def _usage(self) -> Usage:
        return self._scanner.usage or Usage(output_tokens=self._scanner.tokens)


class _WholeAnswer:
    """An answer collected to its end."""

    def __init__(self) -> None:
        self.complete: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []

    def on_head(self, status: int) -> None:
        self._status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_end(self) -> None:
        if not self.complete.done():
            self.complete.set_result((self._status, b"".join(self._parts)))

    def on_lost(self, why: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(ConnectionError(why))


def streaming_body(
    body: bytes, names: tuple[bool, bool] | None, streams: bool, more: bytes = b""
) -> tuple[bytes | memoryview, bytes]:
    """The client's body with streaming and usage switched on, in parts. The prompt is neither decoded nor copied.

    `names` says whether the body has the fields `stream` and `stream_options`, where somebody knows; `streams` whether
    it asks for a stream. `more` are fields of our own, each after a comma: coming last they count, whatever the client
    wrote.
    """
    if names is None:
        # Quotes inside strings are escaped, so without this neither field is there in plain writing. In disguise it
        # may be: what is added comes last, because the last of two equal fields counts.
        names = (True, True) if b'"stream' in body else (False, False)
    if names[1] or names[0] > streams:
        written = _rewritten(body)
        return (written[:-1], more + b"}") if more else (written, b"")
    return memoryview(body)[: body.rindex(b"}")], more + (_USAGE if names[0] else _STREAM)


def _rewritten(body: bytes) -> bytes:
    fields = _fields_decoder.decode(body)
    fields["stream"] = Raw(b"true")
    options: dict[str, Raw] = {}
    given = fields.get("stream_options")
    if given is not None and bytes(given) != b"null":
        options = _fields_decoder.decode(given)
    options["include_usage"] = Raw(b"true")
    fields["stream_options"] = Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


def _refusal(worker: str, status: int, body: bytes) -> GatewayError:
    """What an upstream's status means here. Its words reach the client only where they are about the request."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
        error = found.error if isinstance(found.error, _UpstreamError) else _UpstreamError(message=found.error)
        message, param = error.message or found.message, error.param
    except msgspec.MsgspecError:
        message, param = "", None
    if status == 404:
        return ModelNotFound(f"worker {worker} does not serve this model", param="model")
    if status in (400, 413, 422):
        words = message or f"worker {worker} refused the request ({status})"
        if "context length" in message:
            return ContextLengthExceeded(words, param=param)
        return InvalidRequest(words, param=param)
    if status in (429, 503):
        return NoWorker(f"worker {worker} is full")
    return WorkerLost(f"worker {worker} answered {status}")
