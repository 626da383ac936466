"""One job on its way to an OpenAI-compatible server: reads the answer as it comes, until `end` says how it went.

All of it runs in callbacks of the connection, on the worker's event loop.
"""

import asyncio
from typing import Any, Protocol

from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, ContextLengthExceeded, GatewayError, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item, Usage
from inferry.domain.usage import max_plausible_output
from inferry.domain.values import replace
from inferry.workers.http_client import Connection, Request
from inferry.workers.openai_http.request_bodies import is_not_resumable, is_single_choice, requests_token_ids
from inferry.workers.openai_http.sse import EventScanner, is_utf8
from inferry.workers.openai_http.token_trace import ContinuationScanner, TracingScanner
from inferry.workers.stop_strings import StopMatcher

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_ERROR_BODY_BYTES = 65_536
MAX_EMPTY_EVENTS = 10_000
"""Events that say nothing, such as an engine's heartbeats, on top of those that do."""
COUNTED_AFTER_S = 0.1
"""A call that was sent this long ago is part of what the engine says it does."""


class CallOwner(Protocol):
    """What a call asks of the worker it belongs to."""

    clock: Clock

    @property
    def name(self) -> str: ...

    def send(self, call: "Call") -> None: ...

    def on_response_head(self, call: "Call", status: int, rate_limit_headers: dict[bytes, bytes]) -> None: ...

    def refused(
        self, call: "Call", status: int, body: bytes, rate_limit_headers: dict[bytes, bytes]
    ) -> GatewayError | None:
        """What a refusal means; None where the call was sent again instead."""

    def ended(self, call: "Call", end: Done | Failed) -> None: ...

    def on_response(self) -> None:
        """The server has sent something that is no token: it is alive."""

    def shape_of(self, api: str) -> dict[str, Any] | None:
        """How it writes answers in one piece, where that is known."""


