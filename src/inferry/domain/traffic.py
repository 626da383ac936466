"""Recent traffic as the ledger has it: where the time of calls went, by lane, worker and tenant."""

from msgspec import Struct


class LaneTraffic(Struct, frozen=True, kw_only=True):
    """Attempts of one lane that ended in the period. Times are means in milliseconds, None where unknown.

    `queue_ms` is without `batching_ms`, the part of the wait in which the job was held to share a batch. `prefill_ms`:
    from sending to the first token. `decode_ms`: from there to the end. `tool_ms`: time between the end of a run's
    calls and its next call, over the calls that have such a time (`tool_calls`). `worker_s`: seconds on workers, summed
    over all attempts. `top_tenant` used the largest part of them, `top_tenant_share`.
    """

    lane: str
    attempts: int
    done: int
    cancelled: int
    expired: int
    failed: int
    queue_ms: float | None
    batching_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    tool_ms: float | None
    tool_calls: int
    worker_s: float
    prompt_tokens: float
    prompt_tokens_sd: float
    output_tokens: float
    cached_ratio: float | None
    templated_ratio: float
    top_tenant: str | None = None
    top_tenant_share: float = 0.0


class WorkerTraffic(Struct, frozen=True, kw_only=True):
    """Attempts of one worker. `prefill_ms` and `itl_ms` are means: until the first token, and between two tokens."""

    worker: str
    attempts: int
    failed: int
    prefill_ms: float | None
    itl_ms: float | None
    computed_prompt_tokens: int
    output_tokens: int


class TenantTraffic(Struct, frozen=True, kw_only=True):
    """Attempts of one tenant. `cost` is in the currency of the prices, None without a price."""

    tenant: str
    attempts: int
    tokens: int
    cost: float | None
    queue_ms: float | None


class Traffic(Struct, frozen=True, kw_only=True):
    """Attempts that ended between `since` and `until` (Unix seconds), the latest ones where there are many."""

    since: float
    until: float
    attempts: int
    runs: int
    lanes: tuple[LaneTraffic, ...] = ()
    workers: tuple[WorkerTraffic, ...] = ()
    tenants: tuple[TenantTraffic, ...] = ()


class RecordedCall(Struct, frozen=True, kw_only=True):
    """A call as the ledger has it, without its content. Times are milliseconds since `arrived_at` (Unix seconds)."""

    arrived_at: float
    tenant: str
    run_id: str
    model: str
    lane: str
    template_id: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float
    engine_batch: float | None
    attained: bool | None
    cost_nanos: int | None
    gpu_seconds: float | None
