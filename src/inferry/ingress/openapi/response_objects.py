"""Response bodies of the Responses API, for the OpenAPI document only."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.ingress.openapi.responses import EarlyStop


class ResponseFailure(Struct, forbid_unknown_fields=True):
    """Why a response failed. `type` is the code of the gateway's error."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt", "insufficient_quota"]
    message: str
    type: str | None


class ResponseInputDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(Struct, forbid_unknown_fields=True):
    reasoning_tokens: int


class ResponseUsage(Struct, forbid_unknown_fields=True):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class Response(Struct, forbid_unknown_fields=True):
    """`output` has items of the types `message`, `reasoning`, `function_call` and `custom_tool_call`. `tools` are those
    that the model got."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    service_tier: Literal["default", "priority", "flex"]
    output: list[dict[str, Any]]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    completed_at: int | None
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Struct, forbid_unknown_fields=True):
    """The data of one event; `type` is the name of the event and says which of the fields there are."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    inferry: EarlyStop | UnsetType = UNSET


class ResponseItems(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
