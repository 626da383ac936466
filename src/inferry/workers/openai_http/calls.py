"""One job at an OpenAI-compatible server: reads the response stream until the job's `end` is known.

All methods run in callbacks of the connection, on the worker's event loop.
"""

from typing import Any, Final, Protocol

from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, GatewayError, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Item, Usage
from inferry.domain.usage import max_plausible_output, with_usage
from inferry.workers.http_client import Connection, Request
from inferry.workers.openai_http.request_bodies import is_not_resumable, is_single_choice, requests_token_ids
from inferry.workers.openai_http.sse import EventScanner, is_utf8
from inferry.workers.openai_http.token_trace import ContinuationScanner, TracingScanner
from inferry.workers.plan_completion import PlanCompletion

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
MAX_ERROR_BODY_BYTES: Final = 65_536
MAX_EMPTY_EVENTS: Final = 10_000
"""Limit for events without tokens, such as heartbeats, beyond two per plausible token."""
COUNTED_AFTER_S: Final = 0.1
"""The engine's metrics include a call once it was sent this long ago."""
_CARRIAGE_RETURN: Final = 0x0D  # a number: `in` tries bytes as one before it searches for them


class CallOwner(Protocol):
    """What a call needs of its worker."""

    clock: Clock

    @property
    def name(self) -> str: ...

    def send(self, call: "Call") -> None: ...

    def on_response_head(self, call: "Call", status: int, rate_limit_headers: dict[bytes, bytes]) -> None: ...

    def refused(
        self, call: "Call", status: int, body: bytes, rate_limit_headers: dict[bytes, bytes]
    ) -> GatewayError | None:
        """The error of a response other than 200; None where the call was sent again with another key."""

    def ended(self, call: "Call", end: Done | Failed) -> None: ...

    def on_response(self) -> None:
        """Record a sign of life that is no token."""

    def shape_of(self, api: str) -> dict[str, Any] | None:
        """The shape of the server's non-streaming responses, where it is known."""


