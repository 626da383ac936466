"""Streaming and non-streaming responses of jobs.

A response has no task of its own. It listens to the job's stream and runs in the callbacks that deliver the worker's
items. While its client reads slowly, deltas stay in the stream, where they are merged. Response headers are sent with
the first delta, because only then worker and queue time are known. A client that disconnects cancels its own job only.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Final

from inferry.dispatch.gateway import Gateway, JobStream
from inferry.domain.callers import Caller
from inferry.domain.errors import ClientClosed, GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.streams import Done, Failed, Placed
from inferry.ingress.errors import error_headers
from inferry.ingress.http.reply import Reply
from inferry.ingress.openai.collect import collect_events, pass_through_body
from inferry.ingress.openai.rate_limit_headers import has_rate_limits, rate_limit_headers
from inferry.ingress.openai.render import (
    ChunkWriter,
    ContinuationWriter,
    PassThrough,
    full_response,
    set_service_tier,
)
from inferry.ingress.wire_format import COMMENT, WireFormat

log = logging.getLogger(__name__)

_SSE: Final = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_JSON: Final = b"content-type: application/json\r\n"
_CHECKS_PER_HEARTBEAT: Final = 4
_LANE_NAMES: Final = {lane: lane.name.encode() for lane in Lane}

_pass_through: Final = PassThrough()


class _Response(ABC):
    """The response of one job, until its end or until the client disconnects."""

    __slots__ = ("_format", "_gateway", "_job", "_rate_limited_caller", "_reply", "_stream")

    def __init__(
        self, stream: JobStream, job: InferenceJob, gateway: Gateway, reply: Reply, wire_format: WireFormat
    ) -> None:
        self._rate_limited_caller: Caller | None = None
        self._format = wire_format
        self._stream = stream
        self._job = job
        self._gateway = gateway
        self._reply = reply

    def include_rate_limits(self, caller: Caller) -> None:
        """Add the caller's rate limits to the response headers."""
        self._rate_limited_caller = caller

    def start(self) -> None:
        self._reply.on_disconnect = self.on_disconnect
        self._stream.listen(self.on_news)

    def on_disconnect(self) -> None:
        self._gateway.cancel(self._job.job_id)

    def on_news(self) -> None:
        # Called from the worker's callbacks: an error here must not reach the worker or other jobs.
        try:
            self._flush()
        except GatewayError as error:
            self._on_malformed(error)
        except Exception:
            log.exception("writing a response failed")
            self._reply.abort()

    @abstractmethod
    def _flush(self) -> None:
        """Take the available items from the stream and write them."""

    def _on_malformed(self, error: GatewayError) -> None:
        """The worker's output cannot be written in the client's format."""
        self._refuse(error)

    def _refuse(self, error: GatewayError) -> None:
        if isinstance(error, ClientClosed):
            self._reply.abort()  # the client has disconnected
            return
        headers = error_headers(error, self._job.job_id) + self._format.id_headers(self._job.request_id)
        if self._rate_limited_caller is not None:
            headers += rate_limit_headers(self._gateway, self._rate_limited_caller)
        wire_format = self._format
        self._reply.respond(
            wire_format.error_status(error), headers, wire_format.error_body(error, self._job.request_id)
        )

    def _open_choices(self, end: Done) -> int:
        """Choices that still need a finish reason: none where the engine's own events had it."""
        engine_sent_end = end.stopped_by_engine and self._stream.attempt.job.resume_point is None
        return 0 if engine_sent_end else self._job.payload.choices

    def _job_headers(self) -> bytes:
        job, stream = self._job, self._stream
        plan, sent_at, placed = stream.attempt.plan, stream.attempt.sent_at, stream.attempt.placed
        headers = self._format.id_headers(job.request_id) + b"x-inferry-lane: %b\r\n" % _LANE_NAMES[job.lane]
        if placed is not None:
            headers += _placement_headers(placed)
        elif plan is not None and sent_at is not None:
            headers += b"x-inferry-queue-ms: %.1f\r\nx-inferry-batch-size: %d\r\nx-inferry-worker: %b\r\n" % (
                max(0.0, sent_at - job.arrived_at) * 1000,
                len(plan.jobs),
                plan.worker.encode(),
            )
        if stream.shared_with is not None:
            headers += _shared_headers(stream.shared_with, stream.is_replay)
        elif placed is not None and placed.shared_with is not None:
            headers += _shared_headers(placed.shared_with, placed.is_replay)
        return (
            headers
            if self._rate_limited_caller is None
            else headers + rate_limit_headers(self._gateway, self._rate_limited_caller)
        )


