"""How many tokens a call may write: its own limit, or a default."""

from typing import Final

from inferry.domain.errors import ContextLengthExceeded
from inferry.domain.jobs import Estimate
from inferry.domain.ports import ModelCard
from inferry.ingress.openai.decode import Api
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest

UNBOUNDED_OUTPUT_TOKENS: Final = 4096
"""Budget of a call without max_tokens to an engine whose context is unknown."""
COMPLETIONS_DEFAULT_TOKENS: Final = 16
"""The default of the completions API."""
MAX_OUTPUT_TOKENS: Final = 1_000_000
"""Output limit of a call without max_tokens to an engine whose context is unknown."""


def output_budget(requested_tokens: int | None, prompt: Estimate, card: ModelCard, api: Api) -> int:
    """Tokens that the job may write. Refuses a job that exceeds the context even at the lowest prompt estimate."""
    context = card.context_tokens
    if context is not None:
        if prompt.low >= context:
            raise ContextLengthExceeded(
                f"the prompt has {prompt.low} tokens; the context of `{card.name}` is {context} tokens, "
                "and at least one must be left for output",
                param="messages" if api == "chat" else "prompt",
            ).with_tokens(prompt.low, None, context)
        if requested_tokens is not None and prompt.low + requested_tokens > context:
            about = "" if prompt.is_exact else "at least "
            raise ContextLengthExceeded(
                f"{about}{prompt.low} prompt tokens and `max_tokens` {requested_tokens} exceed the context of "
                f"`{card.name}`, "
                f"{context} tokens",
                param="max_tokens",
            ).with_tokens(prompt.low, requested_tokens, context)
    if requested_tokens is not None:
        return requested_tokens
    left = UNBOUNDED_OUTPUT_TOKENS if context is None else max(1, context - prompt.expected)
    if api == "completions":
        return min(left, COMPLETIONS_DEFAULT_TOKENS)
    return left if card.default_output_tokens is None else min(left, card.default_output_tokens)


def output_limit(requested_tokens: int | None, choices: int, card: ModelCard) -> int:
    """Upper bound of the tokens that a correct engine writes, over all choices."""
    maximum = requested_tokens if requested_tokens is not None else card.context_tokens
    return MAX_OUTPUT_TOKENS if maximum is None else maximum * choices


def choice_count(wire: ChatCompletionRequest | CompletionRequest) -> int:
    """Choices that the engine generates, including those that `best_of` discards."""
    best_of = wire.best_of if isinstance(wire, CompletionRequest) else None
    return max(wire.n or 1, best_of or 1)
