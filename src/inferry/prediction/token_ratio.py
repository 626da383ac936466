"""Prompt tokens of models without a known tokenizer: bytes times a ratio learned from reported usage."""

from typing import Final

from inferry.domain.jobs import Estimate

DEFAULT_TOKENS_PER_BYTE: Final = 0.25
"""Tokens per byte before the first report: English text in common vocabularies."""
TEMPLATE_TOKENS: Final = 64
"""Tokens that a chat template may add to the client's text."""
LEARNING_RATE: Final = 0.05
MAX_KEYS: Final = 10_000
"""Clients choose the names of templates, so their number is bounded."""


class TokenRatios:
    """Tokens per byte of body for each (model, template), as a moving average of reported usage."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str | None], float] = {}

    def estimate(self, model: str, template: str | None, size: int) -> Estimate:
        ratio = self._ratios.get((model, template)) or self._ratios.get((model, None)) or DEFAULT_TOKENS_PER_BYTE
        expected = max(1, round(size * ratio))
        # There is no useful lower bound: a long run of spaces can be one token. The upper bound is one token per byte.
        return Estimate(1, expected, max(expected, size + TEMPLATE_TOKENS))

    def learn(self, model: str, template: str | None, size: int, tokens: int) -> None:
        if size <= 0 or tokens <= 0:
            return
        seen = tokens / size
        for key in {(model, template), (model, None)}:
            ratio = self._ratios.get(key)
            if ratio is None and len(self._ratios) >= MAX_KEYS:
                continue
            self._ratios[key] = seen if ratio is None else ratio + LEARNING_RATE * (seen - ratio)