def _placement_headers(placed: Placed) -> bytes:
    """The headers of a job that another process runs."""
    return b"x-inferry-queue-ms: %.1f\r\nx-inferry-batch-size: %d\r\nx-inferry-worker: %b\r\n" % (
        placed.queue_s * 1000,
        placed.batch_size,
        placed.worker.encode(),
    )


def _shared_headers(leader: str, is_replay: bool) -> bytes:
    headers = b"x-inferry-shared-with: %b\r\n" % leader.encode()
    return headers + b"x-inferry-replayed: true\r\n" if is_replay else headers


class FullResponse(_Response):
    """One JSON body, once the job has ended."""

    __slots__ = ("_raws", "_restarts", "_texts")

    def __init__(
        self, stream: JobStream, job: InferenceJob, gateway: Gateway, reply: Reply, wire_format: WireFormat
    ) -> None:
        super().__init__(stream, job, gateway, reply, wire_format)
        self._texts: list[str] = []
        self._raws: list[bytes] = []
        self._restarts = 0

    def _flush(self) -> None:
        delta, end = self._stream.take_nowait()
        if self._restarts != self._stream.restarts:
            self._restarts = self._stream.restarts
            self._texts.clear()
            self._raws.clear()
        if delta is not None:
            self._texts.append(delta.text)
            self._raws.append(delta.raw)
        if end is None:
            return
        if isinstance(end, Failed):
            self._refuse(end.error)
            return
        body = self._format.full_body(self._job, self._answer(end))
        headers = _JSON + self._job_headers()
        if end.stopped is not None:
            headers += b"x-inferry-stop-reason: %b\r\n" % end.stopped.code.encode()
        self._reply.respond(200, headers, body)

    def _answer(self, end: Done) -> bytes | dict[str, Any]:
        """The body of a chat or completions response."""
        raw = b"".join(self._raws)
        if raw.startswith(b"{"):
            return pass_through_body(raw, end)
        text = "".join(self._texts)
        if not raw:
            return full_response(self._job, text, end, self._gateway.wall())
        if end.stopped is not None or self._stream.attempt.job.resume_point is not None:
            # It began with one engine's events, and was resumed on another worker or stopped.
            writer = ContinuationWriter(raw, self._open_choices(end))
            return collect_events(raw + writer.text(text) + writer.finish(end), writer.usage(end), end.shape)
        return collect_events(raw, end.raw, end.shape)


