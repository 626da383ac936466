"""One call of a composed model: its steps and its answer.

A step that names another composed model is a nested call. Its answer goes back to the step and not to the client.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from inferry.dispatch.gateway import Gateway, JobStream
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    ModelNotFound,
    NoWorker,
    UnsupportedFeature,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import ComposedRow
from inferry.ingress.answered_stream import answered_stream
from inferry.ingress.composed_steps import (
    DEADLINE,
    FORWARDED_PATH,
    decode_step,
    model_of,
    parse_step,
    shown_path,
    step_headers,
)
from inferry.ingress.headers import int_header, lane_of, request_id
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import InternalReply
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.job_parser import LongPrompt
from inferry.ingress.openai.request_schema import ChatCompletionRequest
from inferry.ingress.pooling.decode import PooledRequest
from inferry.ingress.response import HeartbeatTimer, start_response
from inferry.ingress.run_identity import identity
from inferry.ingress.step_format import StageFormat, StepFormat
from inferry.ingress.wire_format import OPENAI, ClientRequest, Endpoint, WireFormat
from inferry.observe.tracing.tracer import Tracer
from inferry.pipelines.composed import CHAT, COMPLETIONS, ComposedModel, Fields, StepAnswer, step_fields
from inferry.pipelines.versions import ComposedVersions

_PATH = b"x-inferry-path: %b\r\n"
_JSON = b"content-type: application/json\r\n"


_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class CallContext(NamedTuple):
    """What calls need of the app."""

    models: ComposedVersions
    gateway: Gateway
    endpoints: Mapping[bytes, Endpoint]
    serve_request: Callable[[Request, Reply], None]
    refuse: Callable[[GatewayError, Request, Reply, Caller], None]
    heartbeats: HeartbeatTimer
    max_unread_bytes: int
    tracer: Tracer | None = None


class Call:
    """One call of a composed model (`pipelines.composed.ComposedCall`)."""

    def __init__(
        self,
        context: CallContext,
        name: str,
        decoded: ClientRequest | None,
        request: Request,
        reply: Reply,
        caller: Caller,
        *,
        is_nested: bool = False,
    ) -> None:
        self._context = context
        self._decoded = decoded
        self._request = request
        self.reply = reply
        self._caller = caller
        self._is_nested = is_nested
        self._answer: StepAnswer | None = None
        self._forwarded: tuple[str, str] | None = None
        self.is_answered = False
        self.is_run_cancelled = False
        self.name = name
        self.tenant = caller.tenant.name
        self.headers: Mapping[bytes, bytes] = request.headers
        self.path = request.target.partition(b"?")[0].decode("latin-1")
        self.generates = decoded is not None
        self.streams = decoded is not None and decoded.wire.stream is True
        self.fields: dict[str, Raw] = _fields_decoder.decode(request.body if decoded is None else decoded.body)
        tier = None if decoded is None else decoded.wire.service_tier
        self.lane = lane_of(request.headers, tier, caller).name
        self.step_path = self.path
        if decoded is not None:
            self.step_path = CHAT if isinstance(decoded.wire, ChatCompletionRequest) else COMPLETIONS
        self._id = new_job_id()
        self._run = identity(request.headers, self._id)
        self.run_id = self._run.run_id
        self._started_at = context.gateway.now()
        self._path_prefix = request.headers.get(FORWARDED_PATH, b"")
        if request.trace is not None:
            request.trace.open_jobs += 1  # until the last step: the trace ends with it

    # -- steps -------------------------------------------------------------------------------------------------------

    async def step(
        self,
        stage: str,
        path: str,
        fields: Fields,
        *,
        lane: str | None = None,
        deadline_ms: int | None = None,
        is_shadow: bool = False,
    ) -> StepAnswer:
        headers = self._step_headers(stage, lane, deadline_ms, is_shadow=is_shadow)
        body = msgspec.json.encode(fields)
        try:
            job, wire_format = await self._step_job(path, body, headers)
        except (ModelNotFound, NoWorker) as error:
            model, nested = self._nested(error, path, body, headers)
        else:
            return await self._ask_worker(job, wire_format)
        return await nested._result(model)

    def _nested(
        self, error: GatewayError, path: str, body: bytes, headers: dict[bytes, bytes]
    ) -> "tuple[ComposedModel, Call]":
        """The composed model that a step names, and its call. Raises the error where it names none, or a pipeline."""
        name = model_of(body) or ""
        model = self._context.models.find(name, self.tenant, self.run_id, is_forwarded=True)
        if model is None or model.kind == "pipeline":
            raise error
        request = Request(b"POST", path.encode(), headers)
        request.body, request.trace = body, self._request.trace
        decoded = self._decode_step(path, body)
        client = decoded if isinstance(decoded, ClientRequest) else None
        return model, Call(self._context, name, client, request, self.reply, self._caller, is_nested=True)

    async def _result(self, model: ComposedModel) -> StepAnswer:
        """The answer of a nested call."""
        try:
            await model.serve(self)
            if self._forwarded is not None:
                stage, name = self._forwarded
                return await self.step(stage, self.step_path, {**self.fields, "model": name})
            assert self._answer is not None, "a composed model answers or raises"
            return self._answer
        finally:
            self.end_trace()

    async def _ask_worker(self, job: InferenceJob, wire_format: WireFormat) -> StepAnswer:
        calls = self._context
        if (waiting := calls.gateway.lineages.pending(job, self._caller)) is not None:
            await waiting()
        step_format = StepFormat(wire_format)
        reply = InternalReply(self._request, asyncio.get_running_loop().create_future())
        job, stream = self._submit(job)
        unread = calls.max_unread_bytes
        start_response(stream, job, calls.gateway, reply, step_format, calls.heartbeats, unread, self._caller)
        try:
            answer = await reply.answer
        except asyncio.CancelledError:
            reply.disconnect()
            raise
        except ConnectionAbortedError:
            raise ClientClosed("the step was cancelled") from None
        if step_format.error is not None:
            raise step_format.error
        return StepAnswer(answer.body, job, stream.attempt)

    def _submit(self, job: InferenceJob) -> tuple[InferenceJob, JobStream]:
        calls, request = self._context, self._request
        if calls.tracer is not None and request.trace is not None:
            calls.tracer.adopt(request.trace, job)
        try:
            return job, calls.gateway.submit(job, self._caller)
        except GatewayError:
            if job.trace is not None:
                job.trace.call.open_jobs -= 1  # it has no end
            raise

    async def _step_job(
        self, path: str, body: bytes, headers: Mapping[bytes, bytes]
    ) -> tuple[InferenceJob, WireFormat]:
        gateway, decoded = self._context.gateway, self._decode_step(path, body)
        parsed = parse_step(decoded, headers, gateway.models, self._caller)
        if isinstance(parsed, LongPrompt):
            with gateway.reserved_bytes(len(body)):
                parsed = await parsed.job()
        return parsed, decoded.format

    def _decode_step(self, path: str, body: bytes) -> ClientRequest | PooledRequest:
        decoded, found = decode_step(self._context.endpoints[path.encode()], body), self._decoded
        if found is not None and path == self.step_path and isinstance(decoded, ClientRequest):
            # What the fields of a chat request do not show of the client's request.
            return ClientRequest(decoded.wire, decoded.body, decoded.format, found.features, found.reasoning)
        return decoded

    def _step_headers(
        self, stage: str, lane: str | None, deadline_ms: int | None, *, is_shadow: bool = False
    ) -> dict[bytes, bytes]:
        left_ms = None if is_shadow else self.deadline_left_ms()
        if deadline_ms is not None:
            left_ms = deadline_ms if left_ms is None else min(left_ms, deadline_ms)
        lane = None if lane is None else max(lane, self.lane)
        return step_headers(self._request.headers, self._run, self._id, self.name, stage, lane, left_ms)

    def record(
        self,
        kind: str,
        path: Sequence[str],
        *,
        accepted: bool,
        reason: str,
        score: float | None = None,
        agreed: bool | None = None,
    ) -> None:
        gateway = self._context.gateway
        gateway.record_composed(
            ComposedRow(
                call_id=self._id,
                ended_at=gateway.wall(),
                tenant=self.tenant,
                name=self.name,
                kind=kind,
                path=">".join(path),
                accepted=accepted,
                reason=reason,
                score=score,
                agreed=agreed,
            )
        )

    def deadline_left_ms(self) -> int | None:
        """Milliseconds until the client's deadline; None where it set none."""
        given = int_header(self._request.headers, DEADLINE)
        return None if given is None else given - int((self._context.gateway.now() - self._started_at) * 1000)

    # -- answers -----------------------------------------------------------------------------------------------------

    def forward(self, stage: str, model: str, path: Sequence[str]) -> None:
        if self._is_nested:
            self._forwarded = stage, model
            return
        request, reply = self._request, self.reply
        headers = self._step_headers(stage, None, None)
        shown = shown_path(self._path_prefix, path)
        headers[FORWARDED_PATH] = shown
        request.headers = headers
        request.body = msgspec.json.encode({**_fields_decoder.decode(request.body), "model": model})
        request.caller = self._caller
        if request.trace is not None:
            request.trace.open_jobs -= 1
        self.is_answered = True
        reply.on_disconnect = None
        reply.add_headers(_PATH % shown)
        self._context.serve_request(request, reply)

    async def respond(self, stage: str, fields: Fields, path: Sequence[str], *, deadline_ms: int | None = None) -> None:
        headers, body = self._step_headers(stage, None, deadline_ms), msgspec.json.encode(fields)
        client = self._decoded or self._decode_step(CHAT, body)
        try:
            job, _ = await self._step_job(CHAT, body, headers)
        except (ModelNotFound, NoWorker) as error:
            whole = msgspec.json.encode(step_fields(fields, fields["model"]))
            model, nested = self._nested(error, CHAT, whole, headers)
        else:
            job, stream = self._submit(job)
            self._respond(stream, job, StageFormat(client.format, stage), path)
            return
        assert isinstance(client, ClientRequest), "it is a chat request"
        answer = await nested._result(model)
        stream, job = answered_stream(answer, answer.decode(), client)
        self._respond(stream, job, client.format, path)

    def _respond(self, stream: JobStream, job: InferenceJob, wire_format: WireFormat, path: Sequence[str]) -> None:
        calls, unread = self._context, self._context.max_unread_bytes
        self.is_answered = True
        self.reply.add_headers(_PATH % shown_path(self._path_prefix, path))
        start_response(stream, job, calls.gateway, self.reply, wire_format, calls.heartbeats, unread, self._caller)
        self.end_trace()

    def answer_json(self, body: bytes, path: Sequence[str]) -> None:
        self.is_answered = True
        self.reply.on_disconnect = None
        self.reply.add_headers(_PATH % shown_path(self._path_prefix, path))
        head = _JSON + OPENAI.id_headers(request_id(self._request.headers) or self._id)
        self.reply.respond(200, head + b"x-inferry-lane: %b\r\n" % self.lane.encode(), body)
        self.end_trace()

    def answer(self, step: StepAnswer, body: Fields, path: Sequence[str]) -> None:
        client = self._decoded
        if client is None:
            raise UnsupportedFeature(f"the model `{self.name}` answers one chat or completions request at a time")
        if self._is_nested:
            self._answer = StepAnswer(msgspec.json.encode(body), step.job, step.attempt)
            return
        stream, job = answered_stream(step, body, client)
        self._respond(stream, job, client.format, path)

    def cancel_with_run(self, task: "asyncio.Task[Any]") -> None:
        self.is_run_cancelled = True
        task.cancel()

    def refuse(self, error: GatewayError) -> None:
        if self.is_answered or isinstance(error, ClientClosed):
            self.reply.abort()
            self.end_trace()
            return
        self.is_answered = True
        self.reply.on_disconnect = None
        self._context.refuse(error, self._request, self.reply, self._caller)

    def fail(self) -> None:
        """A defect: the client gets a 500."""
        self.refuse(InternalError("the gateway failed to handle the request"))

    def end_trace(self) -> None:
        trace, tracer = self._request.trace, self._context.tracer
        if trace is not None and tracer is not None:
            tracer.release(trace)
