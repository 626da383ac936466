"""The spans of a call, from its trace. Pure.

request (server) → for every attempt: queue (internal) and attempt (client) → prefill and decode (internal). The names
of attributes are those of OpenTelemetry's conventions for HTTP and generative AI; others begin with `inferry.`. Spans
hold numbers, names and ids, and nothing of a prompt or an output.
"""

from typing import Any, Literal, NamedTuple

from inferry.domain.decisions import Decision, from_text
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.tracing import CallTrace, JobTrace

OPERATIONS = {"chat": "chat", "completions": "text_completion", "embeddings": "embeddings", "score": "score"}
PROVIDER = "inferry"
_GENERATING = ("chat", "completions")
_QUEUE, _PREFILL, _DECODE = 1, 2, 3
"""Distances of span ids from their attempt's."""

Kind = Literal["server", "client", "internal"]
Attributes = dict[str, Any]


class SpanData(NamedTuple):
    """One span. Times are Unix seconds; `error` is the description of an error status."""

    name: str
    kind: Kind
    span_id: int
    parent_id: int | None
    started_at: float
    ended_at: float
    attributes: Attributes
    error: str | None = None


def spans_of(call: CallTrace) -> list[SpanData]:
    """All spans of a call that has ended, the request's first."""
    spans = [_request_span(call)]
    for job in call.jobs:
        ready_at: float | None = None
        for entry in job.entries:
            spans += _attempt_spans(call, job, entry, ready_at)
            ready_at = entry.ended_at
    return spans


def _request_span(call: CallTrace) -> SpanData:
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": call.path,
        "url.path": call.path,
        "http.response.status_code": call.status,
    }
    if call.error is not None:
        attributes["error.type"] = call.error
    if call.jobs:
        job = call.jobs[0]
        attributes |= _request_attributes(job)
        if job.entries:
            attributes |= _identity(job.entries[-1]) | _usage([one.entries[-1] for one in call.jobs if one.entries])
    parent = call.context.parent_id
    return SpanData(
        f"POST {call.path}",
        "server",
        call.span_id,
        None if parent is None else int(parent, 16),
        call.started_at,
        call.ended_at,
        attributes,
        # By the convention for HTTP servers an error of the client is no error of the server.
        call.error if call.is_failure else None,
    )


def _attempt_spans(call: CallTrace, job: JobTrace, entry: LedgerEntry, ready_at: float | None) -> list[SpanData]:
    """The spans of one attempt. A later attempt is queued since the one before has ended."""
    arrived_at = entry.ended_at - entry.total_ms / 1000
    queued_at = arrived_at if ready_at is None else max(ready_at, arrived_at)
    span_id = job.attempt_span_id(entry.attempt)
    decision = from_text(entry.decision)
    waited = {"inferry.lane": entry.lane, "inferry.attempt": entry.attempt} | _decision(decision, entry)
    sent_at = None if entry.queue_ms is None else arrived_at + entry.queue_ms / 1000
    failed = _error_type(entry) if entry.outcome in (Outcome.FAILED, Outcome.PREEMPTED, Outcome.EXPIRED) else None
    if entry.shared_with is not None or sent_at is None:
        if entry.shared_with is not None:
            return []  # it has no queue and no attempt of its own
        waited |= {"inferry.outcome": entry.outcome.value}
        if (error := _error_type(entry)) is not None:
            waited["error.type"] = error
        return [
            SpanData("queue", "internal", span_id + _QUEUE, call.span_id, queued_at, entry.ended_at, waited, failed)
        ]
    attributes = _request_attributes(job) | _identity(entry) | _usage([entry]) | _decision(decision, entry)
    attributes |= {"inferry.attempt": entry.attempt, "inferry.outcome": entry.outcome.value}
    optional = {
        "inferry.worker": entry.worker,
        "inferry.batch_size": entry.batch_size,
        "inferry.release_reason": entry.release_reason,
        "error.type": _error_type(entry),
        "gen_ai.response.finish_reasons": None if entry.finish is None else [entry.finish],
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    name = f"{attributes['gen_ai.operation.name']} {entry.model}"
    queue = SpanData("queue", "internal", span_id + _QUEUE, call.span_id, queued_at, max(queued_at, sent_at), waited)
    attempt = SpanData(name, "client", span_id, call.span_id, sent_at, entry.ended_at, attributes, failed)
    if entry.first_token_ms is None:
        return [queue, attempt]
    first_token_at = arrived_at + entry.first_token_ms / 1000
    prefill = SpanData("prefill", "internal", span_id + _PREFILL, span_id, sent_at, first_token_at, {})
    if job.request["api"] not in _GENERATING:
        return [queue, attempt, prefill]
    decode = SpanData("decode", "internal", span_id + _DECODE, span_id, first_token_at, entry.ended_at, {})
    return [queue, attempt, prefill, decode]


def _request_attributes(job: JobTrace) -> Attributes:
    request = job.request
    attributes = {
        "gen_ai.operation.name": OPERATIONS.get(request["api"], request["api"]),
        "gen_ai.provider.name": PROVIDER,
    }
    if request["api"] in _GENERATING:
        attributes |= {
            "gen_ai.request.max_tokens": request["max_tokens"],
            "gen_ai.request.temperature": request["temperature"],
            "gen_ai.request.top_p": request["top_p"],
            "inferry.stream": request["stream"],
        }
    if request["choices"] != 1:
        attributes["gen_ai.request.choice.count"] = request["choices"]
    return attributes


def _identity(entry: LedgerEntry) -> Attributes:
    attributes: Attributes = {
        "gen_ai.request.model": entry.model,
        "gen_ai.conversation.id": entry.run_id,
        "inferry.tenant": entry.tenant,
        "inferry.run_id": entry.run_id,
        "inferry.step_id": entry.step_id,
        "inferry.job_id": entry.job_id,
        "inferry.lane": entry.lane,
    }
    for name, value in (("inferry.parent_run_id", entry.parent_run), ("inferry.shared_with", entry.shared_with)):
        if value is not None:
            attributes[name] = value
    return attributes


def _usage(entries: list[LedgerEntry]) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": sum(entry.prompt_tokens for entry in entries),
        "gen_ai.usage.output_tokens": sum(entry.output_tokens for entry in entries),
        "gen_ai.usage.cache_read.input_tokens": sum(entry.cached_tokens for entry in entries),
    }


def _decision(decision: Decision | None, entry: LedgerEntry) -> Attributes:
    if decision is None:
        return {}
    attributes: Attributes = {
        "inferry.decision": entry.decision,
        "inferry.batching_ms": decision.held_s * 1000,
        "inferry.decision.candidates": decision.candidates,
    }
    for name in ("picked_by", "held_by", "limit", "limit_worker"):
        if (value := getattr(decision, name)) is not None:
            attributes[f"inferry.decision.{name}"] = value
    if decision.overflow is not None:
        attributes["inferry.decision.overflow"] = decision.overflow.reason
    return attributes


def _error_type(entry: LedgerEntry) -> str | None:
    return None if entry.outcome is Outcome.DONE else entry.error_code
