"""A worker behind HTTP: vLLM, or anything else that speaks the OpenAI API.

Calls are always streamed upstream. The events pass through as bytes; each is looked at only as closely as it takes to
tell a token from an end. Closing the upstream connection is how a job is cancelled.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw, Struct

from inferry.adapters.workers.http1 import Client, Connection
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
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import BatchPlan, Load, Phase, Room, WorkerView
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, Failed, Usage

log = logging.getLogger(__name__)

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
FEATURES = frozenset(
    {"n", "logit_bias", "penalties", "min_p", "min_tokens", "structured_outputs", "logprobs", "tools", "audio"}
    | {"echo", "suffix"}
)
FAILURES_UNTIL_DOWN = 3
LONGEST_EVENT = 16 * 1024 * 1024
LONGEST_REFUSAL = 65_536

_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class HttpWorkerSettings(Struct, frozen=True, kw_only=True):
    url: str
    models: tuple[str, ...] = ()
    group: str = "default"
    api_key: str | None = None
    room: Room = Room(sequences=256)
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
        self._clock = clock
        self._cards = tuple(ModelCard(name=model, features=FEATURES) for model in settings.models)
        self._models = frozenset(settings.models)
        headers = {"content-type": "application/json"}
        if settings.api_key:
            headers["authorization"] = f"Bearer {settings.api_key}"
        self._http = Client(settings.url, headers, settings.connect_timeout_s)
        self._is_started = False
        self._calls: dict[str, _Call] = {}
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
            observed_at=self._clock.now(),
        )

    async def start(self) -> None:
        """Connect once to learn what the server serves and how long its contexts are."""
        status, body = await self._get("/v1/models")
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
        self._is_started = True

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        calls = []
        for job in plan.jobs:
            # Known from here on, so that a cancel finds them before their first step.
            call = self._calls[job.job_id] = _Call(job, emit, self._name, self._clock)
            calls.append(call)
        self._watch_for_silence()
        if len(calls) == 1:
            await self._run_call(calls[0])  # most plans, and a task less
            return
        tasks = [asyncio.get_running_loop().create_task(self._run_call(call)) for call in calls]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Close the upstream connections of these jobs; the server frees them when it notices."""
        found = [call for job_id in job_ids if (call := self._calls.get(job_id)) is not None]
        for call in found:
            call.fail(ClientClosed("cancelled"))
        return frozenset(call.job.job_id for call in found)

    async def close(self) -> None:
        await self.cancel(list(self._calls))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._http.close()

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _run_call(self, call: "_Call") -> None:
        """One job to its end, which is emitted whatever happens."""
        payload = call.job.payload
        lines = f"x-request-id: {call.job.job_id}\r\n"
        try:
            while call.end is None:
                try:
                    connection = await self._http.connect()
                except (OSError, TimeoutError) as error:
                    call.fail(WorkerLost(f"worker {self._name} cannot be reached: {type(error).__name__}"))
                    break
                if call.end is not None:  # given up while connecting
                    connection.close()
                    break
                request = self._http.request("POST", PATHS[payload.api], lines, streaming_body(payload.body))
                await call.send(connection, request)
            # Several losses in a row, with nothing good in between, are the server's fault and not a job's.
            if isinstance(call.end, Done):
                self._failures = 0
            elif call.end is not None and isinstance(call.end.error, WorkerLost):
                self._failures += 1
            if call.end is not None:
                call.emit(call.end)
        finally:
            call.drop()
            del self._calls[call.job.job_id]

    async def _get(self, path: str) -> tuple[int, bytes]:
        answer = _WholeAnswer()
        try:
            connection = await self._http.connect()
            connection.start(answer, self._http.request("GET", path, "", b""))
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
        earliest = self._clock.now() - silence_s
        for call in list(self._calls.values()):
            if call.heard_at < earliest:
                call.fail(WorkerTimeout(f"worker {self._name} said nothing for {silence_s:g} s"))
        if self._calls:
            self._watch_for_silence()


class _Call:
    """A job on its way: reads the answer as it comes, until `end` says how it went."""

    def __init__(self, job: InferenceJob, emit: Emit, worker: str, clock: Clock) -> None:
        self.job = job
        self.emit = emit
        self.end: Done | Failed | None = None
        self._worker = worker
        self._now = clock.now
        self.heard_at = self._now()
        self._scanner = EventScanner()
        self._connection: Connection | None = None
        self._turn: asyncio.Future[None] | None = None
        self._status = 0
        self._pending = b""
        self._index = 0

    async def send(self, connection: Connection, request: bytes) -> None:
        """Until the job has its end, or has to be sent again because the connection had died of old age."""
        self._connection = connection
        self._turn = asyncio.get_running_loop().create_future()
        self.heard_at = self._now()
        connection.start(self, request)
        await self._turn

    def fail(self, error: GatewayError) -> None:
        """End the job, and only this job; its connection is dropped."""
        if self.end is None:
            self.end = Failed(self.job.job_id, error, self._usage())
            self.drop()
            self._end_turn()

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
                self.fail(WorkerLost(f"worker {self._worker} sent an event without an end"))
            return
        self._pending = chunk[end:]
        raw, tokens = self._scanner.scan(chunk[:end])
        if raw:
            job = self.job
            self.emit(Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), tokens, raw))
            self._index += 1

    def on_end(self) -> None:
        self._connection = None
        scanner = self._scanner
        if self._status != 200:
            self.fail(_refusal(self._worker, self._status, self._pending))
        elif scanner.error is not None:
            self.fail(WorkerLost(f"worker {self._worker} reported an error in the stream"))
        elif scanner.finish is None:
            self.fail(WorkerLost(f"worker {self._worker} ended the stream before the answer was complete"))
        else:
            self.end = Done(self.job.job_id, scanner.finish, self._usage(), scanner.usage_event)
            self._end_turn()

    def on_lost(self, why: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.was_used and not self._status:
            # A kept connection that the server closed while the request was on its way: nobody has seen it.
            self._end_turn()
            return
        self.fail(WorkerLost(f"worker {self._worker} broke off: {why}"))

    def _usage(self) -> Usage:
        return self._scanner.usage or Usage(output_tokens=self._scanner.tokens)

    def _end_turn(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


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


def streaming_body(body: bytes) -> bytes:
    """The client's body with streaming and usage switched on. The prompt is copied, never decoded."""
    if b'"stream' not in body:  # quotes inside strings are escaped, so neither key is there in plain writing
        # Last, because the last of two equal keys counts, should one be there in disguise.
        return body.rstrip()[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'
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
