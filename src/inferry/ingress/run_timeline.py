"""The timeline of a run: its calls with their waits and decisions, as JSON and for Perfetto. Pure.

Perfetto's viewer (ui.perfetto.dev) reads the JSON trace format of Chrome: a process per run, a track per step, and one
more for calls of a step that overlap.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from inferry.domain.attempts import Attempt
from inferry.domain.decision_words import describe
from inferry.domain.decisions import Decision, from_text, to_fields
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry

_GAPS = "between calls"
_MIN_GAP_S = 1e-6


class TimelineCall(NamedTuple):
    """One attempt. Times are Unix seconds, None where it did not get that far."""

    run_id: str
    parent_run: str | None
    step_id: str
    job_id: str
    attempt: int
    model: str
    lane: str
    status: str
    error: str | None
    worker: str | None
    arrived_at: float
    sent_at: float | None
    first_token_at: float | None
    ended_at: float | None
    batching_ms: float | None
    batch_size: int | None
    release_reason: str | None
    attained: bool | None
    tokens: tuple[int, int, int]
    cost_nanos: int | None
    decision: Decision | None


def recorded_call(entry: LedgerEntry) -> TimelineCall:
    arrived_at = entry.ended_at - entry.total_ms / 1000
    return TimelineCall(
        entry.run_id,
        entry.parent_run,
        entry.step_id,
        entry.job_id,
        entry.attempt,
        entry.model,
        entry.lane,
        entry.outcome.value,
        entry.error_code,
        entry.worker,
        arrived_at,
        None if entry.queue_ms is None else arrived_at + entry.queue_ms / 1000,
        None if entry.first_token_ms is None else arrived_at + entry.first_token_ms / 1000,
        entry.ended_at,
        entry.batching_ms,
        entry.batch_size,
        entry.release_reason,
        entry.attained,
        (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens),
        entry.cost_nanos,
        from_text(entry.decision),
    )


def live_call(job: InferenceJob, attempt: Attempt | None, decision: Decision | None, epoch: float) -> TimelineCall:
    """A call in flight; `attempt` is None where it shares another's execution.

    `decision` is that of now; `epoch` turns the gateway's time into Unix time.
    """
    plan = None if attempt is None else attempt.plan
    sent_at = None if attempt is None else attempt.sent_at
    first_token_at = None if attempt is None else attempt.first_token_at
    return TimelineCall(
        job.run_id,
        job.parent_run,
        job.step_id,
        job.job_id,
        job.attempt,
        job.route.model,
        job.lane.name,
        "queued" if attempt is None else attempt.state.value,
        None,
        None if plan is None else plan.worker,
        epoch + job.arrived_at,
        None if sent_at is None else epoch + sent_at,
        None if first_token_at is None else epoch + first_token_at,
        None,
        None if decision is None else decision.held_s * 1000,
        None if attempt is None else attempt.batch_size,
        None if plan is None else plan.reason.value,
        None if attempt is None else attempt.slo_attained,
        (job.footprint.prompt.expected, 0, 0 if attempt is None else attempt.output_tokens),
        None,
        decision,
    )


class PlacedCall(NamedTuple):
    """A call, when it was queued (a retry later than its job's arrival), and the gap before it."""

    call: TimelineCall
    queued_at: float
    gap_from: float | None


def place(calls: Sequence[TimelineCall], ended_before: Mapping[str, float]) -> list[PlacedCall]:
    """The calls in order of arrival. A gap is time since the last call of the run ended, with none in flight;
    `ended_before` has the latest end on earlier pages, by run.
    """
    latest_end: dict[str, float] = dict(ended_before)
    end_of_job: dict[str, float] = {}
    placed = []
    for call in sorted(calls, key=lambda one: (one.arrived_at, one.job_id, one.attempt)):
        queued_at = max(call.arrived_at, end_of_job.get(call.job_id, call.arrived_at))
        previous = latest_end.get(call.run_id)
        has_gap = call.attempt == 1 and previous is not None and previous + _MIN_GAP_S < call.arrived_at
        placed.append(PlacedCall(call, queued_at, previous if has_gap else None))
        end = float("inf") if call.ended_at is None else call.ended_at
        end_of_job[call.job_id] = end
        latest_end[call.run_id] = end if previous is None else max(previous, end)
    return placed


def timeline(run_id: str, placed: Sequence[PlacedCall], next_cursor: str | None, now: float) -> dict[str, Any]:
    return {
        "id": run_id,
        "object": "run.timeline",
        "generated_at": now,
        "data": [_item(one) for one in placed],
        "has_more": next_cursor is not None,
        "next_cursor": next_cursor,
    }


def _item(placed: PlacedCall) -> dict[str, Any]:
    call, queued_at, gap_from = placed
    decision = call.decision
    return {
        "run_id": call.run_id,
        "parent_run_id": call.parent_run,
        "step_id": call.step_id,
        "job_id": call.job_id,
        "attempt": call.attempt,
        "status": call.status,
        "error": call.error,
        "model": call.model,
        "lane": call.lane,
        "worker": call.worker,
        "arrived_at": call.arrived_at,
        "sent_at": call.sent_at,
        "first_token_at": call.first_token_at,
        "ended_at": call.ended_at,
        "gap_ms": None if gap_from is None else _ms(gap_from, call.arrived_at),
        "queue_ms": _ms(queued_at, call.sent_at),
        "batching_ms": None if call.batching_ms is None else round(call.batching_ms, 3),
        "prefill_ms": _ms(call.sent_at, call.first_token_at),
        "decode_ms": _ms(call.first_token_at, call.ended_at),
        "batch_size": call.batch_size,
        "tokens": dict(zip(("prompt", "cached", "output"), call.tokens, strict=True)),
        "cost_nanos": call.cost_nanos,
        "decision": None if decision is None else to_fields(decision),
        "decision_text": None if decision is None else describe(decision, call.worker),
    }


def perfetto(run_id: str, placed: Sequence[PlacedCall], next_cursor: str | None, now: float) -> dict[str, Any]:
    """A trace for ui.perfetto.dev. Times are microseconds since 1970; calls in flight end now."""
    events: list[dict[str, Any]] = []
    tracks = _Tracks(events)
    for call, queued_at, gap_from in placed:
        ended_at = now if call.ended_at is None else call.ended_at
        if gap_from is not None:
            track = tracks.of(call.run_id, _GAPS, gap_from, call.arrived_at)
            events.append(_slice("tools", "tools", track, gap_from, call.arrived_at))
        track = tracks.of(call.run_id, call.step_id, queued_at, ended_at)
        details = _details(PlacedCall(call, queued_at, gap_from))
        events.append(
            _slice(f"{call.lane} {call.model}: {call.status}", call.lane, track, queued_at, ended_at, details)
        )
        sent_at = ended_at if call.sent_at is None else max(call.sent_at, queued_at)
        events.append(_slice("queue", call.lane, track, queued_at, sent_at))
        if call.batching_ms:
            held_until = min(sent_at, queued_at + call.batching_ms / 1000)
            events.append(_slice("batching", call.lane, track, queued_at, held_until))
        if call.sent_at is not None:
            first_token_at = ended_at if call.first_token_at is None else call.first_token_at
            events.append(_slice("prefill", call.lane, track, sent_at, first_token_at))
            if call.first_token_at is not None:
                events.append(_slice("decode", call.lane, track, first_token_at, ended_at))
    other = {"run": run_id} | ({} if next_cursor is None else {"next_cursor": next_cursor})
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _details(placed: PlacedCall) -> dict[str, Any]:
    return {name: value for name, value in _item(placed).items() if value is not None}


class _Tracks:
    """Numbers of processes and tracks; a track holds calls that do not overlap."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], list[tuple[int, float]]] = {}
        self._count = 0

    def of(self, run_id: str, name: str, start: float, end: float) -> tuple[int, int]:
        """Process and track for a call of the step in this time."""
        process = self._processes.get(run_id)
        if process is None:
            process = self._processes[run_id] = len(self._processes) + 1
            self._name("process_name", process, 0, f"run {run_id}")
        tracks = self._tracks.setdefault((run_id, name), [])
        for index, (number, busy_until) in enumerate(tracks):
            if busy_until <= start:
                tracks[index] = (number, end)
                return process, number
        self._count += 1
        tracks.append((self._count, end))
        self._name("thread_name", process, self._count, name if len(tracks) == 1 else f"{name} ({len(tracks)})")
        return process, self._count

    def _name(self, kind: str, process: int, track: int, name: str) -> None:
        self._events.append({"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}})


def _slice(
    name: str,
    category: str,
    track: tuple[int, int],
    start: float,
    end: float,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": track[0],
        "tid": track[1],
        "ts": round(start * 1e6),
        # Both ends are rounded, so that a slice never reaches beyond the one around it.
        "dur": max(0, round(end * 1e6) - round(start * 1e6)),
    }
    return event if details is None else event | {"args": details}


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start) * 1000, 3)
