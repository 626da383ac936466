"""A sequence: one generation inside the engine."""

from typing import Any

from inferry.domain.sampling import Sampling


class Sequence:
    """Prompt and output in one list. The first `computed` tokens are in the KV cache; the others are pending.

    Rule: 0 <= computed < len(tokens) between steps; blocks cover at least `computed`. There is no prefill or decode
    phase: pending tokens are computed in order, and after the last one the next token is sampled. A sequence that
    `is_pooled` ends there instead, with its `result`; `hidden_sum` is the runner's, over the tokens computed so far.
    Sequences with different `batch` numbers never share a padded pass.
    """

    __slots__ = (
        "arrival",
        "batch",
        "blocks",
        "computed",
        "gpu_seconds",
        "hidden_sum",
        "is_pooled",
        "key",
        "lane",
        "limit",
        "preemptions",
        "prompt_tokens",
        "result",
        "sampling",
        "seed",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        key: int,
        prompt_ids: list[int],
        *,
        sampling: Sampling,
        lane: int,
        arrival: int,
        limit: int,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        is_pooled: bool = False,
        batch: int = 0,
    ) -> None:
        self.key = key
        self.tokens = list(prompt_ids)
        self.prompt_tokens = len(prompt_ids)
        self.sampling = sampling
        self.lane = lane
        self.arrival = arrival
        self.limit = limit
        self.seed = seed
        self.stop_ids = stop_ids
        self.computed = 0
        self.blocks: list[int] = []
        self.gpu_seconds = 0.0
        self.preemptions = 0
        self.is_pooled = is_pooled
        self.batch = batch
        self.hidden_sum: Any = None
        self.result = b""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Order of sequences: by lane, then by arrival."""
        return (self.lane, self.arrival)
