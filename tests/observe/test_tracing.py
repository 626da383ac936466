"""Sampling of traces, and the export queue."""

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from inferry.domain.clock import ManualClock, SystemClock
from inferry.domain.tracing import CallTrace, JobTrace, TraceContext
from inferry.observe.tracing.exporter import SpanExporter
from inferry.observe.tracing.spans import spans_of
from inferry.observe.tracing.tracer import Tracer
from ledger.builders import an_entry
from support.builders import a_job

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def a_call() -> CallTrace:
    return CallTrace(TraceContext(TRACE, None, True), 7, "/v1/chat/completions", 100.0)


class Collector:
    """Takes spans once it is released."""

    def __init__(self, result: SpanExportResult | None = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.entered = threading.Event()
        self.released = threading.Event()
        self.spans: list[ReadableSpan] = []
        self.sizes: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        assert self.released.wait(120)
        if self.result is None:
            raise RuntimeError("a collector's error")
        self.spans += spans
        self.sizes.append(len(spans))
        return self.result

    def shutdown(self) -> None:
        self.released.set()


def test_the_export_queue_is_bounded_and_counts_what_it_drops() -> None:
    collector = Collector()
    exporter = SpanExporter(collector, "inferry", "1", max_queued=2, max_batch=1, interval_s=0.01)
    exporter.export(a_call())
    assert collector.entered.wait(120)
    for _ in range(5):
        exporter.export(a_call())
    assert exporter.dropped_calls == 3
    collector.released.set()
    exporter.close(120)
    assert (exporter.exported, exporter.failed, len(collector.spans)) == (3, 0, 3)
    exporter.export(a_call())
    assert exporter.dropped_calls == 4


def test_the_jobs_of_calls_bound_the_queue_and_the_spans_bound_a_request() -> None:
    def a_call_of(jobs: int) -> CallTrace:
        call = a_call()
        for number in range(jobs):
            job = JobTrace(call, 1 << 20 << number)
            job.request = {"api": "embeddings", "choices": 1}
            job.entries.append(an_entry(queue_ms=1.0, first_token_ms=5.0, total_ms=5.0))
            call.jobs.append(job)
        return call

    collector = Collector()
    exporter = SpanExporter(collector, "inferry", "1", max_queued=6, max_batch=4, interval_s=0.01)
    exporter.export(a_call())
    assert collector.entered.wait(120)
    for jobs in (4, 3, 2):
        exporter.export(a_call_of(jobs))
    assert exporter.dropped_calls == 1
    collector.released.set()
    exporter.close(120)
    assert exporter.exported == 1 + (1 + 4 * 3) + (1 + 2 * 3)
    assert max(collector.sizes) == 4


def test_an_exporter_that_raises_or_fails_counts_its_spans() -> None:
    for result in (None, SpanExportResult.FAILURE):
        collector = Collector(result)
        collector.released.set()
        exporter = SpanExporter(collector, "inferry", "1")
        exporter.export(a_call())
        exporter.close(120)
        assert (exporter.exported, exporter.failed) == (0, 1)


def test_a_fraction_of_new_traces_is_sampled_by_their_id() -> None:
    tracer = Tracer(0.25, SystemClock(), lambda call: None)
    contexts = [tracer.begin({}, "/").context for _ in range(4000)]
    for context in contexts:
        assert context.sampled == (int(context.trace_id, 16) % (1 << 64) < (1 << 62))
    assert 800 < sum(context.sampled for context in contexts) < 1200  # 7 standard deviations


def test_new_traces_are_bounded_per_second_and_those_of_clients_are_not() -> None:
    clock = ManualClock()
    tracer = Tracer(1.0, clock, lambda call: None, max_per_s=10.0)

    def sampled(calls: int, headers: dict[bytes, bytes]) -> int:
        return sum(tracer.begin(headers, "/").context.sampled for _ in range(calls))

    assert sampled(25, {}) == 10
    clock.advance(0.5)
    assert sampled(25, {}) == 5
    assert sampled(25, {b"traceparent": b"00-%b-%016x-01" % (TRACE.encode(), 7)}) == 25
    clock.advance(60.0)
    assert sampled(25, {}) == 10, "what was not used is kept for a second"


def test_a_call_that_is_not_sampled_carries_its_context_and_keeps_nothing_for_spans() -> None:
    exported: list[CallTrace] = []
    tracer = Tracer(0.0, ManualClock(), exported.append)
    calls, jobs = [tracer.begin({}, "/") for _ in range(2)], [a_job(), a_job()]
    for call, job in zip(calls, jobs, strict=True):
        tracer.adopt(call, job)
        assert job.trace is not None
        tracer.shared_ended(job.trace, an_entry())
        assert job.trace.headers(1).endswith(b"-00\r\n")
        assert (call.jobs, job.trace.entries, job.trace.request) == ([], [], {})
    assert not exported
    assert calls[0].context.trace_id != calls[1].context.trace_id


def test_span_ids_of_attempts_differ_and_are_never_zero() -> None:
    trace = JobTrace(a_call(), (1 << 64) - 16)
    ids = [trace.attempt_span_id(attempt) for attempt in range(1, 5)]
    assert len(set(ids)) == 4
    assert all(0 < one < 1 << 64 for one in ids)
    assert trace.headers(2) == b"traceparent: 00-%b-%016x-01\r\n" % (TRACE.encode(), ids[1])


def test_an_answer_that_arrives_at_once_has_no_decode() -> None:
    for api, expected in (("embeddings", ["prefill"]), ("score", ["prefill"]), ("chat", ["prefill", "decode"])):
        call = a_call()
        numbers = {"stream": False, "max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "choices": 1}
        job = JobTrace(call, 16)
        job.request = {"api": api, **numbers}
        job.entries.append(an_entry(queue_ms=1.0, first_token_ms=5.0, total_ms=5.0))
        call.jobs.append(job)
        assert [span.name for span in spans_of(call)[3:]] == expected
