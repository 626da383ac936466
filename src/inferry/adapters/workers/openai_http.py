"""A worker behind HTTP: vLLM, or anything else that speaks the OpenAI API.

Calls are always streamed upstream. The events pass through as bytes; each is looked at only as closely as it takes to
tell a token from an end. Closing the upstream connection is how a job is cancelled.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import aiohttp
import msgspec
from msgspec import Raw, Struct

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
        self._http: aiohttp.ClientSession | None = None
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
            phase=Phase.DOWN if down else Phase.READY if self._http is not None else Phase.STARTING,
            room=self._settings.room,
            load=Load(running=len(self._calls)),
            observed_at=self._clock.now(),
        )

    async def start(self) -> None:
        """Connect once to learn what the server serves and how long its contexts are."""
        settings = self._settings
        if self._http is None:
            headers = {"content-type": "application/json"}
            if settings.api_key:
                headers["authorization"] = f"Bearer {settings.api_key}"
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
                # Silence is watched for all calls at once: aiohttp would move a timer for every chunk of each.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
                headers=headers,
                auto_decompress=False,
                read_bufsize=1 << 20,
            )
        try:
            async with self._http.get(settings.url + "/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise WorkerLost(f"GET /v1/models answered {response.status}")
            listed = {one.id: one for one in msgspec.json.decode(body, type=_ModelList).data}
        except msgspec.MsgspecError:
            raise WorkerLost("GET /v1/models answered something that is not a list of models") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerLost(f"cannot reach it: {_why(error)}") from None
        names = settings.models or tuple(listed)
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

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        # Known from here on, so that a cancel finds them before their first step.
        calls = [self._calls.setdefault(job.job_id, _Call(job, self._clock.now())) for job in plan.jobs]
        self._watch_for_silence()
        if len(calls) == 1:
            await self._run_call(calls[0], emit)  # most plans, and a task less
            return
        tasks = [asyncio.get_running_loop().create_task(self._run_call(call, emit)) for call in calls]
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
            call.give_up(ClientClosed("cancelled"))
        if found:
            await asyncio.wait([call.over for call in found])
        return frozenset(call.job.job_id for call in found)

    async def close(self) -> None:
        await self.cancel(list(self._calls))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _run_call(self, call: "_Call", emit: Emit) -> None:
        """One job to its end, which is emitted whatever happens."""
        scanner = EventScanner()
        call.task = asyncio.current_task()
        try:
            if call.reason is not None:
                raise call.reason
            end: Done | Failed = await self._stream(call, scanner, emit)
            self._failures = 0
        except asyncio.CancelledError:
            if call.reason is None:
                raise  # not this job is meant, but whoever runs the plan
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            end = _failed(call.job, scanner, call.reason)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._failures += not scanner.events
            end = _failed(call.job, scanner, WorkerLost(f"worker {self._name} broke off: {_why(error)}"))
        except GatewayError as error:
            end = _failed(call.job, scanner, error)
        finally:
            del self._calls[call.job.job_id]
            call.over.set_result(None)
        emit(end)

    def _watch_for_silence(self) -> None:
        if self._watch is None:
            every_s = min(1.0, self._settings.silence_timeout_s / 4)
            self._watch = asyncio.get_running_loop().call_later(every_s, self._end_silent_calls)

    def _end_silent_calls(self) -> None:
        self._watch = None
        silence_s = self._settings.silence_timeout_s
        earliest = self._clock.now() - silence_s
        for call in self._calls.values():
            if call.heard_at < earliest:
                call.give_up(WorkerTimeout(f"worker {self._name} said nothing for {silence_s:g} s"))
        if self._calls:
            self._watch_for_silence()

    async def _stream(self, call: "_Call", scanner: EventScanner, emit: Emit) -> Done:
        if self._http is None:
            raise NoWorker(f"worker {self._name} is not connected")
        job = call.job
        job_id, run_id, step_id = job.job_id, job.run_id, job.step_id
        index = 0
        url = self._settings.url + PATHS[job.payload.api]
        body = streaming_body(job.payload.body)
        async with self._http.post(url, data=body, headers={"x-request-id": job_id}) as response:
            if response.status != 200:
                raise _refusal(self._name, response.status, await response.content.read(65_536))
            pending = b""
            now = self._clock.now
            async for chunk in response.content.iter_any():
                call.heard_at = now()
                if pending:
                    chunk = pending + chunk
                if b"\r" in chunk:
                    chunk = chunk.replace(b"\r\n", b"\n")
                end = chunk.rfind(b"\n\n") + 2
                if end == 1:
                    if len(chunk) > LONGEST_EVENT:
                        raise WorkerLost(f"worker {self._name} sent an event without an end")
                    pending = chunk
                    continue
                pending = chunk[end:]
                raw, tokens = scanner.scan(chunk[:end])
                if raw:
                    emit(Delta(job_id, run_id, step_id, index, "", (), tokens, raw))
                    index += 1
        if scanner.error is not None:
            raise WorkerLost(f"worker {self._name} reported an error in the stream")
        if scanner.finish is None:
            raise WorkerLost(f"worker {self._name} ended the stream before the answer was complete")
        usage = scanner.usage or Usage(output_tokens=scanner.tokens)
        return Done(job_id, scanner.finish, usage, scanner.usage_event)


class _Call:
    """A job that is on its way: the task that reads its answer, and when it was last heard of."""

    __slots__ = ("heard_at", "job", "over", "reason", "task")

    def __init__(self, job: InferenceJob, now: float) -> None:
        self.job = job
        self.heard_at = now
        self.task: asyncio.Task[None] | None = None
        self.reason: GatewayError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give_up(self, reason: GatewayError) -> None:
        """End this job, and only this job, for `reason`."""
        if self.reason is None:
            self.reason = reason
            if self.task is not None:
                self.task.cancel()


def _failed(job: InferenceJob, scanner: EventScanner, error: GatewayError) -> Failed:
    return Failed(job.job_id, error, scanner.usage or Usage(output_tokens=scanner.tokens))


def streaming_body(body: bytes) -> bytes:
    """The client's body with streaming and usage switched on. The prompt is copied, never decoded."""
    if b'"stream' not in body:  # quotes inside strings are escaped, so neither key is there
        return b'{"stream":true,"stream_options":{"include_usage":true},' + body[body.index(b"{") + 1 :]
    fields = _fields_decoder.decode(body)
    fields["stream"] = Raw(b"true")
    options: dict[str, object] = {}
    given = fields.get("stream_options")
    if given is not None and bytes(given) != b"null":
        options = msgspec.json.decode(given)
    fields["stream_options"] = Raw(msgspec.json.encode(options | {"include_usage": True}))
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


def _why(error: BaseException) -> str:
    """The kind of a connection error, without addresses of internal machines."""
    return type(error).__name__
