"""Sampling parameters."""

from msgspec import Struct

from inferry.domain.constraints import Constraint


class Sampling(Struct, frozen=True, kw_only=True, gc=False):
    """Sampling parameters for engines that take token ids. `constraint`: what the output must match.

    `logprobs`: the most likely tokens that are reported with each token and its log probability; None reports neither.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: int | None = None
