"""Chunks and answers of chat completions, as far as other APIs translate them."""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class FunctionPiece(Struct):
    """`arguments` is JSON in a string. Some servers send the object itself."""

    name: str | None = None
    arguments: Any = None


class ToolCallPiece(Struct):
    """A tool call, or the next piece of one. Some servers send no index."""

    index: int | None = None
    id: str | None = None
    function: FunctionPiece | None = None


class MessagePiece(Struct):
    """A message, or the next piece of one."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class TopLogprob(Struct):
    """A token with its log probability. Some servers send no bytes."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class Logprobs(Struct):
    """The log probabilities of a choice, or of a piece of one."""

    content: list[TokenLogprob] | None = None


class Choice(Struct):
    """`stop_reason` (vLLM) and `matched_stop` (SGLang) are the stop string or token that ended the output. `logprobs`
    stays undecoded: few calls ask for them, and servers differ in what they send without being asked.
    """

    index: int = 0
    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: Any = None
    logprobs: Raw | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of a stream, or a whole answer."""

    id: str = ""
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
