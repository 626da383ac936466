"""What a plan of a step is, and the planner of the mode `continuous`. Pure: no sequence and no pool is changed."""

from collections.abc import Sequence as Ordered
from heapq import merge
from typing import Protocol

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.engine.sequences import Sequence


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a step. Batch-lane work is held back only if it has at least `min_held_tokens` tokens.

    Where prompts and decodes are planned apart, `phase_tokens` limits the prompt tokens between two decode steps, and
    `short_phase_tokens` where such phases are frequent.
    """

    max_sequences: int
    chunk_tokens: int
    block_tokens: int
    min_held_tokens: int = 8
    phase_tokens: int = 8_192
    short_phase_tokens: int = 512


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
        self, running: Ordered[Sequence], waiting: Ordered[Sequence], free_blocks: int, limits: Limits
    ) -> "tuple[StepPlan, Planner]":
        """Decide one step for sequences given in rank order."""


class ContinuousPlanner(Struct, frozen=True):
    """Sequences join and leave in every step. `may_hold`: batch-lane work was not held back in the step before."""

    may_hold: bool = True

    def plan(
        self, running: Ordered[Sequence], waiting: Ordered[Sequence], free_blocks: int, limits: Limits
    ) -> "tuple[StepPlan, ContinuousPlanner]":
        plan = plan_step(running, waiting, free_blocks, limits, may_hold=self.may_hold)
        return plan, ContinuousPlanner(not plan.held_back)


def plan_step(
    running: Ordered[Sequence], waiting: Ordered[Sequence], free_blocks: int, limits: Limits, *, may_hold: bool = True
) -> StepPlan:
    """Decide one step: every decode, and prompts within `chunk_tokens`."""
    still_running, preempted, free = allocate_running(running, free_blocks, limits.block_tokens)
    # A preempted sequence must not be overtaken in the same step by a new one of its rank or below.
    admitted, chunks = _fill_chunk(still_running, () if preempted else waiting, free, limits)
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


def allocate_running(
    running: Ordered[Sequence], free: int, block_tokens: int
) -> tuple[list[Sequence], list[Sequence], int]:
    """Blocks for every running token, by rank; the last in rank are preempted when there are too few."""
    still_running = list(running)
    preempted: list[Sequence] = []
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
            free += len(victim.blocks)
    return still_running, preempted, free


def blocks_to_start(sequence: Sequence, block_tokens: int) -> int:
    """Free blocks that a waiting sequence needs to run."""
    return -(-len(sequence.tokens) // block_tokens) - len(sequence.blocks)


def _fill_chunk(
    still_running: list[Sequence], waiting: Ordered[Sequence], free: int, limits: Limits
) -> tuple[list[Sequence], list[Work]]:
    """Prompt tokens by rank until the chunk is full. A waiting sequence is admitted in its order, if it fits."""
    admitted: list[Sequence] = []
    chunks: list[Work] = []
    budget = limits.chunk_tokens
    free_slots = limits.max_sequences - len(still_running)
    can_admit = True
    unfinished = [sequence for sequence in still_running if sequence.pending > 1]
    candidates = set(map(id, waiting[: max(0, free_slots)]))
    for sequence in merge(unfinished, waiting[: max(0, free_slots)], key=lambda s: s.rank):
        if budget == 0:
            break
        if id(sequence) in candidates:
            need = blocks_to_start(sequence, limits.block_tokens)
            # One spare block per running sequence: without it the new one would be preempted at the next block
            # boundary.
            running_count = len(still_running) + len(admitted)
            can_admit = can_admit and need + running_count <= free
            if not can_admit:
                continue  # strict order: no overtaking of a larger one
            free -= need
            admitted.append(sequence)
        tokens = min(budget, sequence.pending)
        budget -= tokens
        chunks.append(Work(sequence, tokens))
    return admitted, chunks
