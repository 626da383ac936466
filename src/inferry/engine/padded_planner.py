"""The planner of padded passes: the modes `static` and `dynamic`. Pure.

A pass is a batch of a fixed shape. Its prompts are padded to the longest, its decode rows to the size of the pass: the
row of a sequence that has ended is computed until another sequence takes it or the pass ends. Prompts are computed
before the pass decodes. Sequences of different batch keys never share a pass.
"""

from collections.abc import Sequence as Ordered

from msgspec import Struct

from inferry.engine.blocks import BlockPool
from inferry.engine.planner import Limits, Padding, StepPlan, Work, allocate_running, exceeds_quota, to_start
from inferry.engine.sequences import Sequence


class PaddedPlanner(Struct, frozen=True):
    """Without `refills` (`static`) no sequence joins a pass. With it (`dynamic`) waiting sequences join as soon as a
    row of the pass is free; they may then enlarge the pass up to `max_sequences`.

    `rows` is the size of the pass. `prompt_padding` has the lengths of padding that its prompts still need.
    """

    refills: bool
    rows: int = 0
    prompt_padding: tuple[int, ...] = ()

    def plan(
        self,
        running: Ordered[Sequence],
        waiting: Ordered[Sequence],
        free_blocks: int,
        limits: Limits,
        shared: BlockPool | None = None,
    ) -> "tuple[StepPlan, PaddedPlanner]":
        members, preempted, free = allocate_running(running, free_blocks, limits.block_tokens, shared)
        is_open = not members or (self.refills and len(members) < self.rows)
        admitted = _admit(members, waiting, free, limits, shared) if is_open and not preempted else []
        rows = max(len(members) + len(admitted), self.rows if members else 0)
        members += admitted
        # A sequence without blocks has not begun: the prefix that is there for it is not computed.
        pending = [
            sequence.pending if sequence.blocks else to_start(sequence, limits.block_tokens, shared)[1]
            for sequence in members
        ]
        padding = _prompt_padding(pending[len(members) - len(admitted) :])
        if len(members) > len(admitted):
            padding = (*self.prompt_padding, *padding)
        chunks, padding_now, padding_later = _fill_chunk(members, pending, padding, limits.chunk_tokens)
        if chunks or padding_now:
            work, padded = tuple(chunks), Padding(prompts=padding_now)
        else:
            work, padded = tuple(Work(sequence, 1) for sequence in members), Padding(rows=rows - len(members))
        plan = StepPlan(tuple(preempted), tuple(admitted), work, padding=padded)
        return plan, PaddedPlanner(self.refills, rows, padding_later)


def _admit(
    members: list[Sequence], waiting: Ordered[Sequence], free: int, limits: Limits, shared: BlockPool | None
) -> list[Sequence]:
    """The waiting sequences that join, in order, up to the first that does not fit.

    A new pass has the batch key of the first that waits, and leaves out those of other keys. A pass that runs is joined
    in strict order: it ends before a sequence of another key waits for long. A sequence that its tenant's limit holds
    back is passed over.
    """
    admitted: list[Sequence] = []
    pass_key = (members or waiting)[0].batch if members or waiting else 0
    for sequence in waiting:
        if sequence.batch != pass_key:
            if members:
                break
            continue
        if sequence.kv_quotas and exceeds_quota(sequence, (*members, *admitted)):
            continue
        need, _ = to_start(sequence, limits.block_tokens, shared)
        taken = len(members) + len(admitted)
        # One spare block per sequence: without it the new one would be preempted at the next block boundary.
        if taken >= limits.max_sequences or need + taken > free:
            break
        free -= need
        admitted.append(sequence)
    return admitted


def _prompt_padding(lengths: list[int]) -> tuple[int, ...]:
    """What pads each prompt to the longest of those admitted together."""
    longest = max(lengths, default=0)
    return tuple(longest - length for length in lengths if length < longest)


def _fill_chunk(
    members: list[Sequence], pending: list[int], padding: tuple[int, ...], budget: int
) -> tuple[list[Work], tuple[int, ...], tuple[int, ...]]:
    """Prompt tokens, then padding, until the chunk is full: work, padding of this step, and padding left."""
    chunks: list[Work] = []
    for sequence, left in zip(members, pending, strict=True):
        if budget and (left > 1 or not sequence.computed):
            tokens = min(budget, left)
            budget -= tokens
            chunks.append(Work(sequence, tokens))
    now: list[int] = []
    later: list[int] = []
    for length in padding:
        tokens = min(budget, length)
        budget -= tokens
        if tokens:
            now.append(tokens)
        if length > tokens:
            later.append(length - tokens)
    return chunks, tuple(now), tuple(later)
