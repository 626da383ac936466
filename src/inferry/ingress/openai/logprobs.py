"""Log probabilities that a call asks for, where the gateway writes them itself. Other workers read the body."""

from typing import Final

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest

_MAX_IN_CHAT: Final = 20
_MAX_IN_COMPLETIONS: Final = 5


def requested_logprobs(wire: ChatCompletionRequest | CompletionRequest) -> int | None:
    """The most likely tokens to report with every token and its log probability; None to report neither."""
    if isinstance(wire, ChatCompletionRequest):
        if wire.top_logprobs is not None and not wire.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        return _checked(wire.top_logprobs or 0, "top_logprobs", _MAX_IN_CHAT) if wire.logprobs else None
    if wire.logprobs is None:
        return None
    if wire.echo:
        raise UnsupportedFeature("`logprobs` of an echoed prompt are not supported by this model", param="logprobs")
    return _checked(wire.logprobs, "logprobs", _MAX_IN_COMPLETIONS)


def _checked(top: int, param: str, most: int) -> int:
    if not 0 <= top <= most:
        raise InvalidRequest(f"`{param}` must be between 0 and {most}, got {top}", param=param)
    return top
