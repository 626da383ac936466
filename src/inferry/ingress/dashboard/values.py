"""What the dashboard's endpoints answer with.

Times are Unix seconds, durations milliseconds where the name says so. Money is in the currency of the prices. Names and
ids are as clients sent them; prompts and outputs are in none of these.
"""

from typing import Literal

from msgspec import Struct

from inferry.dispatch.gateway import RunStatus
from inferry.ingress.openapi.responses import AlertDetail


class LaneState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane over the last minute. Targets are None where the lane has none; quantiles are None without calls."""

    lane: str
    ttft_target_ms: float | None
    itl_target_ms: float | None
    queue_limit: int
    queued: int
    calls_per_s: float
    queue_p50_ms: float | None
    queue_p95_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    attainment: float | None
    fairness: float | None


class WorkerState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. Limits are None where there is none. `share` is the part of its capacity in use after a failure."""

    name: str
    kind: str
    group: str
    phase: str
    since: float
    drained: bool
    breaker: str
    share: float
    models: list[str]
    running: int
    waiting: int
    max_sequences: int | None
    kv_used_tokens: int
    kv_capacity_tokens: int | None
    batch_mean: float | None
    gpu_utilization: float | None


class RunState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run with its sub-runs. `queued`, `prefill` and `decode` count its own calls in flight; a run without a name
    is one call. `is_partial`: the tree is so large that calls, tokens and cost cover a part of it."""

    id: str
    tenant: str
    status: RunStatus
    is_call: bool
    is_partial: bool
    sub_runs: int
    started_at: float
    last_active_at: float
    queued: int
    prefill: int
    decode: int
    tree_in_flight: int
    calls: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    cost: float | None


class RunStates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latest runs of all tenants."""

    runs: list[RunState]


class TenantCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant in the period. `cost` and `gpu_seconds` are None where none is known."""

    tenant: str
    calls: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    gpu_seconds: float | None
    cost: float | None


class TenantCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs since `since`, read from the ledger at `at`. `others` counts tenants that are not listed."""

    at: float
    since: float
    tenants: list[TenantCost]
    others: int


class GatewayTotals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole gateway over the last seconds. Token rates are of calls that have ended."""

    calls_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    refusals_per_s: float
    in_flight: int
    queued: int
    running: int
    max_sequences: int | None
    gpu_utilization: float | None
    attainment: float | None


class LaneSeries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lane: str
    queued: list[float | None]
    ttft_p95_ms: list[float | None]
    attainment: list[float | None]


class WorkerSeries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    running: list[float | None]
    kv_used_tokens: list[float | None]
    gpu_utilization: list[float | None]


class Series(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The course of figures, the oldest first: one value per element of `at`. None: not known then."""

    at: list[float]
    calls_per_s: list[float | None]
    output_tokens_per_s: list[float | None]
    in_flight: list[float | None]
    lanes: list[LaneSeries]
    workers: list[WorkerSeries]


class LiveState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway now. `costs` is None until the ledger was read, `alerts` where no rules are loaded."""

    at: float
    version: str
    started_at: float
    status: Literal["starting", "ready", "draining"]
    totals: GatewayTotals
    lanes: list[LaneState]
    workers: list[WorkerState]
    runs: list[RunState]
    costs: TenantCosts | None
    alerts: list[AlertDetail] | None


class Overview(LiveState, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway now, and the last minutes."""

    series: Series


class SessionState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a browser may do. `needs_key`: the gateway has an admin key. `csrf`: token for requests that change
    something, None without a session."""

    needs_key: bool
    signed_in: bool
    csrf: str | None
    expires_at: float | None


class TimelineStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt of one call. A time is None where the attempt has not got that far. `decision` says why the call was
    held, which limit bound it and why its worker was picked."""

    step_id: str
    job_id: str
    attempt: int
    status: str
    lane: str
    model: str
    worker: str | None
    arrived_at: float
    sent_at: float | None
    first_token_at: float | None
    ended_at: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    batch_size: int | None
    release_reason: str | None
    attained: bool | None
    error: str | None
    cost: float | None
    decision: str | None


class Timeline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latest attempts of a run by arrival. `at` is the gateway's time."""

    id: str
    tenant: str
    at: float
    steps: list[TimelineStep]
