"""What the gateway answers, as shapes: for the OpenAPI document alone, nothing is made of them.

Of what it writes itself everything is named, and a test reads real answers as these. An answer to a call may come from
an engine that says more, so those shapes name what there always is and forbid nothing.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.dispatch.gateway import AccountReport, CancelReport, RunStatus, WorkerReport
from inferry.domain.settings import LimitSettings, TenantSettings

# -- the process -----------------------------------------------------------------------------------------------------


class Index(Struct, forbid_unknown_fields=True):
    """What there is."""

    name: str
    version: str
    endpoints: list[str]


class Health(Struct, forbid_unknown_fields=True):
    """The process answers."""

    status: Literal["ok"]


class Ready(Struct, forbid_unknown_fields=True):
    """Whether new work is welcome, and the phase of every worker."""

    status: Literal["ready", "starting", "draining", "ledger_unavailable"]
    workers: dict[str, str]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    """`param` names the field or header that it is about."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, forbid_unknown_fields=True):
    """Every refusal and failure, also as the last event of a stream that broke off."""

    error: ErrorDetail


# -- models and calls ------------------------------------------------------------------------------------------------


class Model(Struct, forbid_unknown_fields=True):
    """A model. `ready`: some worker of it is up. `max_model_len` is null where it is not known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    ready: bool


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Model]


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class EarlyStop(Struct, forbid_unknown_fields=True):
    """Why the gateway ended an answer that was going well: a budget was used up."""

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
    """A whole answer to a chat call. `service_tier` is there where the call named one: that which was granted."""

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
    """One event of a streamed answer to a chat call."""

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
    """A whole answer to a completion call, and one event of a streamed one."""

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
    """`cached` are those of the prompts that the engine had computed before."""

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
    """In the queue."""

    p50_ms: float | None
    mean_ms: float | None
    max_ms: float | None


class RunTimes(Struct, forbid_unknown_fields=True):
    """`active_ms` is time with a call in flight, `queued_ms` the part of it with nothing at a worker, `tool_ms` time
    between calls; `ratio` is active to both."""

    active_ms: float
    queued_ms: float
    tool_ms: float
    idle_ms: float
    ratio: float | None
    hint: str | None


class RunTree(Struct, forbid_unknown_fields=True):
    """The run with everything below it."""

    runs: int
    in_flight: int
    jobs: int
    tokens: RunTokens
    cost: float | None
    cost_nanos: int | None


class RunStep(Struct, forbid_unknown_fields=True, kw_only=True):
    """A job of the run: in flight with `output_tokens` so far, or ended with all the rest."""

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
    """One run. Times are seconds since 1970; money is in the currency of the prices, `cost_nanos` in billionths."""

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
    """The latest first. `next_cursor` is what `cursor` must be for those after them."""

    object: Literal["list"]
    data: list[RunListItem]
    has_more: bool
    next_cursor: str | None


class CancelledRun(CancelReport, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cancel found and did, in jobs of the whole tree.

    Each job is counted once. `queued` had nothing at an engine and never will; `plan_runner` had been sent to one. Of
    these, `freed` are confirmed by their engine to hold nothing any more, and `unconfirmed` are the others.
    """

    id: str
    object: Literal["run.cancelled"]
    status: RunStatus


# -- administration --------------------------------------------------------------------------------------------------


class WorkerList(Struct, forbid_unknown_fields=True):
    workers: list[WorkerReport]


class TenantDetail(TenantSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant; limits that it does not have are left out."""

    name: str
    source: Literal["config", "database"]
    valid_keys: int


class TenantList(Struct, forbid_unknown_fields=True):
    tenants: list[TenantDetail]


class RemovedTenant(Struct, forbid_unknown_fields=True):
    name: str
    revoked_keys: int


class KeyDetail(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key, without anything that would help to use it. Times are seconds since 1970."""

    id: str
    tenant: str
    label: str
    status: Literal["valid", "expired", "revoked"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    limits: LimitSettings


class CreatedKey(KeyDetail, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key. `key` is its text: in this answer and nowhere else."""

    key: str


class KeyList(Struct, forbid_unknown_fields=True):
    keys: list[KeyDetail]
