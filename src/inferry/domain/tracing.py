"""The trace of a call: the W3C trace context that it came with and carries on, and what its spans are made of.

A `CallTrace` belongs to one HTTP request, a `JobTrace` to each of its jobs. The tracer makes both, on the event loop; a
job refers to its trace, so that the trace ends with the job. Neither holds anything of a prompt or an output.
"""

from typing import Any, Final

from inferry.domain.ledger import LedgerEntry
from inferry.domain.values import Value

_SPAN_IDS: Final = 1 << 64
FIRST_JOB_SPAN: Final = 16
"""Span ids below a job's own are free for the request."""


class TraceContext(Value):
    """`trace_id` and `parent_id` are lowercase hex, `state` is the client's `tracestate`. `sampled`: whether spans are
    exported. `parent_id` is the span of the client; None where the trace begins here.
    """

    def __init__(self, trace_id: str, parent_id: str | None, sampled: bool, state: bytes = b"") -> None:
        self.trace_id: Final = trace_id
        self.parent_id: Final = parent_id
        self.sampled: Final = sampled
        self.state: Final = state


class CallTrace:
    """One HTTP request. Times are Unix seconds. `error` is the code of the error that ended it, `is_failure` whether
    that is an error of the gateway or a worker; `status` is that of the response, which may have begun before.
    """

    __slots__ = (
        "context",
        "ended_at",
        "error",
        "is_ended",
        "is_failure",
        "jobs",
        "open_jobs",
        "path",
        "span_id",
        "started_at",
        "status",
    )

    def __init__(self, context: TraceContext, span_id: int, path: str, started_at: float) -> None:
        self.context = context
        self.span_id = span_id
        self.path = path
        self.started_at = started_at
        self.ended_at = started_at
        self.status = 200
        self.error: str | None = None
        self.is_failure = False
        self.jobs: list[JobTrace] = []
        self.open_jobs = 0
        self.is_ended = False


class JobTrace:
    """One job of a call. `span_id` is the first of its consecutive span ids. `entries` are those of its attempts that
    have ended; `request` holds the numbers of the request that spans name. Both stay empty unless the call is sampled.
    """

    __slots__ = ("call", "entries", "request", "span_id")

    def __init__(self, call: CallTrace, span_id: int) -> None:
        self.call = call
        self.span_id = span_id
        self.request: dict[str, Any] = {}
        self.entries: list[LedgerEntry] = []

    def attempt_span_id(self, attempt: int) -> int:
        return (self.span_id + FIRST_JOB_SPAN * attempt) % _SPAN_IDS or 1

    def headers(self, attempt: int) -> bytes:
        """The header lines that make the engine's spans children of the attempt's."""
        context = self.call.context
        lines = b"traceparent: 00-%b-%016x-%02x\r\n" % (
            context.trace_id.encode(),
            self.attempt_span_id(attempt),
            context.sampled,
        )
        return lines + b"tracestate: %b\r\n" % context.state if context.state else lines

    def __repr__(self) -> str:
        return f"JobTrace({self.call.context.trace_id})"
