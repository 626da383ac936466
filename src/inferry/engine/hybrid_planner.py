"""The planner of the mode `hybrid`: prompts in phases of their own. Pure.

Prompts between two tokens of a stream lengthen its inter-token latency, so prompts are computed rarely and many at a
time. A prefill phase computes the prompts of a group: of sequences that take the open slots, and of sequences for the
next slots. The latter are prepared: they hold their blocks, all their tokens but the last are computed, and they decode
from the step in which a slot is free. While prepared sequences take the free slots, no stream waits for a prompt.

- Where the prepared group would fill slots for `QUIET_STEPS` decode steps, at the rate at which slots become free, the
  phase may compute `phase_tokens`. Fewer than 1 % of the inter-token latencies of a stream then contain a phase. It
  begins when an eighth of the slots are open, or with any open slot `QUIET_STEPS` steps after the last phase.
- Otherwise phases would be frequent. While a slot is open, decode steps then compute prompts too: `mixed_tokens`, and
  in proportion more where more than an eighth of the slots are open.
- A prompt of a higher lane than every sequence that decodes or is prepared is begun at once.

While no sequence decodes, prompts are limited by `chunk_tokens` alone.
"""

from collections.abc import Sequence as Ordered
from heapq import merge
from typing import Final

from msgspec import Struct

from inferry.engine.blocks import BlockPool
from inferry.engine.planner import Limits, StepPlan, Work, allocate_running, exceeds_quota, to_start
from inferry.engine.sequences import Sequence

QUIET_STEPS: Final = 100
"""Decode steps between two phases, after which fewer than 1 % of inter-token latencies contain one."""
OPEN_PART: Final = 8
"""Open slots cost throughput: from this part of all slots on, prompts do not wait for quiet steps."""
RATE_ALPHA: Final = 0.01
"""Weight of the latest decode step in the rate at which slots become free."""


class HybridPlanner(Struct, frozen=True):
    """`decode_steps` have followed the last prefill step. `phase_tokens` are the prompt tokens since the last decode
    step, `phase_limit` is their limit. `seats` sequences had slots after the last plan; `freed_per_step` of them leave
    in a decode step.
    """

    decode_steps: int = 0
    phase_tokens: int = 0
    phase_limit: int = 0
    seats: int = 0
    freed_per_step: float = 0.0

    def plan(
        self,
        running: Ordered[Sequence],
        waiting: Ordered[Sequence],
        free_blocks: int,
        limits: Limits,
        shared: BlockPool | None = None,
    ) -> "tuple[StepPlan, HybridPlanner]":
        prepared = [sequence for sequence in waiting if sequence.blocks]
        # Prepared sequences come last: they give up their blocks before one that runs.
        kept, preempted, free = allocate_running([*running, *prepared], free_blocks, limits.block_tokens, shared)
        # A preempted sequence must not be overtaken in the same step by a new one of its rank or below.
        newcomers = [] if preempted else [sequence for sequence in waiting if not sequence.blocks]
        waits = set(map(id, prepared))
        still_running = [sequence for sequence in kept if id(sequence) not in waits]
        still_prepared = [sequence for sequence in kept if id(sequence) in waits]
        seats = _seats(still_running, still_prepared, newcomers, free, limits, shared)
        phase_limit, is_mixed = self._phase_limit(seats, limits)
        joining, chunks, _ = _fill_chunk(seats, min(limits.chunk_tokens, phase_limit - self.phase_tokens))
        tokens = sum(chunk.tokens for chunk in chunks)
        seated = len(running) + len(seats.seated) + len(joining)
        freed_per_step = self.freed_per_step + RATE_ALPHA * max(0, self.seats - len(running))
        admitted = (*seats.seated, *joining)
        if tokens and not is_mixed:
            plan = StepPlan(tuple(preempted), admitted, tuple(chunks))
            return plan, HybridPlanner(0, self.phase_tokens + tokens, phase_limit, seated, freed_per_step)
        freed_per_step -= RATE_ALPHA * self.freed_per_step
        plan = StepPlan(tuple(preempted), admitted, (*(Work(one, 1) for one in seats.decodes), *chunks))
        return plan, HybridPlanner(0 if tokens else self.decode_steps + 1, 0, 0, seated, freed_per_step)

    def _phase_limit(self, seats: "_Seats", limits: Limits) -> tuple[int, bool]:
        """How many prompt tokens the phase may have that runs or can begin now, 0 where sequences decode instead; and
        whether they are computed beside decodes.
        """
        if not seats.decodes:
            return max(self.phase_limit, self.phase_tokens + limits.chunk_tokens), False
        if self.phase_tokens:
            return self.phase_limit, False
        open_slots = seats.open_slots + len(seats.unfinished)
        best_lane = min(sequence.lane for sequence in (*seats.decodes, *seats.prepared))
        has_urgent = any(sequence.lane < best_lane for sequence in (*seats.unfinished, *seats.newcomers[:1]))
        if not open_slots and not has_urgent:
            return 0, False
        _, _, complete = _fill_chunk(seats, limits.phase_tokens)
        if complete + len(seats.prepared) < max(1.0, self.freed_per_step * QUIET_STEPS):
            open_eighths = open_slots * OPEN_PART / limits.max_sequences
            return int(limits.mixed_tokens * max(1.0, open_eighths)), True
        is_due = open_slots * OPEN_PART >= limits.max_sequences or self.decode_steps >= QUIET_STEPS
        return limits.phase_tokens if is_due or has_urgent else 0, False


