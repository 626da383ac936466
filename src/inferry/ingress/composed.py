"""Calls of composed models: the steps run as ordinary jobs of the client's caller and run.

A call has one task. A client that disconnects cancels the task, and with it every step. Belongs to one event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from inferry.dispatch.gateway import Gateway, JobStream, ended_stream
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    ModelNotAllowed,
    ModelNotFound,
    NoWorker,
    RunCancelled,
    UnsupportedFeature,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import ComposedRow
from inferry.domain.streams import Delta, Done
from inferry.domain.values import replace
from inferry.ingress.answer_events import answer_events, usage_event
from inferry.ingress.composed_steps import DEADLINE, FORWARDED_PATH, model_of, shown_path, step_headers, with_all_models
from inferry.ingress.harness import identity
from inferry.ingress.headers import int_header, lane_of, request_id
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import InternalReply
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.openai.parse import LongPrompt, parse
from inferry.ingress.openai.request_schema import ChatCompletionRequest, StreamOptions
from inferry.ingress.pooling.decode import PooledEndpoint
from inferry.ingress.pooling.parse import parse_pooled
from inferry.ingress.response import HeartbeatTimer, start_response
from inferry.ingress.step_format import StageFormat, StepFormat
from inferry.ingress.wire_format import OPENAI, ClientRequest, DeferredRequest, Endpoint, WireFormat
from inferry.observe.tracing.tracer import Tracer
from inferry.pipelines.composed import CHAT, COMPLETIONS, Fields, StepAnswer
from inferry.pipelines.versions import ComposedVersions

log = logging.getLogger(__name__)

_PATH = b"x-inferry-path: %b\r\n"
_JSON = b"content-type: application/json\r\n"


_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class ComposedCalls:
    """Serves the calls of composed models."""

    def __init__(
        self,
        models: ComposedVersions,
        gateway: Gateway,
        endpoints: Mapping[bytes, Endpoint],
        serve: Callable[[Request, Reply], None],
        refuse: Callable[[GatewayError, Request, Reply, Caller], None],
        heartbeats: HeartbeatTimer,
        max_unread_bytes: int,
        tracer: Tracer | None = None,
    ) -> None:
        self.models = models
        self.gateway = gateway
        self.endpoints = endpoints
        self.serve_request = serve
        self.refuse = refuse
        self.heartbeats = heartbeats
        self.max_unread_bytes = max_unread_bytes
        self.tracer = tracer
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(
        self, error: GatewayError, decoded: ClientRequest | None, request: Request, reply: Reply, caller: Caller
    ) -> bool:
        """Serve a request that was refused with this error; False where its model is no composed one.

        `decoded` is None for a request that is not one chat or completions request.
        """
        name = self.name_of(error, request)
        if name is None:
            return False
        if not caller.allows_model(name):
            raise ModelNotAllowed(f"this key may not use the model `{name}`", param="model")
        self.start(self._answer, name, decoded, request, reply, caller)
        return True

    def start(
        self,
        work: Callable[["Call"], Coroutine[Any, Any, None]],
        name: str,
        decoded: ClientRequest | None,
        request: Request,
        reply: Reply,
        caller: Caller,
    ) -> None:
        """Answer the request with this work, in a task that ends with the client's connection or its run."""
        call = Call(self, name, decoded, request, reply, with_all_models(caller))
        task = asyncio.get_running_loop().create_task(self._serve(work, call))
        reply.on_disconnect = partial(_cancel, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def name_of(self, error: GatewayError, request: Request) -> str | None:
        """The composed model of a request that was refused with this error; None where it names another model."""
        if not isinstance(error, ModelNotFound | NoWorker):
            return None
        name = model_of(request.body)
        is_known = name is not None and self.models.has(name, is_forwarded=FORWARDED_PATH in request.headers)
        return name if is_known else None

    async def _answer(self, call: "Call") -> None:
        is_forwarded = FORWARDED_PATH in call.headers
        model = self.models.find(call.name, call.tenant, call.run_id, is_forwarded=is_forwarded)
        if model is None:  # only the other version of the settings has it
            raise ModelNotFound(f"unknown model `{call.name}`", param="model")
        await model.serve(call)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, work: Callable[["Call"], Coroutine[Any, Any, None]], call: "Call") -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs as a task"
        end_watch = self.gateway.watch_run(call.tenant, call.run_id, partial(call.cancel_with_run, task))
        try:
            await work(call)
            if not call.is_answered:
                raise RuntimeError(f"the composed model `{call.name}` gave no answer")
        except GatewayError as error:
            call.refuse(error)
        except asyncio.CancelledError:
            if call.is_run_cancelled and not call.is_answered:
                call.refuse(RunCancelled(f"the run `{call.run_id}` was cancelled"))
                return
            call.end_trace()
            if not call.is_answered:
                call.reply.abort()
            raise
        except Exception:
            log.exception("a call of the composed model %s failed", call.name)
            call.fail()
        finally:
            end_watch()


