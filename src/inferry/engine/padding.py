"""Padding as work that a runner computes like any other: sequences without a meaning, in a block of their own."""

from inferry.domain.sampling import Sampling
from inferry.engine.planner import Padding, Work
from inferry.engine.sequences import Sequence

_GREEDY = Sampling(temperature=0.0)


def padding_work(padding: Padding, context_tokens: int, block: int, block_tokens: int) -> list[Work]:
    """Work whose results are dropped: decode rows with as many tokens as the longest of the pass, and prompts.

    All of it reads and writes `block`, which holds no sequence.
    """
    blocks = [block] * -(-context_tokens // block_tokens)
    work = [Work(_sequence(-1 - row, context_tokens, context_tokens - 1, blocks), 1) for row in range(padding.rows)]
    for index, tokens in enumerate(padding.prompts):
        blocks = [block] * -(-tokens // block_tokens)
        work.append(Work(_sequence(-1 - index, tokens + 1, 0, blocks), tokens))  # one more: no token is sampled
    return work


def _sequence(key: int, tokens: int, computed: int, blocks: list[int]) -> Sequence:
    sequence = Sequence(key, [0] * tokens, sampling=_GREEDY, lane=0, arrival=0, limit=tokens)
    sequence.computed = computed
    sequence.blocks = blocks
    return sequence