class _Seats(Struct, frozen=True):
    """Sequences by what they can do next: `decodes` have a slot and one pending token; `unfinished` have a slot and a
    prompt to compute; `prepared` hold blocks without a slot; `newcomers` hold none. `seated` are prepared sequences
    that take a slot now; they decode.
    """

    decodes: list[Sequence]
    unfinished: list[Sequence]
    prepared: list[Sequence]
    newcomers: list[Sequence]
    seated: list[Sequence]
    open_slots: int
    free_blocks: int
    limits: Limits
    shared: BlockPool | None


def _seats(
    still_running: list[Sequence],
    prepared: list[Sequence],
    newcomers: list[Sequence],
    free: int,
    limits: Limits,
    shared: BlockPool | None,
) -> _Seats:
    slots = limits.max_sequences - len(still_running)
    seated = [sequence for sequence in prepared if sequence.pending == 1][:slots]
    return _Seats(
        decodes=[*(sequence for sequence in still_running if not _is_prompt(sequence)), *seated],
        unfinished=[sequence for sequence in still_running if _is_prompt(sequence)],
        prepared=[sequence for sequence in prepared if sequence not in seated],
        newcomers=newcomers,
        seated=seated,
        open_slots=slots - len(seated),
        free_blocks=free,
        limits=limits,
        shared=shared,
    )


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.pending > 1 or not sequence.computed


def _fill_chunk(seats: _Seats, budget: int) -> tuple[list[Sequence], list[Work], int]:
    """The sequences that take a slot, prompt tokens by rank, up to `budget`, and how many prompts that completes.

    A sequence without a slot is prepared: its last token is left for the step in which it has one.
    """
    limits, free, open_slots = seats.limits, seats.free_blocks, seats.open_slots
    joining: list[Sequence] = []
    chunks: list[Work] = []
    complete = 0
    holders = [*seats.decodes, *seats.unfinished, *seats.prepared]
    seated, new = set(map(id, seats.unfinished)), set(map(id, seats.newcomers))
    can_admit = True
    for sequence in merge(seats.unfinished, seats.prepared, seats.newcomers, key=lambda s: s.rank):
        if budget <= 0:
            break
        is_new, pending, need = id(sequence) in new, sequence.pending, 0
        if is_new:
            if not can_admit or (sequence.kv_quotas and exceeds_quota(sequence, holders)):
                continue
            need, pending = to_start(sequence, limits.block_tokens, seats.shared)
        takes_slot = id(sequence) not in seated and open_slots > 0
        if not takes_slot and id(sequence) not in seated:
            pending -= 1  # prepared
        if not pending:
            continue
        if is_new:
            # As many may be prepared as there are slots. One spare block per sequence, as in the other modes.
            can_admit = len(holders) < 2 * limits.max_sequences and need + len(holders) <= free
            if not can_admit:
                continue  # strict order: no overtaking of a larger one
            free -= need
            holders.append(sequence)
        if takes_slot:
            open_slots -= 1
            joining.append(sequence)
        tokens = min(budget, pending)
        budget -= tokens
        complete += tokens == pending
        chunks.append(Work(sequence, tokens))
    return joining, chunks, complete
