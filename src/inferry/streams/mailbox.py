"""One stream per job: what its one reader gets, and when. Deltas before the first token are held back.

Producer and reader share one event loop. The producer never waits: deltas that the reader has not taken are merged.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Delta, Done, End
from inferry.domain.values import replace

MERGE_THRESHOLD: Final = 64
"""This many untaken deltas are merged at once. Merging one by one would cost quadratic time; merging all of them when
the reader resumes would block the event loop."""


class StreamProtocolError(Exception):
    """A worker violated the stream protocol: a gap in the indexes, or an item after the end."""


class MergeCounter:
    """Deltas merged into another because their reader was slow, over all streams."""

    __slots__ = ("deltas",)

    def __init__(self) -> None:
        self.deltas = 0


class JobStream:
    """The output of one job that its reader has not taken yet.

    `push` and `finish` belong to the producer. There is at most one reader. It either awaits `take`, or is called
    through `listen` for every change and calls `take_nowait`, which needs no task. `unread_bytes` is how far it is
    behind.

    All attempts of a job share one stream: the deltas of each attempt start with index 0, and leave with continuous
    indexes. Deltas before the first token, such as the role alone, are held until there is a token, so that an attempt
    without one leaves no trace. `restarts` counts how often the reader must discard what it has taken. `shared_with` is
    the job whose execution this is, where it is not the reader's own; `is_replay`: the answer came from the cache.
    """

    shared_with: str | None = None
    is_replay: bool = False

    __slots__ = (
        "_deltas",
        "_end",
        "_index_offset",
        "_listener",
        "_merge_counter",
        "_merged_count",
        "_next_index",
        "_preamble",
        "_waiter",
        "attempt",
        "restarts",
        "unread_bytes",
    )

    def __init__(self, attempt: Attempt, merge_counter: MergeCounter) -> None:
        self.attempt = attempt
        self._merge_counter = merge_counter
        self._deltas: list[Delta] = []
        self._merged_count = 0  # how many of the first were merged already
        self._end: End | None = None
        self._next_index = 0
        self._index_offset = 0
        self._preamble: list[Delta] | None = []
        self.restarts = 0
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self.unread_bytes = 0

    def push(self, delta: Delta) -> None:
        if delta.index != self._next_index or self._end is not None:
            raise StreamProtocolError(f"{delta.job_id}: delta {delta.index} where {self._next_index} was due")
        job = self.attempt.job
        if delta.run_id != job.run_id or delta.step_id != job.step_id:
            raise StreamProtocolError(f"{delta.job_id}: a delta of another run or step")
        self._next_index += 1
        if self._index_offset:
            delta = replace(delta, index=delta.index + self._index_offset)
        if self._preamble is not None:
            if not delta.tokens:
                self._preamble.append(delta)
                return
            self._deltas += self._preamble
            self._preamble = None
        deltas = self._deltas
        deltas.append(delta)
        self.unread_bytes += len(delta.raw) + len(delta.text)
        if len(deltas) - self._merged_count >= MERGE_THRESHOLD:
            self._merge_latest()
        if not delta.is_last:  # else the end wakes the reader, and both are written together
            self._wake()

    def begin_attempt(self, attempt: Attempt, *, from_start: bool) -> None:
        """The attempt is over and the job is not: another attempt resumes it, or restarts it."""
        if from_start:
            self.restarts += self._index_offset > 0 or self._preamble is None
            self._deltas.clear()
            self._merged_count = 0
            self.unread_bytes = 0
            self._index_offset = 0
        else:
            self._index_offset += self._next_index - len(self._preamble or ())
        self.attempt = attempt
        self._next_index = 0
        # An attempt that resumes a started stream has no preamble.
        self._preamble = None if self._index_offset else []

    def finish(self, end: End) -> None:
        if self._end is not None:
            raise StreamProtocolError(f"{end.job_id}: ended twice")
        if self._preamble and isinstance(end, Done):
            self._deltas += self._preamble  # an answer without a token; dropped before an error
        self._end = end
        self._wake()

    async def take(self) -> tuple[Delta | None, End | None]:
        """All output since the last call as one delta, and the end if there is one.

        Must not be called again after it has returned the end.
        """
        if not self._deltas and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_nowait()

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Have `on_ready` called for every delta and for the end, from the producer's own call."""
        self._listener = on_ready
        if self._deltas or self._end is not None:
            on_ready()

    def take_nowait(self) -> tuple[Delta | None, End | None]:
        """The result of `take` without waiting: both are None where there is nothing."""
        if self._end is not None:
            self._listener = None  # nothing follows, and the listener refers back to this stream
        deltas = self._deltas
        if not deltas:
            return None, self._end
        self._deltas = []
        self._merged_count = 0
        self.unread_bytes = 0
        if len(deltas) == 1:
            return deltas[0], self._end
        # Merge instead of making the producer wait: its upstream is one batch, so blocking it would stall every
        # other job in it for the sake of this reader.
        self._merge_counter.deltas += len(deltas) - 1
        return merge(deltas), self._end

    def _merge_latest(self) -> None:
        latest = self._deltas[self._merged_count :]
        self._merge_counter.deltas += len(latest) - 1
        self._deltas[self._merged_count :] = [merge(latest)]
        self._merged_count += 1

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def ended_stream(attempt: Attempt, delta: Delta, done: Done) -> JobStream:
    """The stream of a job that has ended, for an answer that was held back until its end."""
    stream = JobStream(attempt, MergeCounter())
    stream.push(delta)
    stream.finish(done)
    return stream


def merge(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one job as one, with the first one's index."""
    first = deltas[0]
    return Delta(
        first.job_id,
        first.run_id,
        first.step_id,
        first.index,
        "".join([d.text for d in deltas]),
        tuple([token for d in deltas for token in d.token_ids]),
        sum([d.tokens for d in deltas]),
        b"".join([d.raw for d in deltas]),
    )
