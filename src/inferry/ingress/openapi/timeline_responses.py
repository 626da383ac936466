"""Response bodies of `/v1/runs/{id}/timeline`."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.ingress.openapi.responses import RunTokens


class CallOverflow(Struct, forbid_unknown_fields=True, kw_only=True):
    """What own workers would have missed after a predicted wait of `wait_ms`; without it, none of them was up."""

    reason: Literal["deadline", "target"]
    wait_ms: float | UnsetType = UNSET
    cost_nanos: int | UnsetType = UNSET


class CallDecision(Struct, forbid_unknown_fields=True, kw_only=True):
    """Why the call waited and why its worker was picked. `held_by` held it for `held_ms`: to share a batch,
    or while its run was paused. `waits_ms`: the time that it waited for capacity, by limit; `limit` of `limit_worker`
    bound it last. `filtered` counts the workers that it could not use, by reason. `overflow`: why it went to
    a hosted worker, and what that cost."""

    picked_by: str | None
    candidates: int
    filtered: dict[str, int] | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    held_by: str | UnsetType = UNSET
    held_ms: float | UnsetType = UNSET
    limit: str | UnsetType = UNSET
    limit_worker: str | UnsetType = UNSET
    waits_ms: dict[str, float] | UnsetType = UNSET
    overflow: CallOverflow | UnsetType = UNSET


class TimelineItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """One attempt. Times are seconds since 1970. `gap_ms` is the time since the run's last call ended, with none in
    flight: tools and the agent."""

    run_id: str
    parent_run_id: str | None
    step_id: str
    job_id: str
    attempt: int
    status: str
    error: str | None
    model: str
    lane: Literal["P0", "P1", "P2"]
    worker: str | None
    arrived_at: float
    sent_at: float | None
    first_token_at: float | None
    ended_at: float | None
    gap_ms: float | None
    queue_ms: float | None
    batching_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    batch_size: int | None
    tokens: RunTokens
    cost_nanos: int | None
    decision: CallDecision | None
    decision_text: str | None


class RunTimeline(Struct, forbid_unknown_fields=True, kw_only=True):
    """The first to arrive first. Calls in flight are on the last page."""

    id: str
    object: Literal["run.timeline"]
    generated_at: float
    data: list[TimelineItem]
    has_more: bool
    next_cursor: str | None


class PerfettoTrace(Struct, forbid_unknown_fields=True, kw_only=True):
    """A trace in the JSON format of Chrome; `otherData` has `run` and, where there are more calls, `next_cursor`."""

    displayTimeUnit: Literal["ms"]
    otherData: dict[str, str]
    traceEvents: list[dict[str, Any]]