class Call:
    """One call of a composed model (`pipelines.composed.ComposedCall`)."""

    def __init__(
        self,
        calls: ComposedCalls,
        name: str,
        decoded: ClientRequest | None,
        request: Request,
        reply: Reply,
        caller: Caller,
    ) -> None:
        self._calls = calls
        self._decoded = decoded
        self._request = request
        self.reply = reply
        self._caller = caller
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
        self._started_at = calls.gateway.now()
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
        job, wire_format = await self._step_job(path, msgspec.json.encode(fields), headers)
        calls = self._calls
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
        return StepAnswer(answer.body, stream.attempt)

    def _submit(self, job: InferenceJob) -> tuple[InferenceJob, JobStream]:
        calls, request = self._calls, self._request
        if calls.tracer is not None and request.trace is not None:
            job = calls.tracer.adopt(request.trace, job)
        try:
            return job, calls.gateway.submit(job, self._caller)
        except GatewayError:
            if job.trace is not None:
                job.trace.call.open_jobs -= 1  # it has no end
            raise

    async def _step_job(
        self, path: str, body: bytes, headers: Mapping[bytes, bytes]
    ) -> tuple[InferenceJob, WireFormat]:
        calls = self._calls
        endpoint = calls.endpoints[path.encode()]
        models, found = calls.gateway.models, self._decoded
        parsed: InferenceJob | LongPrompt
        if isinstance(endpoint, PooledEndpoint):
            pooled = endpoint.decode_pooled(body)
            wire_format, parsed = pooled.format, parse_pooled(pooled, headers, models, self._caller)
        else:
            decoded = endpoint.decode(body)
            if isinstance(decoded, DeferredRequest):
                decoded = decoded.without_preparation("a step of a composed model has one prompt and is not stored")
            if found is not None and path == self.step_path:
                # What the fields of a chat request do not show of the client's request.
                decoded = ClientRequest(decoded.wire, decoded.body, decoded.format, found.features, found.reasoning)
            wire_format, parsed = decoded.format, parse(decoded, headers, models, self._caller)
        if isinstance(parsed, LongPrompt):
            with calls.gateway.reserved_bytes(len(body)):
                parsed = await parsed.job()
        return parsed, wire_format

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
        gateway = self._calls.gateway
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
        return None if given is None else given - int((self._calls.gateway.now() - self._started_at) * 1000)

    # -- answers -----------------------------------------------------------------------------------------------------

    def forward(self, stage: str, model: str, path: Sequence[str]) -> None:
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
        self._calls.serve_request(request, reply)

    async def respond(self, stage: str, fields: Fields, path: Sequence[str], *, deadline_ms: int | None = None) -> None:
        headers = self._step_headers(stage, None, deadline_ms)
        job, wire_format = await self._step_job(CHAT, msgspec.json.encode(fields), headers)
        calls, unread = self._calls, self._calls.max_unread_bytes
        wire_format = StageFormat(wire_format if self._decoded is None else self._decoded.format, stage)
        job, stream = self._submit(job)
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
        decoded, calls = self._decoded, self._calls
        if decoded is None:
            raise UnsupportedFeature(f"the model `{self.name}` answers one chat or completions request at a time")
        wire, job, end = decoded.wire, step.attempt.job, step.attempt.end
        assert isinstance(end, Done), "the step has succeeded"
        stream_options = wire.stream_options
        include_usage = isinstance(stream_options, StreamOptions) and stream_options.include_usage is True
        job = replace(
            job, stream=self.streams, resume_point=None, payload=replace(job.payload, include_usage=include_usage)
        )
        attempt = Attempt(job)
        attempt.plan, attempt.sent_at, attempt.placed = step.attempt.plan, step.attempt.sent_at, step.attempt.placed
        raw = answer_events(body) if self.streams else msgspec.json.encode(body)
        stream = ended_stream(
            attempt,
            Delta(job.job_id, job.run_id, job.step_id, 0, tokens=1, raw=raw, is_last=True),
            Done(
                job.job_id,
                end.finish,
                end.usage,
                usage_event(body) if self.streams else b"",
                stopped=None if self.streams else end.stopped,  # the events have it
            ),
        )
        self.is_answered = True
        self.reply.add_headers(_PATH % shown_path(self._path_prefix, path))
        unread = calls.max_unread_bytes
        start_response(stream, job, calls.gateway, self.reply, decoded.format, calls.heartbeats, unread, self._caller)
        self.end_trace()

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
        self._calls.refuse(error, self._request, self.reply, self._caller)

    def fail(self) -> None:
        """A defect: the client gets a 500."""
        self.refuse(InternalError("the gateway failed to handle the request"))

    def end_trace(self) -> None:
        trace, tracer = self._request.trace, self._calls.tracer
        if trace is not None and tracer is not None:
            tracer.release(trace)


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
