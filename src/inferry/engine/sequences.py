"""A sequence: one generation inside the engine."""

from typing import Any

from inferry.domain.sampling import Sampling
from inferry.engine.matcher import Matcher
from inferry.engine.prefix_keys import next_key


class Sequence:
    """Prompt and output in one list. The first `computed` tokens are in the KV cache; the others are pending.

    Rule: 0 <= computed < len(tokens) between steps; blocks cover at least `computed`. There is no prefill or decode
    phase: pending tokens are computed in order, and after the last one the next token is sampled. A sequence that
    `is_pooled` ends there instead, with its `result`; `hidden_sum` is the runner's, over the tokens computed so far.

    With a `root_key` its full blocks are found and named in the prefix cache. `named_blocks` of them are named already;
    `cached_tokens` of its prompt were there when it started. `run`: its blocks are kept for the next call of this run.
    `matcher`: the grammar of its output, after its known tokens. `kv_quotas`: its tenant and its run, each with the
    tokens that its running sequences may have. Sequences with different `batch` numbers never share a padded pass.
    `is_batch`: its lane has no TTFT target. `adapter`: the number of its LoRA adapter, 0 for none. `logprobs`: of the
    last token that was collected, where it asks for them (`TokenLogprobs`).
    """

    __slots__ = (
        "_block_keys",
        "adapter",
        "arrival",
        "batch",
        "blocks",
        "cached_tokens",
        "computed",
        "gpu_seconds",
        "hidden_sum",
        "is_batch",
        "is_pooled",
        "key",
        "kv_quotas",
        "lane",
        "limit",
        "logprobs",
        "matcher",
        "named_blocks",
        "preemptions",
        "prompt_tokens",
        "result",
        "root_key",
        "run",
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
        root_key: bytes | None = None,
        run: str | None = None,
        kv_quotas: tuple[tuple[str, int], ...] = (),
        batch: int = 0,
        adapter: int = 0,
        is_batch: bool = False,
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
        self.root_key = root_key
        self.run = run
        self.kv_quotas = kv_quotas
        self.named_blocks = 0
        self.cached_tokens = 0
        self._block_keys: list[bytes] = []
        self.batch = batch
        self.matcher: Matcher | None = None
        self.adapter = adapter
        self.is_batch = is_batch
        self.logprobs: tuple[float, list[tuple[int, float]]] | None = None
        self.hidden_sum: Any = None
        self.result = b""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def block_keys(self, first: int, end: int, block_tokens: int) -> list[bytes]:
        """Keys of its blocks from `first` to before `end`, all full. Each one is computed once. Needs a `root_key`."""
        keys = self._block_keys
        assert self.root_key is not None
        for index in range(len(keys), end):
            block = self.tokens[index * block_tokens : (index + 1) * block_tokens]
            keys.append(next_key(keys[-1] if keys else self.root_key, block))
        return keys[first:end]

    def prefix_keys(self, block_tokens: int) -> list[bytes]:
        """Keys of the blocks that a waiting sequence need not compute. The last token is always computed."""
        return [] if self.root_key is None else self.block_keys(0, (len(self.tokens) - 1) // block_tokens, block_tokens)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of sequences: by lane, then by arrival."""
        return (self.lane, self.arrival)
