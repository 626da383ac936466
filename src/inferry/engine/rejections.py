"""Requests that an engine refuses. Pure."""

from msgspec import Struct

from inferry.engine.messages import MAX_TOP_LOGPROBS, Rejected, Request


class EngineLimits(Struct, frozen=True):
    """What an engine has: tokens of its context and of its KV cache, token ids, and whether it compiles grammars."""

    context_tokens: int
    kv_tokens: int
    vocab_size: int
    has_grammars: bool


def rejection_of(request: Request, limits: EngineLimits) -> Rejected | None:
    """The refusal of a request; None where it can be computed."""
    if not request.prompt_ids:
        return Rejected(request.key, False, "the prompt is empty")
    wrong = _pooled_rejection(request, limits) if request.pooled else _length_rejection(request, limits)
    if wrong is not None:
        return wrong
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
        return Rejected(request.key, False, f"the prompt has token ids outside 0 to {limits.vocab_size - 1}")
    if request.sampling.constraint is not None and not limits.has_grammars:
        return Rejected(request.key, False, "structured output needs llguidance: install the `engine` extra")
    if request.sampling.logprobs is not None and not 0 <= request.sampling.logprobs <= MAX_TOP_LOGPROBS:
        return Rejected(request.key, False, f"log probabilities of 0 to {MAX_TOP_LOGPROBS} tokens can be reported")
    return None


def _length_rejection(request: Request, limits: EngineLimits) -> Rejected | None:
    tokens = len(request.prompt_ids)
    if request.sampling.max_tokens < 1:
        return Rejected(request.key, False, "max_tokens must be at least 1")
    if tokens >= limits.context_tokens:
        return Rejected(
            request.key,
            True,
            f"the prompt has {tokens} tokens; the context of {limits.context_tokens} tokens leaves none for output",
        )
    if tokens >= limits.kv_tokens:
        return Rejected(request.key, True, f"the prompt has {tokens} tokens; the KV cache holds {limits.kv_tokens}")
    return None


def _pooled_rejection(request: Request, limits: EngineLimits) -> Rejected | None:
    """A pooled sequence has no output and may fill the context."""
    tokens, limit = len(request.prompt_ids), min(limits.context_tokens, limits.kv_tokens)
    if tokens <= limit:
        return None
    return Rejected(request.key, True, f"the input has {tokens} tokens; the limit is {limit} tokens")
