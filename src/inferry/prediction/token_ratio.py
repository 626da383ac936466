"""Token counts that are only known afterwards, learned from what engines report.

How many tokens a prompt has, where no tokenizer is at hand: bytes times a ratio.
"""

from inferry.domain.jobs import Estimate

DEFAULT_TOKENS_PER_BYTE = 0.25
"""Tokens a byte before anything was reported: English text in common vocabularies."""
TEMPLATE_TOKENS = 64
"""Tokens a chat template may add to what the client sent."""
LEARNING_RATE = 0.05
MAX_KEYS = 10_000
"""Templates are named by clients: what is remembered of them is bounded."""


class TokenRatios:
    """Tokens per byte of body for each (model, template), as an average that follows what is reported."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str | None], float] = {}

    def estimate(self, model: str, template: str | None, size: int) -> Estimate:
        ratio = self._ratios.get((model, template)) or self._ratios.get((model, None)) or DEFAULT_TOKENS_PER_BYTE
        expected = max(1, round(size * ratio))
        # Below there is no floor worth the name: a long run of spaces can be one token. Above, a token is a byte
        # or more of what was sent.
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
