"""One execution, several readers.

A shared execution has two kinds of streams: the one that its worker fills, which `FanOut` alone reads, and one for each
reader. The output so far is kept, so that a later reader gets all of it. Beyond a memory limit it is dropped: then no
further reader can join, and present readers continue. Everything happens on one event loop, inside the worker's call.
"""

from abc import ABC, abstractmethod
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.event_ids import strip_token_ids
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, End
from inferry.domain.values import replace
from inferry.streams.mailbox import JobStream, MergeCounter, merge

DELTA_OVERHEAD_BYTES: Final = 200
"""Memory of one delta besides its content."""
RESERVE_STEP_BYTES: Final = 4096
"""Memory is reserved in blocks of this size, so that few tokens have to reserve any."""
_ASKS_FOR_IDS: Final = b'"return_token_ids"'


class HistoryBudget:
    """Memory limit for the output kept of running executions: in total, and for each."""

    __slots__ = ("limit", "limit_per_execution", "used")

    def __init__(self, limit: int, limit_per_execution: int) -> None:
        self.limit = limit
        self.limit_per_execution = limit_per_execution
        self.used = 0


class Reader(JobStream):
    """One reader's own stream. `job` is the reader's; `attempt` is that of the job that runs."""

    __slots__ = ("is_replay", "job", "shared_with")

    def __init__(
        self, job: InferenceJob, attempt: Attempt, merge_counter: MergeCounter, shared_with: str | None = None
    ) -> None:
        super().__init__(attempt, merge_counter)
        self.job = job
        self.shared_with = shared_with
        self.is_replay = False

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    def deliver(self, delta: Delta, size: int) -> None:
        """Add the next delta, of `size` bytes. Its index was checked by the source stream."""
        self._deltas.append(delta)
        self.unread_bytes += size
        if not delta.is_last:
            self._wake()

    def restart(self, attempt: Attempt, *, has_started: bool) -> None:
        """Void the output so far: this attempt produces all of it again."""
        self.restarts += has_started
        self._deltas.clear()
        self.unread_bytes = 0
        self.attempt = attempt


class FanOut(ABC):
    """One execution and its readers."""

    __slots__ = (
        "_attempt",
        "_bytes",
        "_history",
        "_history_budget",
        "_keeps_ids",
        "_reserved",
        "_restarts",
        "has_started",
        "readers",
        "source",
    )

    def __init__(self, source: JobStream, history_budget: HistoryBudget) -> None:
        self.source = source
        self.readers: tuple[Reader, ...] = ()
        self.has_started = False
        self._history_budget = history_budget
        self._attempt = source.attempt
        self._keeps_ids = source.attempt.job.payload.keeps_ids
        self._restarts = source.restarts
        self._history: list[Delta] | None = []
        self._bytes = 0
        self._reserved = 0
        source.listen(self._on_source_ready)

    @abstractmethod
    def _on_end(self, end: End) -> None:
        """The execution has ended: called while its readers are still attached."""

    @abstractmethod
    def _on_reader_detached(self, reader: Reader) -> None:
        """The execution restarts, and this streaming reader has delivered output that is void now. It has been
        detached, and must be told.
        """

    @property
    def is_joinable(self) -> bool:
        """Whether the output so far is still kept for a new reader."""
        return self._history is not None

    @property
    def merge_counter(self) -> MergeCounter:
        return self.source._merge_counter

    def join(self, reader: Reader) -> None:
        """Give the reader the output so far, and all that follows."""
        if self._attempt is not self.source.attempt:
            self._switch_attempt()
        if self._history is None:
            raise ValueError("the history is no longer available")
        self.readers = (*self.readers, reader)
        reader.attempt = self._attempt
        for delta in self._history:
            size = len(delta.raw) + len(delta.text)
            reader.deliver(_without_ids(delta, reader) if self._keeps_ids else delta, size)

    def leave(self, reader: Reader) -> None:
        self.readers = tuple([one for one in self.readers if one is not reader])

    def merged_history(self) -> Delta | None:
        """The output so far as one delta; None where there is none, or it is no longer kept."""
        if not self._history:
            return None
        delta, body = merge(self._history), self.source.attempt.job.payload.body
        return _stripped(delta) if self._keeps_ids and _ASKS_FOR_IDS not in body else delta

    def forget(self) -> None:
        """Drop the kept output: no further reader can join."""
        self._history_budget.used -= self._reserved
        self._history = None
        self._reserved = 0

    def _on_source_ready(self) -> None:
        source = self.source
        delta, end = source.take_nowait()
        if self._attempt is not source.attempt:
            self._switch_attempt()
        if delta is not None:
            self.has_started = True
            size = len(delta.raw) + len(delta.text)
            if self._history is not None:
                self._history.append(delta)
                self._bytes += size + DELTA_OVERHEAD_BYTES
                if self._bytes > self._reserved:
                    self._reserve()
            if self._keeps_ids:
                for reader in self.readers:
                    reader.deliver(_without_ids(delta, reader), size)
            else:
                for reader in self.readers:
                    reader.deliver(delta, size)
        if end is not None:
            self._on_end(end)
            self.readers = ()
            self.forget()

    def _reserve(self) -> None:
        history_budget = self._history_budget
        more = -(-(self._bytes - self._reserved) // RESERVE_STEP_BYTES) * RESERVE_STEP_BYTES
        self._reserved += more
        history_budget.used += more
        if self._reserved > history_budget.limit_per_execution or history_budget.used > history_budget.limit:
            self.forget()

    def _switch_attempt(self) -> None:
        """Another attempt resumes or restarts the job."""
        source = self.source
        self._attempt = source.attempt
        if self._restarts == source.restarts:
            for reader in self.readers:
                reader.attempt = self._attempt
            return
        self._restarts = source.restarts
        self.has_started = False
        if self._history is not None:
            self._history.clear()
            self._bytes = 0
        for reader in self.readers:
            if reader.job.stream:
                self.leave(reader)
                self._on_reader_detached(reader)
            else:
                reader.restart(self._attempt, has_started=True)


def _without_ids(delta: Delta, reader: Reader) -> Delta:
    """The delta for a reader that does not remove token ids itself, and whose client has not asked for them."""
    payload = reader.job.payload
    return delta if payload.keeps_ids or _ASKS_FOR_IDS in payload.body else _stripped(delta)


def _stripped(delta: Delta) -> Delta:
    return replace(delta, raw=strip_token_ids(delta.raw))
