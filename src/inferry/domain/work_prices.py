"""What the work of a job costs, priced with learned costs.

Apart from `domain.work_costs`: attempts are priced for every call, so these functions are compiled. The process of vLLM
learns the costs too, and loads no compiled module.
"""

from typing import Final

from inferry.domain.work_costs import WorkCosts

PAIRS_PER_KV_TOKEN: Final = 40.0
"""Pairs of a prompt token and a context token before it that cost as much as one KV token read by a decode: prefill
reads each KV token once for many prompt tokens."""


def decode_s(costs: WorkCosts, tokens: float, context_tokens: float) -> float:
    """What output tokens add to their steps. `context_tokens` is the mean number of tokens before each."""
    return tokens * (costs.token_s + costs.kv_s * context_tokens)


def prefill_s(costs: WorkCosts, tokens: float, context_tokens: float) -> float:
    """What the last `tokens` of a prompt of `context_tokens` add to their steps."""
    return costs.prompt_s * tokens + costs.kv_s * prefill_kv_tokens(tokens, context_tokens)


def prefill_kv_tokens(tokens: float, context_tokens: float) -> float:
    """KV tokens read by a decode that cost as much as attention over the last `tokens` of a prompt."""
    return tokens * max(0.0, context_tokens - tokens / 2) / PAIRS_PER_KV_TOKEN