class StreamingResponse(_Response):
    """Server-sent events, as items arrive."""

    __slots__ = ("_first_raw", "_has_begun", "_heartbeats", "_max_unread_bytes", "_quiet_checks", "_tier", "_writer")

    def __init__(
        self,
        stream: JobStream,
        job: InferenceJob,
        gateway: Gateway,
        reply: Reply,
        wire_format: WireFormat,
        heartbeats: "HeartbeatTimer",
        max_unread_bytes: int,
    ) -> None:
        super().__init__(stream, job, gateway, reply, wire_format)
        self._writer = wire_format.writer(job, gateway.wall())
        self._first_raw = b""
        self._tier = job.payload.service_tier if self._writer is None else None
        self._has_begun = False
        self._max_unread_bytes = max_unread_bytes
        self._heartbeats = heartbeats
        self._quiet_checks = 0

    def start(self) -> None:
        self._reply.heartbeat = COMMENT
        self._reply.on_writable = self.on_news
        self._heartbeats.add(self)
        super().start()

    def on_disconnect(self) -> None:
        self._heartbeats.discard(self)
        super().on_disconnect()

    def check_heartbeat(self) -> None:
        """Send a heartbeat if the stream was quiet since the last `_CHECKS_PER_HEARTBEAT` calls."""
        self._quiet_checks += 1
        if self._quiet_checks >= _CHECKS_PER_HEARTBEAT and not self._reply.is_paused:
            self._begin()
            self._write(self._format.heartbeat())

    def _flush(self) -> None:
        reply = self._reply
        if reply.is_paused and not reply.is_disconnected:
            if self._stream.unread_bytes > self._max_unread_bytes and reply.on_disconnect is not None:
                self._cut_off()
            return
        delta, end = self._stream.take_nowait()
        body = b""
        if delta is not None:
            writer = self._writer
            if writer is None:
                writer = self._writer = _pass_through if delta.raw else self._chunk_writer()
                self._first_raw = delta.raw
            if writer is _pass_through and self._stream.attempt.job.resume_point is not None:
                writer = self._writer = ContinuationWriter(self._first_raw)
            body = writer.piece(delta)
            if self._tier is not None:
                body = set_service_tier(body, self._tier)
            self._begin()
        if end is None:
            self._write(body)
            return
        self._heartbeats.discard(self)
        if isinstance(end, Failed):
            if not self._has_begun:
                self._refuse(end.error)
            elif isinstance(end.error, ClientClosed):
                reply.abort()
            else:
                reply.end(body + self._format.error_event(end.error))
            return
        self._begin()
        writer = self._writer or self._chunk_writer()
        if writer is _pass_through and (end.stopped is not None or self._stream.attempt.job.resume_point is not None):
            writer = ContinuationWriter(self._first_raw, self._open_choices(end))
        last = writer.last(end, include_usage=self._job.payload.include_usage)
        reply.end(body + (last if self._tier is None else set_service_tier(last, self._tier)))

    def _on_malformed(self, error: GatewayError) -> None:
        self._heartbeats.discard(self)
        self._reply.on_disconnect = None
        if self._has_begun:
            self._reply.end(self._format.error_event(error))
        else:
            self._refuse(error)
        self._stream.listen(_ignore)
        self._gateway.cancel(self._job.job_id, error)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._reply.begin(_SSE + self._job_headers())

    def _write(self, body: bytes) -> None:
        self._quiet_checks = 0
        self._reply.write(body)

    def _chunk_writer(self) -> ChunkWriter:
        return ChunkWriter(self._job, self._gateway.wall())

    def _cut_off(self) -> None:
        """End a stream whose unread data exceeds the limit, so that slow clients cannot exhaust memory."""
        self._heartbeats.discard(self)
        self._reply.on_disconnect = None
        self._reply.abort()
        self._gateway.cancel(
            self._job.job_id, ClientClosed(f"the client left more than {self._max_unread_bytes} bytes unread")
        )


def _ignore() -> None:
    """The listener of a stream whose response has ended."""


class HeartbeatTimer:
    """Checks every open stream a few times per heartbeat interval. One timer serves all streams."""

    def __init__(self, heartbeat_interval_s: float) -> None:
        self._interval_s = heartbeat_interval_s / _CHECKS_PER_HEARTBEAT
        self._loop = asyncio.get_running_loop()
        self._streams: set[StreamingResponse] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, response: StreamingResponse) -> None:
        self._streams.add(response)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._check_all)

    def discard(self, response: StreamingResponse) -> None:
        self._streams.discard(response)

    def _check_all(self) -> None:
        self._timer = None
        for response in list(self._streams):
            response.check_heartbeat()
        if self._streams:
            self._timer = self._loop.call_later(self._interval_s, self._check_all)


def start_response(
    stream: JobStream,
    job: InferenceJob,
    gateway: Gateway,
    reply: Reply,
    wire_format: WireFormat,
    heartbeats: HeartbeatTimer,
    max_unread_bytes: int,
    caller: Caller,
) -> None:
    """Answer with the output of a job, from its first item on."""
    response: StreamingResponse | FullResponse
    if job.stream:
        response = StreamingResponse(stream, job, gateway, reply, wire_format, heartbeats, max_unread_bytes)
    else:
        response = FullResponse(stream, job, gateway, reply, wire_format)
    if has_rate_limits(caller) is not None:
        response.include_rate_limits(caller)
    response.start()
