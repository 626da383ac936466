"""Traces of calls: which are sampled, and when one is complete. Runs on the event loop; `export` must not block.

A client's `traceparent` makes its span the parent of the request's, and its decision on sampling holds. Otherwise a
fraction of calls is sampled by trace id, as OpenTelemetry's ParentBased(TraceIdRatioBased) does. Calls that are not
sampled pass the context on and export nothing.
"""

import random
import re
from collections.abc import Callable, Mapping

from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.streams import Failed
from inferry.domain.tracing import CallTrace, JobTrace, TraceContext

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")
_TRACE_ID_BITS = 64
"""The part of a trace id that decides on sampling: the last eight bytes."""


class Tracer:
    """`sample_ratio` is the fraction of traces that begin here and are exported, from 0 to 1; `max_per_s` bounds their
    number, so that a burst does not spend its CPU time on spans. A second's worth may begin at once."""

    def __init__(
        self, sample_ratio: float, clock: Clock, export: Callable[[CallTrace], None], *, max_per_s: float | None = None
    ) -> None:
        self._threshold = round(sample_ratio * (1 << _TRACE_ID_BITS))
        self._clock = clock
        self._export = export
        self._max_per_s = max_per_s
        self._left = max(1.0, max_per_s or 0.0)
        self._left_at = clock.now()
        # Not the random numbers of the process: a seed there must not repeat trace ids. Ids need not be secret.
        self._bits = random.Random().getrandbits  # noqa: S311

    def begin(self, headers: Mapping[bytes, bytes], path: str) -> CallTrace:
        """A request arrived."""
        return CallTrace(self._context(headers), self._new_span_id(), path, self._clock.wall())

    def adopt(self, call: CallTrace, job: InferenceJob) -> None:
        """Give a job its trace, before it is submitted. Without sampling it is a context to pass on."""
        trace = job.trace = JobTrace(call, self._new_span_id())
        call.open_jobs += 1
        if not call.context.sampled:
            return
        call.jobs.append(trace)
        sampling, payload = job.payload.sampling, job.payload
        trace.request = {
            "api": payload.api,
            "stream": job.stream,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "choices": payload.choices,
        }

    def ended(self, attempt: Attempt, now: float) -> None:
        """Subscribes to the job events. An attempt whose job is retried is not the job's end."""
        trace = attempt.job.trace
        if trace is not None and trace.call.context.sampled and attempt.ledger_entry is not None:
            trace.entries.append(attempt.ledger_entry)
            if attempt.resumed is None:
                end = attempt.end
                error = end.error if isinstance(end, Failed) else None
                if error is not None:
                    _note_error(trace.call, error, 200 if attempt.has_delivered_output else error.status)
                self._job_ended(trace.call)

    def shared_ended(self, trace: JobTrace, entry: LedgerEntry) -> None:
        """A job ended that shared the execution of another."""
        if not trace.call.context.sampled:
            return
        trace.entries.append(entry)
        if entry.outcome is not Outcome.DONE:
            trace.call.error = entry.error_code
        self._job_ended(trace.call)

    def refused(self, call: CallTrace, error: GatewayError, status: int) -> None:
        """The request was answered with an error."""
        if not call.is_ended:
            _note_error(call, error, status)
            self._end(call)

    def release(self, call: CallTrace) -> None:
        """A call that was held open for further jobs has no more of them."""
        self._job_ended(call)

    def _job_ended(self, call: CallTrace) -> None:
        call.open_jobs -= 1
        if not call.open_jobs:
            self._end(call)

    def _end(self, call: CallTrace) -> None:
        if not call.is_ended:
            call.is_ended = True
            call.ended_at = self._clock.wall()
            if call.context.sampled:
                self._export(call)

    def _context(self, headers: Mapping[bytes, bytes]) -> TraceContext:
        header = headers.get(b"traceparent")
        if header is not None and (given := _parsed(header)) is not None:
            state = headers.get(b"tracestate", b"")
            valid_state = state if _TRACESTATE.fullmatch(state) is not None else b""
            return TraceContext(*given, state=valid_state)
        trace_id = self._bits(128) or 1
        is_drawn = trace_id % (1 << _TRACE_ID_BITS) < self._threshold
        return TraceContext(f"{trace_id:032x}", None, is_drawn and self._may_begin())

    def _may_begin(self) -> bool:
        """Take one of the traces that may begin, where their number is bounded."""
        if self._max_per_s is None:
            return True
        now = self._clock.now()
        self._left = min(max(1.0, self._max_per_s), self._left + (now - self._left_at) * self._max_per_s)
        self._left_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _new_span_id(self) -> int:
        return self._bits(64) or 1


def _parsed(header: bytes) -> tuple[str, str, bool] | None:
    """Trace, span and whether it is sampled; None where the header is invalid by the W3C recommendation."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1)


def _note_error(call: CallTrace, error: GatewayError, status: int) -> None:
    call.error, call.status, call.is_failure = error.code, status, error.status >= 500
