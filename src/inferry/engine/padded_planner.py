"""The planner of padded passes: the modes `static` and `dynamic`. Pure.

A pass is a batch of a fixed shape. Its prompts are padded to the longest, its decode rows to the size of the pass: the
row of a sequence that has ended is computed until another sequence takes it or the pass ends. Prompts are computed
before the pass decodes. Sequences of different batch keys never share a pass.
"""

from collections.abc import Sequence as Ordered

from msgspec import Struct

from inferry.engine.planner import Limits, Padding, StepPlan, Work, allocate_running, blocks_to_start
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
        self, running: Ordered[Sequence], waiting: Ordered[Sequence], free_blocks: int, limits: Limits
    ) -> "tuple[StepPlan, PaddedPlanner]":
        members, preempted, free = allocate_running(running, free_blocks, limits.block_tokens)
        is_open = not members or (self.refills and len(members) < self.rows)
        admitted = _admit(members, waiting, free, limits) if is_open and not preempted else []
        rows = max(len(members) + len(admitted), self.rows if members else 0)
        padding = (*(self.prompt_padding if members else ()), *_prompt_padding(admitted))
        members += admitted
        chunks, padding_now, padding_later = _fill_chunk(members, padding, limits.chunk_tokens)
        if chunks or padding_now:
            work, padded = tuple(chunks), Padding(prompts=padding_now)
        else:
            work, padded = tuple(Work(sequence, 1) for sequence in members), Padding(rows=rows - len(members))
        plan = StepPlan(tuple(preempted), tuple(admitted), work, padding=padded)
        return plan, PaddedPlanner(self.refills, rows, padding_later)


def _admit(members: list[Sequence], waiting: Ordered[Sequence], free: int, limits: Limits) -> list[Sequence]:
    """The waiting sequences that join, in order, up to the first that does not fit.

    A new pass has the batch key of the first that waits, and leaves out those of other keys. A pass that runs is joined
    in strict order: it ends before a sequence of another key waits for long.
    """
    admitted: list[Sequence] = []
    pass_key = (members or waiting)[0].batch if members or waiting else 0
    for sequence in waiting:
        if sequence.batch != pass_key:
            if members:
                break
            continue
        need = blocks_to_start(sequence, limits.block_tokens)
        taken = len(members) + len(admitted)
        # One spare block per sequence: without it the new one would be preempted at the next block boundary.
        if taken >= limits.max_sequences or need + taken > free:
            break
        free -= need
        admitted.append(sequence)
    return admitted


def _prompt_padding(admitted: list[Sequence]) -> tuple[int, ...]:
    """What pads each prompt to the longest of those admitted together."""
    longest = max((sequence.pending for sequence in admitted), default=0)
    return tuple(longest - sequence.pending for sequence in admitted if sequence.pending < longest)


def _fill_chunk(
    members: list[Sequence], padding: tuple[int, ...], budget: int
) -> tuple[list[Work], tuple[int, ...], tuple[int, ...]]:
    """Prompt tokens, then padding, until the chunk is full: work, padding of this step, and padding left."""
    chunks: list[Work] = []
    for sequence in members:
        if budget and (sequence.pending > 1 or not sequence.computed):
            tokens = min(budget, sequence.pending)
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
