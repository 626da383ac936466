"""Prices of models, and what a call costs."""

from msgspec import Struct

NANOS_PER_UNIT = 1_000_000_000
"""Money is counted in integer billionths, so sums are exact."""


class Price(Struct, frozen=True, kw_only=True):
    """Price of a model: per million tokens, or per GPU-hour.

    `cached_input`: None if cached tokens cost as much as others. Without a price per token, GPU time is charged,
    measured or estimated.
    """

    input: float = 0.0
    cached_input: float | None = None
    output: float = 0.0
    gpu_hour: float | None = None

    @property
    def is_per_token(self) -> bool:
        return bool(self.input or self.output or self.cached_input)

    def nanos(self, prompt: int, cached: int, output: int, gpu_seconds: float | None = None) -> int:
        """Cost in billionths, rounded up."""
        if not self.is_per_token:
            return (
                0
                if self.gpu_hour is None or gpu_seconds is None
                else round(self.gpu_hour * gpu_seconds / 3600 * NANOS_PER_UNIT)
            )
        cached_rate = self.input if self.cached_input is None else self.cached_input
        # A price per million tokens is 1000 billionths per token.
        cost = 1000 * ((prompt - cached) * self.input + cached * cached_rate + output * self.output)
        return -int(-cost // 1)
