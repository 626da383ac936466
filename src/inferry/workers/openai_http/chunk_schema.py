"""Events of an engine's stream, as far as the gateway reads them."""

from msgspec import UNSET, Raw, Struct, UnsetType


class _CachedTokens(Struct):
    cached_tokens: int | None = None


class ReportedUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class ChunkDelta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw | UnsetType = UNSET


class ChunkChoice(Struct):
    finish_reason: str | None = None
    delta: ChunkDelta | None = None
    text: str | None = None


class StreamEvent(Struct):
    choices: list[ChunkChoice] = []
    usage: ReportedUsage | None = None
    error: Raw | UnsetType = UNSET


class TracedDelta(Struct):
    content: str | None = None
    reasoning: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET


class TracedChoice(Struct):
    index: int = 0
    finish_reason: str | None = None
    delta: TracedDelta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw | UnsetType = UNSET
    stop_reason: str | int | None = None


class TracedEvent(Struct):
    """An event that may have token ids."""

    choices: list[TracedChoice] = []
    prompt_token_ids: Raw | UnsetType = UNSET
    usage: ReportedUsage | None = None
    error: Raw | UnsetType = UNSET
