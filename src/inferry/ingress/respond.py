"""Items to HTTP: the two ways an answer leaves, in pieces and whole.

Each call is read by its own ASGI task. A second, small task waits for the client to leave; when it does, the job is
cancelled and nobody else is disturbed. Response headers go out with the first delta, because only then is it known
where the job ran and how long it waited.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from inferry.dispatch.gateway import Gateway, JobStream
from inferry.domain.errors import ClientClosed
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Failed
from inferry.ingress.collect import collect_events
from inferry.ingress.problems import Headers, error_body, error_event, error_headers
from inferry.ingress.shapes import ChunkWriter, EventWriter, PassThrough, whole_answer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_JSON = [(b"content-type", b"application/json")]
_HEARTBEAT = b": waiting\n\n"


async def respond(
    stream: JobStream, job: InferenceJob, gateway: Gateway, receive: Receive, send: Send, heartbeat_s: float
) -> None:
    """Answer one accepted job until its end, or until the client is gone."""
    watcher = asyncio.get_running_loop().create_task(_cancel_when_gone(job.job_id, gateway, receive))
    try:
        if job.stream:
            await _in_pieces(stream, job, gateway, send, heartbeat_s)
        else:
            await _whole(stream, job, gateway, send)
    finally:
        watcher.cancel()
        if not stream.attempt.is_ended:
            gateway.cancel(job.job_id)  # the answer broke off here: nobody will read the rest


async def _cancel_when_gone(job_id: str, gateway: Gateway, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gateway.cancel(job_id)


async def _in_pieces(stream: JobStream, job: InferenceJob, gateway: Gateway, send: Send, heartbeat_s: float) -> None:
    writer: EventWriter | None = None
    started = False
    heartbeat = _Heartbeat(stream, heartbeat_s)
    try:
        while True:
            delta, end = await stream.take()
            if not started:
                if isinstance(end, Failed) and delta is None:
                    await _refuse(end, job, send)
                    return
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE + _job_headers(stream, job)})
            if writer is None and (delta is not None or end is not None):
                writer = PassThrough() if delta is not None and delta.raw else ChunkWriter(job, gateway.clock.wall())
            body = b"" if delta is None or writer is None else writer.piece(delta)
            if isinstance(end, Failed):
                await send({"type": "http.response.body", "body": body + error_event(end.error)})
                return
            if end is not None and writer is not None:
                body += writer.last(end, include_usage=job.payload.include_usage)
                await send({"type": "http.response.body", "body": body})
                return
            if body:
                heartbeat.something_was_said = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
            elif heartbeat.is_due:
                heartbeat.is_due = False
                await send({"type": "http.response.body", "body": _HEARTBEAT, "more_body": True})
    finally:
        heartbeat.stop()


async def _whole(stream: JobStream, job: InferenceJob, gateway: Gateway, send: Send) -> None:
    texts: list[str] = []
    raws: list[bytes] = []
    while True:
        delta, end = await stream.take()
        if delta is not None:
            texts.append(delta.text)
            raws.append(delta.raw)
        if end is not None:
            break
    if isinstance(end, Failed):
        await _refuse(end, job, send)
        return
    raw = b"".join(raws)
    body = collect_events(raw, end.raw) if raw else whole_answer(job, "".join(texts), end, gateway.clock.wall())
    await send_whole(send, 200, _JSON + _job_headers(stream, job), body)


async def _refuse(end: Failed, job: InferenceJob, send: Send) -> None:
    if isinstance(end.error, ClientClosed):
        return  # nobody is there to read it
    await send_whole(
        send,
        end.error.status,
        [*error_headers(end.error), (b"x-request-id", job.request_id.encode())],
        error_body(end.error),
    )


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _job_headers(stream: JobStream, job: InferenceJob) -> Headers:
    headers = [(b"x-request-id", job.request_id.encode()), (b"x-inferry-lane", job.lane.name.encode())]
    attempt = stream.attempt
    if attempt.plan is not None and attempt.queue_s is not None:
        headers += [
            (b"x-inferry-queue-ms", b"%.1f" % (attempt.queue_s * 1000)),
            (b"x-inferry-batch-size", b"%d" % len(attempt.plan.jobs)),
            (b"x-inferry-worker", attempt.plan.worker.encode()),
        ]
    return headers


class _Heartbeat:
    """Wakes the reader of a stream that has been silent for a while. One timer, armed again only when it fires."""

    __slots__ = ("_every_s", "_loop", "_stream", "_timer", "is_due", "something_was_said")

    def __init__(self, stream: JobStream, every_s: float) -> None:
        self._stream = stream
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(every_s, self._fire)
        self.is_due = False
        self.something_was_said = False

    def _fire(self) -> None:
        if not self.something_was_said:
            self.is_due = True
            self._stream.nudge()
        self.something_was_said = False
        self._timer = self._loop.call_later(self._every_s, self._fire)

    def stop(self) -> None:
        self._timer.cancel()
