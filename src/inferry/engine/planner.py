"""Plans the next step. Pure: no sequence and no pool is changed."""

from collections.abc import Sequence as Ordered
from heapq import merge
from itertools import islice

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.engine.blocks import BlockPool
from inferry.engine.sequences import Sequence


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a step. Batch-lane work is held back only if it has at least `min_held_tokens` tokens."""

    max_sequences: int
    chunk_tokens: int
    block_tokens: int
    min_held_tokens: int = 8


class Work(Struct, frozen=True, gc=False):
    """Compute the next `tokens` pending tokens of a sequence."""

    sequence: Sequence
    tokens: int


class StepPlan(Struct, frozen=True):
    """One step, applied in the order of its fields.

    `preempted` sequences free their blocks and wait again. `admitted` ones start to run. Every running sequence then
    has blocks for all its tokens. `work` is computed, single tokens first. `held_back`: batch-lane work was left out.
    """

    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    work: tuple[Work, ...] = ()
    held_back: bool = False


def plan_step(
    running: Ordered[Sequence],
    waiting: Ordered[Sequence],
    free_blocks: int,
    limits: Limits,
    *,
    may_hold: bool = True,
    shared: BlockPool | None = None,
) -> StepPlan:
    """Decide one step for sequences given in rank order. `shared`: the pool, where sequences share blocks.

    Rule: while any sequence runs or waits, the step computes something. Prompt tokens stay within `chunk_tokens`. When
    blocks run out, the last in rank is preempted, so the first in rank always progresses and every sequence finishes.
    """
    still_running, preempted, free = _allocate_running(running, free_blocks, limits.block_tokens, shared)
    # A preempted sequence must not be overtaken in the same step by a new one of its rank or below.
    admitted, chunks = _fill_chunk(still_running, () if preempted else waiting, free, limits, shared)
    singles = [sequence for sequence in still_running if sequence.pending == 1]
    held_back = False
    if may_hold and any(chunk.sequence.lane < Lane.P2 for chunk in chunks):
        # A step with a live prompt is kept short: its first token must not wait for batch-lane prompts.
        batch_tokens = sum(s.lane == Lane.P2 for s in singles) + sum(
            c.tokens for c in chunks if c.sequence.lane == Lane.P2
        )
        if batch_tokens >= limits.min_held_tokens:
            held_back = True
            singles = [s for s in singles if s.lane < Lane.P2]
            chunks = [c for c in chunks if c.sequence.lane < Lane.P2]
            admitted = [s for s in admitted if s.lane < Lane.P2]
    work = (*(Work(sequence, 1) for sequence in singles), *chunks)
    return StepPlan(tuple(preempted), tuple(admitted), work, held_back)


def _allocate_running(
    running: Ordered[Sequence], free: int, block_tokens: int, shared: BlockPool | None
) -> tuple[list[Sequence], list[Sequence], int]:
    """Blocks for every running token, by rank; the last in rank are preempted when there are too few."""
    still_running = list(running)
    preempted: list[Sequence] = []
    released: dict[int, int] = {}
    served = 0
    while served < len(still_running):
        sequence = still_running[served]
        need = -(-len(sequence.tokens) // block_tokens) - len(sequence.blocks)
        if need <= free:
            free -= need
            served += 1
        else:
            victim = still_running.pop()
            preempted.append(victim)
            free += len(victim.blocks) if shared is None else shared.count_freed(victim.blocks, released)
    return still_running, preempted, free


def _fill_chunk(
    still_running: list[Sequence],
    waiting: Ordered[Sequence],
    free: int,
    limits: Limits,
    shared: BlockPool | None,
) -> tuple[list[Sequence], list[Work]]:
    """Prompt tokens by rank until the chunk is full. A waiting sequence is admitted in its order, if it fits.

    A cached block counts as free, so a waiting sequence needs a free block for each block that no sequence holds.
    """
    admitted: list[Sequence] = []
    chunks: list[Work] = []
    budget = limits.chunk_tokens
    free_slots = limits.max_sequences - len(still_running)
    can_admit = True
    unfinished = [sequence for sequence in still_running if sequence.pending > 1]
    # A sequence that its tenant's own limit holds back takes no place among those that may be admitted.
    eligible = (s for s in waiting if s.kv_quota is None or not _exceeds_quota(s, still_running))
    next_waiting = list(islice(eligible, max(0, free_slots)))
    candidates = set(map(id, next_waiting))
    for sequence in merge(unfinished, next_waiting, key=lambda s: s.rank):
        if budget == 0:
            break
        pending = sequence.pending
        if id(sequence) in candidates:
            if sequence.kv_quota is not None and _exceeds_quota(sequence, (*still_running, *admitted)):
                continue
            need = -(-len(sequence.tokens) // limits.block_tokens)
            if shared is not None and can_admit:
                found = shared.find(sequence.prefix_keys(limits.block_tokens))
                need -= shared.count_held(found)
                pending -= len(found) * limits.block_tokens
            # One spare block per running sequence: without it the new one would be preempted at the next block
            # boundary.
            running_count = len(still_running) + len(admitted)
            can_admit = can_admit and need + running_count <= free
            if not can_admit:
                continue  # strict order: no overtaking of a larger one
            free -= need
            admitted.append(sequence)
        tokens = min(budget, pending)
        budget -= tokens
        chunks.append(Work(sequence, tokens))
    return admitted, chunks


def _exceeds_quota(sequence: Sequence, running: Ordered[Sequence]) -> bool:
    """Whether the tenant's running sequences have too many tokens for one more. The first one always runs."""
    assert sequence.kv_quota is not None
    tenant, most = sequence.kv_quota
    held = sum(len(one.tokens) for one in running if one.kv_quota is not None and one.kv_quota[0] == tenant)
    return held > 0 and held + len(sequence.tokens) > most