class PlanCompletion:
    """A plan on its way: `finished` when every call of it has its end, or when the sink of their items broke."""

    __slots__ = ("_remaining", "finished")

    def __init__(self, calls: int) -> None:
        self._remaining = calls
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call_ended(self) -> None:
        self._remaining -= 1
        if not self._remaining and not self.finished.done():
            self.finished.set_result(None)

    def fail_plan(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


class Call:
    """A job from its beginning. Its events pass through as bytes."""

    __slots__ = (
        "_completion",
        "_emit",
        "_index",
        "_max_tokens",
        "_now",
        "_pending",
        "_rate_limit_headers",
        "_scan",
        "_scanner",
        "_status",
        "_worker",
        "connection",
        "end",
        "job",
        "key",
        "key_responded",
        "keys_tried",
        "last_activity_at",
        "sent_at",
    )

    def __init__(
        self,
        job: InferenceJob,
        emit: Emit,
        completion: PlanCompletion,
        worker: CallOwner,
        *,
        trace_tokens: bool = False,
    ) -> None:
        self.job = job
        self.end: Done | Failed | None = None
        self.connection: Connection | None = None
        self.key: int | None = None
        self.key_responded = True
        self.keys_tried = 0
        self._emit = emit
        self._completion = completion
        self._worker = worker
        self._now = worker.clock.now
        self.last_activity_at = self.sent_at = self._now()
        self._scanner: EventScanner = self._make_scanner(trace_tokens)
        self._scan = self._scanner.scan
        self._status = 0
        self._rate_limit_headers: dict[bytes, bytes] = {}
        self._pending = b""
        self._index = 0
        limit = job.payload.output_limit
        limit = job.token_budget if limit is None else limit
        self._max_tokens = max_plausible_output(limit)

    def _make_scanner(self, trace_tokens: bool) -> EventScanner:
        if not trace_tokens:
            return EventScanner()
        payload = self.job.payload
        return TracingScanner(keeps_ids=requests_token_ids(payload.body), engine_holds_text=bool(payload.sampling.stop))

    @property
    def has_tokens(self) -> bool:
        return self._scanner.tokens > 0

    @property
    def can_fail_over(self) -> bool:
        """Whether another worker can do the job without its client noticing."""
        return not self.has_tokens or not self.job.stream or self._so_far() is not None

    @property
    def reports_cached(self) -> bool | None:
        """Whether the server says how much of a prompt it had cached; None where it reports no use at all."""
        return None if self._scanner.usage is None else self._scanner.reports_cached

    def is_counted_by_engine(self, now: float) -> bool:
        """Whether the engine counts the call among what it does."""
        return self._scanner.tokens > 0 or (self.connection is not None and now - self.sent_at >= COUNTED_AFTER_S)

    def start(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self.last_activity_at = self.sent_at = self._now()
        connection.start(self, request)

    def reset(self) -> None:
        """The call is about to be sent once more: nothing of the first answer counts."""
        self._status = 0
        self._pending = b""
        self._rate_limit_headers = {}

    def fail(self, error: GatewayError) -> None:
        """End the job, and only this job; its connection is dropped."""
        if self.end is None:
            self.drop()
            self._finish(Failed(self.job.job_id, error, self._usage(), self._so_far()))

    def detach_connection(self) -> Connection | None:
        """The connection, which from here on is the caller's."""
        connection, self.connection = self.connection, None
        return connection

    def abandon(self) -> None:
        """Nobody wants the job's end any more."""
        self.drop()
        self.end = Failed(self.job.job_id, ClientClosed("nobody waits for it"))

    def connection_lost(self, error: GatewayError) -> None:
        """The server says no more. That is an error, unless all but its closing words had come."""
        scanner = self._scanner
        if scanner.finish is not None and scanner.error is None and is_single_choice(self.job.payload.body):
            self.drop()
            self._finish(self._done(scanner.finish))
        else:
            self.fail(error)

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    # What the connection tells.

    def on_head(self, status: int) -> None:
        self._status = status
        self.last_activity_at = self._now()
        connection = self.connection
        if connection is not None and connection.rate_limit_headers:
            self._rate_limit_headers = connection.rate_limit_headers
        if self.key is not None:
            self._worker.on_response_head(self, status, self._rate_limit_headers)

    def on_body(self, body: bytes) -> None:
        written = self._scanner.tokens
        chunk = self._pending + body if self._pending else body
        if self._status != 200:
            self._pending = chunk[:MAX_ERROR_BODY_BYTES]
            return
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._pending = chunk
            if len(chunk) > MAX_EVENT_BYTES:
                self.fail(WorkerLost(f"worker {self._worker.name} sent an event without an end"))
            return
        self._pending = chunk[end:]
        events = chunk[:end]
        # Events end between characters, so those that are complete can be checked on their own.
        if not events.isascii() and not is_utf8(events):
            self.fail(WorkerLost(f"worker {self._worker.name} sent bytes that are not UTF-8"))
            return
        scanner = self._scanner
        raw, tokens = self._scan(events)
        if scanner.tokens != written:
            self.last_activity_at = self._now()
        else:
            self._worker.on_response()  # comments, roles and pieces of events show that the server lives, not the job
        if raw:
            job = self.job
            self._emit_item(
                Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), tokens, raw, scanner.is_done)
            )
            self._index += 1
        if scanner.error is not None:
            # At once: what comes after it may look like a good end.
            self.fail(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.is_done:
            connection = self.connection
            if connection is not None and not connection.is_complete:
                # All has been said; whether the server also ends its answer is not for the job to wait for.
                connection.discard_rest()
                self.on_end()
        elif scanner.tokens > self._max_tokens or scanner.events > 2 * self._max_tokens + MAX_EMPTY_EVENTS:
            self.fail(WorkerLost(f"worker {self._worker.name} wrote more than it was asked to"))

    def on_end(self) -> None:
        self.connection = None
        if self.end is not None:
            return  # whoever took the items has ended it meanwhile
        scanner = self._scanner
        if self._status != 200:
            error = self._worker.refused(self, self._status, self._pending, self._rate_limit_headers)
            if error is not None:
                self._refuse(error)
        elif scanner.error is not None:
            self.fail(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.finish is None:
            self.fail(WorkerLost(f"worker {self._worker.name} ended the stream before the answer was complete"))
        else:
            self._finish(self._done(scanner.finish))

    def on_lost(self, cause: str) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and connection.was_used and not self._status:
            # A kept connection that the server closed while the request was on its way: nobody has seen it.
            self._worker.send(self)
            return
        self.connection_lost(WorkerLost(f"worker {self._worker.name} broke off: {cause}"))

    # What it tells.

    def _refuse(self, error: GatewayError) -> None:
        self.fail(error)

    def _finish(self, end: Done | Failed) -> None:
        self.end = end
        self._worker.ended(self, end)
        self._emit_item(end)
        self._completion.call_ended()

    def _emit_item(self, item: Item) -> None:
        try:
            self._emit(item)
        except Exception as error:
            # Not the connection's to hear: whoever runs the plan ends what is left of it.
            self._completion.fail_plan(error)

    def _usage(self) -> Usage:
        return self._scanner.usage or Usage(output_tokens=self._scanner.tokens)

    def _done(self, finish: FinishReason) -> Done:
        scanner = self._scanner
        reason = scanner.stop_reason
        shape = self._worker.shape_of(self.job.payload.api)
        return Done(self.job.job_id, finish, self._usage(), scanner.usage_event, stop_reason=reason, shape=shape)

    def _so_far(self) -> ResumePoint | None:
        scanner = self._scanner
        if not isinstance(scanner, TracingScanner | ContinuationScanner):
            return self.job.resume_point
        return None if is_not_resumable(self.job.payload.body) else scanner.resume_point()


class ContinuationCall(Call):
    """A job that goes on where an earlier attempt broke off. Its deltas carry text and token ids, no events.

    `starts_at_character`: that it begins with a whole character is known, or cannot be. `stops` are the stop strings
    that it is to look for, from where it goes on.
    """

    __slots__ = ("starts_at_character", "stops")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, worker: CallOwner) -> None:
        self.stops: StopMatcher | None = None
        super().__init__(job, emit, completion, worker)
        self._scan = self._read
        self.starts_at_character = False

    def resume_after(self, written: int, stops: StopMatcher | None = None) -> None:
        """Begin after so many ids of what was written: those after them are half a character, and written again."""
        resume_point = self.job.resume_point
        assert resume_point is not None
        self.starts_at_character = True
        if written < len(resume_point.output_ids):
            self.job = replace(
                self.job, resume_point=replace(resume_point, output_ids=resume_point.output_ids[:written])
            )
        self.stops = stops
        self._scanner = self._make_scanner(trace_tokens=False)

    def _make_scanner(self, trace_tokens: bool) -> EventScanner:
        assert self.job.resume_point is not None
        return ContinuationScanner(self.job.resume_point, self.stops)

    def finish_immediately(self) -> None:
        """The job broke off after the last token it could have: only text that was held back is left of it."""
        rest = "" if self.stops is None else self.stops.finish()
        if rest:
            self._emit_text(rest, (), 0)
        self._finish(self._done(FinishReason.LENGTH))

    def _read(self, events: bytes) -> tuple[bytes, int]:
        scanner = self._scanner
        assert isinstance(scanner, ContinuationScanner)
        text, ids = scanner.read(events)
        if text or ids:
            self._emit_text(text, ids, len(ids) or 1)
        if scanner.is_stopped and self.end is None:
            # The engine was not told of stop strings and would go on: closing the connection ends it.
            self.drop()
            self._finish(self._done(FinishReason.STOP))
        return b"", 0

    def _emit_text(self, text: str, ids: tuple[int, ...], tokens: int) -> None:
        job = self.job
        self._emit_item(Delta(job.job_id, job.run_id, job.step_id, self._index, text, ids, tokens))
        self._index += 1

    def _usage(self) -> Usage:
        resume_point, scanner = self.job.resume_point, self._scanner
        assert resume_point is not None
        if scanner.usage is None and scanner.stop_reason is not None:
            return Usage(len(resume_point.prompt_ids) + len(resume_point.output_ids), 0, scanner.tokens)
        return super()._usage()

    def _refuse(self, error: GatewayError) -> None:
        if isinstance(error, ContextLengthExceeded):
            # Not the prompt is too long: what came of it has reached the end of the context.
            self.finish_immediately()
        else:
            self.fail(error)


class StreamEndListener:
    """Listens to a stream whose job has ended, for the proof that the engine has let go of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None:
        text_seen = self._tail + body
        # Quotes inside strings are escaped: a model cannot write this, only an engine that is done.
        if b'"finish_reason":"' in text_seen or b"\ndata: [DONE]" in text_seen:
            self._set_ended(True)
        self._tail = text_seen[-32:]

    def on_end(self) -> None:
        self._set_ended(True)

    def on_lost(self, cause: str) -> None:
        self._set_ended(False)

    def close(self) -> None:
        self.connection.close()
        self._set_ended(False)

    def _set_ended(self, confirmed: bool) -> None:
        if not self.finished.done():
            self.finished.set_result(confirmed)
