"""Requests to `/v1/messages`, as far as the gateway reads them.

Texts and JSON objects are `Raw`, so that a long prompt is scanned and never copied. The options of chat completions are
passed on or refused (`openai.chat_options`). Fields that are named neither here nor there are ignored, `cache_control`
and `context_management` among them.
"""

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from inferry.ingress.openai.request_schema import ChatOptions


class Source(Struct):
    """The data of an image."""

    type: str
    media_type: str = ""
    data: Raw | UnsetType = UNSET
    url: Raw | UnsetType = UNSET


class Block(Struct):
    """One block of a content; `type` says which of the fields it has."""

    type: str
    text: Raw | UnsetType = UNSET
    source: Source | None = None
    id: str = ""
    name: str = ""
    input: Raw | UnsetType = UNSET
    tool_use_id: str = ""
    content: Raw | UnsetType = UNSET
    is_error: bool | None = None
    thinking: Raw | UnsetType = UNSET


class Turn(Struct):
    """One message. Its content stays undecoded: a string or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Raw


class Tool(Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(Struct):
    user_id: str | None = None


class CountTokensRequest(ChatOptions, kw_only=True):
    """The fields that are part of the prompt, and options."""

    messages: list[Turn]
    system: Raw | UnsetType = UNSET
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Read only to refuse what they ask for.
    container: Raw | UnsetType = UNSET
    mcp_servers: Raw | UnsetType = UNSET


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
