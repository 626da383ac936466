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
        self._calls: dict[str, asyncio.Task[None]] = {}
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
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
                ),
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
        tasks = [self._begin(job, emit) for job in plan.jobs]
        if len(tasks) == 1:
            await _settled(tasks[0])
        else:
            await asyncio.gather(*map(_settled, tasks))

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Close the upstream connections of these jobs; the server frees them when it notices."""
        found = {job_id: task for job_id in job_ids if (task := self._calls.get(job_id)) is not None}
        for task in found.values():
            task.cancel()
        await asyncio.gather(*map(_settled, found.values()))
        return frozenset(found)

    async def close(self) -> None:
        await self.cancel(list(self._calls))
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- one call ----------------------------------------------------------------------------------------------------

    def _begin(self, job: InferenceJob, emit: Emit) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._call(job, emit))
        self._calls[job.job_id] = task

        def over(task: asyncio.Task[None]) -> None:
            del self._calls[job.job_id]
            if task.cancelled():  # before its first step, so that it could not say so itself
                emit(Failed(job.job_id, ClientClosed("cancelled")))

        task.add_done_callback(over)
        return task

    async def _call(self, job: InferenceJob, emit: Emit) -> None:
        """One job to its end, which is emitted whatever happens."""
        scanner = EventScanner()
        try:
            await self._stream(job, scanner, emit)
            self._failures = 0
            return
        except asyncio.CancelledError:
            failure: GatewayError = ClientClosed("cancelled")
        except TimeoutError:
            failure = WorkerTimeout(f"worker {self._name} said nothing for {self._settings.silence_timeout_s:g} s")
        except aiohttp.ClientError as error:
            self._failures += not scanner.events
            failure = WorkerLost(f"worker {self._name} broke off: {_why(error)}")
        except GatewayError as error:
            failure = error
        emit(Failed(job.job_id, failure, scanner.usage or Usage(output_tokens=scanner.tokens)))

    async def _stream(self, job: InferenceJob, scanner: EventScanner, emit: Emit) -> None:
        if self._http is None:
            raise NoWorker(f"worker {self._name} is not connected")
        job_id, run_id, step_id = job.job_id, job.run_id, job.step_id
        index = 0
        url = self._settings.url + PATHS[job.payload.api]
        body = streaming_body(job.payload.body)
        async with self._http.post(url, data=body, headers={"x-request-id": job_id}) as response:
            if response.status != 200:
                raise _refusal(self._name, response.status, await response.content.read(65_536))
            pending = b""
            async for chunk in response.content.iter_any():
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
        emit(Done(job_id, scanner.finish, usage, scanner.usage_event))


async def _settled(task: asyncio.Task[None]) -> None:
    """Wait for a call without being ended by its cancellation; our own cancellation takes it along."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        raise


def streaming_body(body: bytes) -> bytes:
    """The client's body with streaming and usage switched on. The prompt is copied, never decoded."""
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
