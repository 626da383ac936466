"""Response bodies of the Messages API, for the OpenAPI document only."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.ingress.openapi.responses import EarlyStop


class MessageErrorDetail(Struct, forbid_unknown_fields=True):
    type: str
    message: str


class MessageError(Struct, forbid_unknown_fields=True):
    """Body of every error of the Messages API, and the data of an `error` event, which has no `request_id`."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | UnsetType = UNSET


class TokenCount(Struct, forbid_unknown_fields=True):
    input_tokens: int


class MessageModel(Struct, forbid_unknown_fields=True):
    """A model, for clients of Anthropic's API. `created_at` is 1970 where it is unknown."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    lifecycle: Literal["active"]


class MessageModelList(Struct, forbid_unknown_fields=True):
    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageUsage(Struct, forbid_unknown_fields=True):
    """`input_tokens` are without those read from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["priority", "standard", "batch"]


class Message(Struct, forbid_unknown_fields=True):
    """A message of the assistant. `content` has blocks of the types `text`, `thinking` and `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Struct, forbid_unknown_fields=True):
    """The data of one event; `type` is the name of the event and says which of the fields there are."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessageErrorDetail | UnsetType = UNSET
    inferry: EarlyStop | UnsetType = UNSET
