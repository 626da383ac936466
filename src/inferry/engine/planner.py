"""Which sequences a step of the mode `continuous` computes, and when batch work is left out. Pure: changes nothing."""

from collections.abc import Sequence as Ordered
from heapq import merge
from itertools import islice
from typing import Protocol

from msgspec import Struct

from inferry.engine.blocks import BlockPool
from inferry.engine.sequences import Sequence


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a step. Batch-lane work is held back only if it has at least `min_held_tokens` tokens.

    Where prompts and decodes are planned apart, `phase_tokens` limits the prompt tokens between two decode steps. Where
    such phases would be frequent, `mixed_tokens` limits the prompt tokens beside decodes.
    """

    max_sequences: int
    chunk_tokens: int
    block_tokens: int
    min_held_tokens: int = 8
    phase_tokens: int = 8_192
    mixed_tokens: int = 512


class Work(Struct, frozen=True, gc=False):
    """Compute the next `tokens` pending tokens of a sequence."""

    sequence: Sequence
    tokens: int


class Padding(Struct, frozen=True):
    """Rows that a padded step computes beside its work: `rows` decode rows, and prompts of these `prompts` lengths."""

    rows: int = 0
    prompts: tuple[int, ...] = ()


NO_PADDING = Padding()


class StepPlan(Struct, frozen=True):
    """One step, applied in the order of its fields.

    `preempted` sequences free their blocks and wait again. `admitted` ones start to run. Every running sequence then
    has blocks for all its tokens. `work` is computed, single tokens first; work of a sequence that waits prepares it,
    and it holds its blocks while it waits. `held_back`: batch-lane work was left out.
    """

    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    work: tuple[Work, ...] = ()
    held_back: bool = False
    padding: Padding = NO_PADDING


class Planner(Protocol):
    """Plans the steps of one mode. Never changed: each plan comes with the planner of the step after it.

    Rule of every mode: while any sequence runs or waits, the step computes something. Prompt tokens, with their
    padding, stay within `chunk_tokens`. When blocks run out, the last in rank is preempted, so that the first in rank
    always progresses and every sequence finishes.
    """

    def plan(
        self,
        running: Ordered[Sequence],
        waiting: Ordered[Sequence],
        free_blocks: int,
        limits: Limits,
        shared: BlockPool | None = None,
    ) -> "tuple[StepPlan, Planner]":
        """Decide one step for sequences given in rank order. `shared`: the pool, where sequences share blocks."""


class ContinuousPlanner(Struct, frozen=True):
    """Sequences join and leave in every step. `may_hold`: batch-lane work was not held back in the step before."""

    may_hold: bool = True

    def plan(
        self,
        running: Ordered[Sequence],
        waiting: Ordered[Sequence],
        free_blocks: int,
        limits: Limits,
        shared: BlockPool | None = None,
    ) -> "tuple[StepPlan, ContinuousPlanner]":
        plan = plan_step(running, waiting, free_blocks, limits, may_hold=self.may_hold, shared=shared)
        return plan, ContinuousPlanner(not plan.held_back)


def plan_step(
    running: Ordered[Sequence],
    waiting: Ordered[Sequence],
    free_blocks: int,
    limits: Limits,
    *,
    may_hold: bool = True,
    shared: BlockPool | None = None,
) -> StepPlan:
    """Decide one step: every decode, and prompts within `chunk_tokens`."""
    still_running, preempted, free = allocate_running(running, free_blocks, limits.block_tokens, shared)
    # A preempted sequence must not be overtaken in the same step by a new one of its rank or below.
    admitted, chunks = _fill_chunk(still_running, () if preempted else waiting, free, limits, shared)
    singles = [sequence for sequence in still_running if sequence.pending == 1]
    held_back = False
    if may_hold and not all(chunk.sequence.is_batch for chunk in chunks):
        # A step with a live prompt is kept short: its first token must not wait for batch-lane prompts.
        batch_tokens = sum(s.is_batch for s in singles) + sum(c.tokens for c in chunks if c.sequence.is_batch)
        if batch_tokens >= limits.min_held_tokens:
            held_back = True
            singles = [s for s in singles if not s.is_batch]
            chunks = [c for c in chunks if not c.sequence.is_batch]
            admitted = [s for s in admitted if not s.is_batch]
    work = (*(Work(sequence, 1) for sequence in singles), *chunks)
    return StepPlan(tuple(preempted), tuple(admitted), work, held_back)


def allocate_running(
    running: Ordered[Sequence], free: int, block_tokens: int, shared: BlockPool | None
) -> tuple[list[Sequence], list[Sequence], int]:
    """Blocks for every running token, by rank. Sequences that have grown beyond a quota are preempted, and the last in
    rank when there are too few blocks.
    """
    still_running = list(running)
    preempted: list[Sequence] = []
    released: dict[int, int] = {}
    for victim in _beyond_quotas(running):
        still_running.remove(victim)
        preempted.append(victim)
        free += _freed(victim, shared, released)
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
            free += _freed(victim, shared, released)
    return still_running, preempted, free


def _freed(victim: Sequence, shared: BlockPool | None, released: dict[int, int]) -> int:
    """Blocks that become free with a victim. `released` counts those that earlier victims have given up."""
    return len(victim.blocks) if shared is None else shared.count_freed(victim.blocks, released)


def _beyond_quotas(running: Ordered[Sequence]) -> list[Sequence]:
    """Running sequences that have grown beyond the quota of their tenant or run, by rank. Its first one always runs."""
    beyond: list[Sequence] = []
    held: dict[str, int] = {}
    for sequence in running:
        tokens = len(sequence.tokens)
        if any(0 < held.get(name, 0) > most - tokens for name, most in sequence.kv_quotas):
            beyond.append(sequence)
        else:
            for name, _ in sequence.kv_quotas:
                held[name] = held.get(name, 0) + tokens
    return beyond


def _fill_chunk(
    still_running: list[Sequence],
    waiting: Ordered[Sequence],
    free: int,
    limits: Limits,
    shared: BlockPool | None,
) -> tuple[list[Sequence], list[Work]]:
    """Prompt tokens by rank until the chunk is full. A waiting sequence is admitted in its order, if it fits."""
    admitted: list[Sequence] = []
    chunks: list[Work] = []
    budget = limits.chunk_tokens
    free_slots = limits.max_sequences - len(still_running)
    can_admit = True
    unfinished = [sequence for sequence in still_running if sequence.pending > 1]
    # A sequence that the limit of its own tenant or run holds back takes no place among those that may be admitted.
    eligible = (s for s in waiting if not s.kv_quotas or not exceeds_quota(s, still_running))
    next_waiting = list(islice(eligible, max(0, free_slots)))
    candidates = set(map(id, next_waiting))
    for sequence in merge(unfinished, next_waiting, key=lambda s: s.rank):
        if budget == 0:
            break
        pending = sequence.pending
        if id(sequence) in candidates:
            if sequence.kv_quotas and exceeds_quota(sequence, (*still_running, *admitted)):
                continue
            if not can_admit:
                continue
            need, pending = to_start(sequence, limits.block_tokens, shared)
            # One spare block per running sequence: without it the new one would be preempted at the next block
            # boundary.
            running_count = len(still_running) + len(admitted)
            can_admit = need + running_count <= free
            if not can_admit:
                continue  # strict order: no overtaking of a larger one
            free -= need
            admitted.append(sequence)
        tokens = min(budget, pending)
        budget -= tokens
        chunks.append(Work(sequence, tokens))
    return admitted, chunks


def to_start(sequence: Sequence, block_tokens: int, shared: BlockPool | None) -> tuple[int, int]:
    """What a waiting sequence without blocks needs to run: free blocks, and tokens to compute.

    A cached block counts as free, so the sequence needs a free block for each block that no sequence holds.
    """
    need, pending = -(-len(sequence.tokens) // block_tokens), sequence.pending
    if shared is not None:
        found = shared.find(sequence.prefix_keys(block_tokens))
        need -= shared.count_held(found)
        pending -= len(found) * block_tokens
    return need, pending


def exceeds_quota(sequence: Sequence, running: Ordered[Sequence]) -> bool:
    """Whether running sequences of its tenant or run have too many tokens for one more. The first one always runs."""
    for holder, most in sequence.kv_quotas:
        held = sum(len(one.tokens) for one in running for name, _ in one.kv_quotas if name == holder)
        if held > 0 and held + len(sequence.tokens) > most:
            return True
    return False
