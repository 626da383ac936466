"""Requests to `/v1/responses`, as far as the gateway reads them.

Texts and JSON objects are `Raw`, so that a long prompt is scanned and never copied. The options of chat completions are
passed on or refused (`openai.chat_options`). Fields that are named neither here nor there are ignored,
`client_metadata`, `safety_identifier` and the `prompt_cache_*` options among them.
"""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from inferry.ingress.openai.request_schema import ChatOptions, StreamOptions


class Part(Struct):
    """One part of a content; `type` says which of the fields it has."""

    type: str
    text: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET
    image_url: Raw | UnsetType = UNSET
    detail: str | None = None
    file_id: str | None = None
    file_data: Raw | UnsetType = UNSET
    file_url: str | None = None
    filename: str | None = None
    input_audio: Raw | UnsetType = UNSET


class InputItem(Struct):
    """One item of the input; `type` says which of the fields it has. Without a type it is a message or a reference."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Raw | UnsetType = UNSET
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET
    encrypted_content: str | None = None


class NestedTool(Struct):
    """A tool of a namespace, or a tool itself."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ResponseTool(NestedTool):
    tools: list[NestedTool] | None = None


class ResponseToolChoice(Struct):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[NestedTool] | None = None


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Raw | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(StreamOptions):
    include_obfuscation: bool | None = None


class ResponsesRequest(ChatOptions, kw_only=True):
    input: Raw
    instructions: Raw | UnsetType = UNSET
    previous_response_id: str | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw | UnsetType = UNSET
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Read only to refuse what they ask for.
    conversation: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    context_management: Raw | UnsetType = UNSET
    moderation: Raw | UnsetType = UNSET
