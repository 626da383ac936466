"""Response bodies, for the OpenAPI document only.

Bodies that the gateway writes are complete, and a test decodes real responses with these structs. The response to a
call may come from an engine with more fields, so these structs name the common fields and forbid none.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.dispatch.gateway import AccountReport, CancelReport, RunStatus, WorkerReport
from inferry.domain.tenant_settings import LimitSettings, TenantSettings
from inferry.ingress.run_tools import ToolUse

# -- the process -----------------------------------------------------------------------------------------------------


class Index(Struct, forbid_unknown_fields=True):
    """The endpoints."""

    name: str
    version: str
    endpoints: list[str]


class Health(Struct, forbid_unknown_fields=True):
    """The process responds."""

    status: Literal["ok"]


class Ready(Struct, forbid_unknown_fields=True):
    """Whether the gateway accepts calls, and the phase of every worker."""

    status: Literal["ready", "starting", "draining", "ledger_unavailable"]
    workers: dict[str, str]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    """`param` is the field or header that the error concerns."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, forbid_unknown_fields=True):
    """Body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


# -- models and calls ------------------------------------------------------------------------------------------------


class AdapterState(Struct, forbid_unknown_fields=True):
    """A LoRA adapter, and the workers that have loaded or unloaded it."""

    object: Literal["lora_adapter"]
    id: str
    loaded: bool
    workers: list[str]


class Model(Struct, forbid_unknown_fields=True):
    """A model or LoRA adapter. `ready`: a worker that serves it is ready. `max_model_len` is null where it is unknown,
    `parent` is the base model of an adapter. `tasks`: what the model does.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | None
    ready: bool
    tasks: list[Literal["classify", "embed", "generate", "score"]]


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Model]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class EarlyStop(Struct, forbid_unknown_fields=True):
    """The exhausted budget that ended a response early."""

    code: str
    message: str


class ResponseMessage(Struct):
    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET


class ChatChoice(Struct):
    index: int
    message: ResponseMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatCompletion(Struct):
    """Response of a chat call. `service_tier` is the granted tier, where the call named one."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    service_tier: str | UnsetType | None = UNSET
    inferry: EarlyStop | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: dict[str, Any]
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class ChatCompletionChunk(Struct):
    """One event of a streamed chat call."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    service_tier: str | UnsetType | None = UNSET
    inferry: EarlyStop | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Completion(Struct):
    """Response of a completion call, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    service_tier: str | UnsetType | None = UNSET
    inferry: EarlyStop | UnsetType = UNSET


# -- runs ------------------------------------------------------------------------------------------------------------


class RunTokens(Struct, forbid_unknown_fields=True):
    """`cached` are prompt tokens that the engine had in its prefix cache."""

    prompt: int
    cached: int
    output: int


class RunJobs(Struct, forbid_unknown_fields=True):
    in_flight: int
    ended: int
    done: int
    failed: int
    cancelled: int
    expired: int
    refused: int


class RunWaits(Struct, forbid_unknown_fields=True):
    """Times in the queue."""

    p50_ms: float | None
    mean_ms: float | None
    max_ms: float | None


class RunTimes(Struct, forbid_unknown_fields=True):
    """`active_ms` is time with a call in flight, `queued_ms` the part of it without a call at a worker, `tool_ms` time
    between calls. `ratio` is active time to the sum of active and tool time."""

    active_ms: float
    queued_ms: float
    tool_ms: float
    idle_ms: float
    ratio: float | None
    hint: str | None


class RunTree(Struct, forbid_unknown_fields=True):
    """Totals of the run and its sub-runs."""

    runs: int
    in_flight: int
    jobs: int
    tokens: RunTokens
    cost: float | None
    cost_nanos: int | None


class RunStep(Struct, forbid_unknown_fields=True, kw_only=True):
    """A job of the run. `output_tokens` is for jobs in flight, the other optional fields are for ended ones."""

    step_id: str
    job_id: str
    status: str
    model: str
    lane: Literal["P0", "P1", "P2"]
    arrived_at: float
    output_tokens: int | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    error: str | UnsetType | None = UNSET
    ended_at: float | UnsetType = UNSET
    tokens: RunTokens | UnsetType = UNSET
    queue_ms: float | UnsetType | None = UNSET
    first_token_ms: float | UnsetType | None = UNSET
    total_ms: float | UnsetType | None = UNSET
    cost_nanos: int | UnsetType | None = UNSET


class RunDetail(Struct, forbid_unknown_fields=True):
    """One run. Times are seconds since 1970; money is in the currency of the prices, `cost_nanos` in billionths.
    `tools` are those that the client named when it finished the run."""

    id: str
    object: Literal["run"]
    status: RunStatus
    cancelled_by_run: str | None
    parent_run_id: str | None
    lineage: list[str]
    started_at: float | None
    last_active_at: float | None
    finished_at: float | None
    steps: int
    jobs: RunJobs
    tokens: RunTokens
    waits: RunWaits
    cost: float | None
    cost_nanos: int | None
    budget: AccountReport | None
    time: RunTimes
    tools: dict[str, ToolUse]
    sub_runs: list[str]
    tree: RunTree
    latest_steps: list[RunStep]


class RunListItem(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["run"]
    status: RunStatus
    parent_run_id: str | None
    started_at: float
    last_active_at: float
    in_flight: int
    jobs: int
    tokens: RunTokens
    cost: float | None
    cost_nanos: int | None


class RunList(Struct, forbid_unknown_fields=True):
    """The latest first. `next_cursor` is the `cursor` of the next page."""

    object: Literal["list"]
    data: list[RunListItem]
    has_more: bool
    next_cursor: str | None


class CancelledRun(CancelReport, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a cancel, in jobs of the whole tree.

    Each job is counted once. `queued` jobs were evicted before they were sent; `running` ones had been sent to an
    engine. Of these, `freed` are confirmed by their engine as freed, and `unconfirmed` are the others.
    """

    id: str
    object: Literal["run.cancelled"]
    status: RunStatus


# -- administration --------------------------------------------------------------------------------------------------


class WorkerList(Struct, forbid_unknown_fields=True):
    workers: list[WorkerReport]


class AlertDetail(Struct, forbid_unknown_fields=True):
    """An alert. `since`: Unix seconds from which its condition has held."""

    name: str
    severity: Literal["warning", "critical"]
    state: Literal["pending", "firing"]
    since: float
    summary: str
    value: float
    labels: dict[str, str]


class AlertList(Struct, forbid_unknown_fields=True):
    alerts: list[AlertDetail]


class TenantDetail(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant. Limits that are not set are omitted."""

    name: str
    source: Literal["config", "database"]
    valid_keys: int


class TenantList(Struct, forbid_unknown_fields=True):
    tenants: list[TenantDetail]


class RemovedTenant(Struct, forbid_unknown_fields=True):
    name: str
    revoked_keys: int


class KeyDetail(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key without its text. Times are seconds since 1970."""

    id: str
    tenant: str
    label: str
    status: Literal["valid", "expired", "revoked"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    limits: LimitSettings


class CreatedKey(KeyDetail, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key. `key` is its text, which no other response has."""

    key: str


class KeyList(Struct, forbid_unknown_fields=True):
    keys: list[KeyDetail]