class Call:
    """A job that starts at its prompt. Its events are forwarded as bytes."""

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
        keeps_ids = payload.keeps_ids or requests_token_ids(payload.body)
        return TracingScanner(keeps_ids=keeps_ids, engine_holds_text=bool(payload.sampling.stop))

    @property
    def has_tokens(self) -> bool:
        return self._scanner.tokens > 0

    @property
    def can_fail_over(self) -> bool:
        """Whether another worker can take over the job without a visible break in its stream."""
        return not self.has_tokens or not self.job.stream or self._so_far() is not None

    @property
    def reports_cached(self) -> bool | None:
        """Whether the server reports cached prompt tokens; None where it reported no usage."""
        return None if self._scanner.usage is None else self._scanner.reports_cached

    def is_counted_by_engine(self, now: float) -> bool:
        """Whether the engine's metrics include the call."""
        return self._scanner.tokens > 0 or (self.connection is not None and now - self.sent_at >= COUNTED_AFTER_S)

    def start(self, connection: Connection, request: Request) -> None:
        self.connection = connection
        self.last_activity_at = self.sent_at = self._now()
        connection.start(self, request)

    def reset(self) -> None:
        """Forget the first response: the call is about to be sent again."""
        self._status = 0
        self._pending = b""
        self._rate_limit_headers = {}

    def fail(self, error: GatewayError) -> None:
        """End the job with an error and close its connection."""
        if self.end is None:
            self.drop()
            self._finish(Failed(self.job.job_id, error, self._usage(), self._so_far()))

    def detach_connection(self) -> Connection | None:
        """Hand the connection over to the caller."""
        connection, self.connection = self.connection, None
        return connection

    def abandon(self) -> None:
        """Close the connection without reporting an end: the plan was cancelled."""
        self.drop()
        self.end = Failed(self.job.job_id, ClientClosed("the plan was cancelled"))

    def connection_lost(self, error: GatewayError) -> None:
        """End a job whose server sends no more: with an error, unless the finish reason had arrived."""
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

    # -- callbacks of the connection ---------------------------------------------------------------------------------

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
        if _CARRIAGE_RETURN in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        end = chunk.rfind(b"\n\n") + 2
        if end == 1:
            self._pending = chunk
            if len(chunk) > MAX_EVENT_BYTES:
                self.fail(WorkerLost(f"worker {self._worker.name} sent an event of more than {MAX_EVENT_BYTES} bytes"))
            return
        self._pending = chunk[end:]
        events = chunk[:end]
        # Events end between characters, so complete events can be checked on their own.
        if not events.isascii() and not is_utf8(events):
            self.fail(WorkerLost(f"worker {self._worker.name} sent invalid UTF-8"))
            return
        scanner = self._scanner
        raw, tokens = self._scan(events)
        if scanner.tokens != written:
            self.last_activity_at = self._now()
        else:
            self._worker.on_response()  # without a token this is a sign of life of the server, not of the job
        if raw:
            job = self.job
            self._emit_item(
                Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), tokens, raw, scanner.is_done)
            )
            self._index += 1
        if scanner.error is not None:
            # Immediately: later events may look like a normal end.
            self._refuse(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.is_done:
            connection = self.connection
            if connection is not None and not connection.is_complete:
                # The stream is complete: the job does not wait for the server to end its response.
                connection.discard_rest()
                self.on_end()
        elif scanner.tokens > self._max_tokens or scanner.events > 2 * self._max_tokens + MAX_EMPTY_EVENTS:
            self.fail(WorkerLost(f"worker {self._worker.name} exceeded the output limit of the call"))

    def on_end(self) -> None:
        self.connection = None
        if self.end is not None:
            return  # ended by the receiver of its items meanwhile
        scanner = self._scanner
        if self._status != 200:
            error = self._worker.refused(self, self._status, self._pending, self._rate_limit_headers)
            if error is not None:
                self._refuse(error)
        elif scanner.error is not None:
            self._refuse(WorkerLost(f"worker {self._worker.name} reported an error in the stream"))
        elif scanner.finish is None:
            self.fail(WorkerLost(f"worker {self._worker.name} ended the stream without a finish reason"))
        else:
            self._finish(self._done(scanner.finish))

    def on_lost(self, cause: str) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and connection.was_used and not self._status:
            # The server closed an idle connection while the request was being sent: it has not seen the request.
            self._worker.send(self)
            return
        self.connection_lost(WorkerLost(f"worker {self._worker.name} closed the connection: {cause}"))

    # -- items -------------------------------------------------------------------------------------------------------

    def _refuse(self, error: GatewayError) -> None:
        """End a job that the server answered with an error. Where it could not fetch the KV of a prefill, it may well
        compute the call, and the error does not count against it.
        """
        prefill = self.job.prefill
        if prefill is not None and prefill.is_handed_over and not self.has_tokens:
            error = NoWorker(f"worker {self._worker.name} did not take over the KV: {error.code}")
        self.fail(error)

    def _finish(self, end: Done | Failed) -> None:
        self.end = end
        self._worker.ended(self, end)
        self._emit_item(end)
        self._completion.job_ended()

    def _emit_item(self, item: Item) -> None:
        try:
            self._emit(item)
        except Exception as error:
            # Raised where the plan is awaited, which ends the plan's other calls; not in the connection's callback.
            self._completion.fail(error)

    def _usage(self) -> Usage:
        return self._scanner.usage or Usage(output_tokens=self._scanner.tokens)

    def _done(self, finish: FinishReason) -> Done:
        scanner = self._scanner
        reason = scanner.stop_reason
        shape = self._worker.shape_of(self.job.payload.api)
        done = Done(self.job.job_id, finish, self._usage(), scanner.usage_event, stop_reason=reason, shape=shape)
        # The client sees the usage that is billed.
        return done if scanner.is_usage_event_exact else with_usage(done, done.usage)

    def _so_far(self) -> ResumePoint | None:
        scanner = self._scanner
        if not isinstance(scanner, TracingScanner | ContinuationScanner):
            return self.job.resume_point
        return None if is_not_resumable(self.job.payload.body) else scanner.resume_point()
