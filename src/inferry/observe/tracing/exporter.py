"""Exports spans over OTLP/HTTP in batches, from a thread of its own.

Only the event loop calls `export`; only the thread calls the OTLP exporter. At most `max_queued` jobs wait with their
calls; later calls are dropped and counted, and so are spans that the collector does not accept. A request has at most
`max_batch` spans, however many a call has. Nothing here raises into a call.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from inferry.domain.tracing import CallTrace
from inferry.observe.tracing.spans import SpanData, spans_of

log = logging.getLogger(__name__)

# It quotes a client's malformed `tracestate` as a warning.
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

SPANS_OF_A_CALL = 5
"""Of one job and one attempt."""
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class OtlpExporter(Protocol):
    """The part of OpenTelemetry's exporter that is used."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


def otlp_exporter(endpoint: str, headers: Mapping[str, str], timeout_s: float) -> OtlpExporter:
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(headers), timeout=timeout_s)


class SpanExporter:
    """The queue of calls and the thread that exports their spans. `close` ends the thread."""

    def __init__(
        self,
        exporter: OtlpExporter,
        service_name: str,
        version: str,
        *,
        max_queued: int = 4096,
        max_batch: int = 512,
        interval_s: float = 1.0,
    ) -> None:
        self._exporter = exporter
        self._resource = Resource.create({"service.name": service_name, "service.version": version})
        self._scope = InstrumentationScope("inferry", version)
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._interval_s = interval_s
        self._queue: deque[CallTrace] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        # One writer each: jobs are queued and calls dropped on the event loop; the thread takes jobs, exports and loses
        # spans.
        self._queued_jobs = 0
        self._taken_jobs = 0
        self._dropped_calls = 0
        self._failed = 0
        self._exported = 0
        self._thread = threading.Thread(target=self._run, name="inferry-traces", daemon=True)
        self._thread.start()

    @property
    def exported(self) -> int:
        """Spans that the collector has accepted."""
        return self._exported

    @property
    def dropped_calls(self) -> int:
        """Calls whose spans were dropped because the queue was full."""
        return self._dropped_calls

    @property
    def failed(self) -> int:
        """Spans that the collector did not accept."""
        return self._failed

    def export(self, call: CallTrace) -> None:
        """Queue the spans of a call. Never blocks."""
        waiting_jobs = self._queued_jobs - self._taken_jobs
        if waiting_jobs + _jobs_of(call) > self._max_queued or self._closing.is_set():
            self._dropped_calls += 1
            return
        self._queued_jobs += _jobs_of(call)
        self._queue.append(call)
        if len(self._queue) * SPANS_OF_A_CALL >= self._max_batch and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Export what is queued, for `timeout_s` seconds at most. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._exporter.shutdown()  # ends the exporter's pause between two attempts

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            closing = self._closing.is_set()
            while self._queue:
                spans: list[ReadableSpan] = []
                while self._queue and len(spans) < self._max_batch:
                    call = self._queue.popleft()
                    self._taken_jobs += _jobs_of(call)
                    spans += self._spans(call)
                for first in range(0, len(spans), self._max_batch):
                    self._send(spans[first : first + self._max_batch])
            if closing:
                self._exporter.shutdown()
                return

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            accepted = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:
            # Without its message, which may name headers.
            log.warning("the trace exporter failed: %s", type(error).__name__)
            accepted = False
        if accepted:
            self._exported += len(spans)
        else:
            self._failed += len(spans)

    def _spans(self, call: CallTrace) -> list[ReadableSpan]:
        context = call.context
        state = TraceState.from_header([context.state.decode("ascii")]) if context.state else None
        trace_id = int(context.trace_id, 16)

        def span_context(span_id: int, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, span_id % (1 << 64) or 1, is_remote, TraceFlags(TraceFlags.SAMPLED), state)

        def readable(span: SpanData) -> ReadableSpan:
            parent = None if span.parent_id is None else span_context(span.parent_id, span.kind == "server")
            return ReadableSpan(
                name=span.name,
                context=span_context(span.span_id),
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                kind=_KINDS[span.kind],
                status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=round(span.started_at * 1e9),
                end_time=round(max(span.started_at, span.ended_at) * 1e9),
                instrumentation_scope=self._scope,
            )

        return [readable(span) for span in spans_of(call)]


def _jobs_of(call: CallTrace) -> int:
    return max(1, len(call.jobs))
