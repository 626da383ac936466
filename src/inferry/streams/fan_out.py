"""One execution, several readers.

A job whose answer others may want has two kinds of streams: the one that its worker fills, which `FanOut` alone reads,
and one for each reader. What has come so far is kept, so that whoever comes later gets all of it; it is kept within
bounds, beyond which nobody can join any more and those who have go on. Everything happens on one event loop, inside the
worker's own call.
"""

from abc import ABC, abstractmethod

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, End
from inferry.streams.mailbox import JobStream, MergeCounter, merge

DELTA_OVERHEAD_BYTES = 200
"""What one delta takes besides what it says."""
RESERVE_STEP_BYTES = 4096
"""Memory is taken in pieces of this size, so that a token seldom has to ask for any."""


class HistoryBudget:
    """How much may be kept of answers that are being written: of all of them, and of any one."""

    __slots__ = ("limit", "limit_per_execution", "used")

    def __init__(self, limit: int, limit_per_execution: int) -> None:
        self.limit = limit
        self.limit_per_execution = limit_per_execution
        self.used = 0


class Reader(JobStream):
    """One reader's own stream. `job` is the reader's; `attempt` is of the job that runs, whoever's that is."""

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
        """The next piece, of so many bytes. That it is the next has been seen to where it came from."""
        self._deltas.append(delta)
        self.unread_bytes += size
        if not delta.is_last:
            self._wake()

    def restart(self, attempt: Attempt, *, has_started: bool) -> None:
        """What came is void, if anything has: it is all said again by this attempt."""
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
        self._restarts = source.restarts
        self._history: list[Delta] | None = []
        self._bytes = 0
        self._reserved = 0
        source.listen(self._on_source_ready)

    @abstractmethod
    def _on_end(self, end: End) -> None:
        """The execution has ended: tell the readers, who are still there."""

    @abstractmethod
    def _on_reader_detached(self, reader: Reader) -> None:
        """The execution begins anew, and this reader, who streams, has seen a part of what is void. It has left, and is
        to be told.
        """

    @property
    def is_joinable(self) -> bool:
        """Whether what came so far is still there for somebody who comes now."""
        return self._history is not None

    @property
    def merge_counter(self) -> MergeCounter:
        return self.source._merge_counter

    def join(self, reader: Reader) -> None:
        """Give the reader all that has come, and whatever will."""
        if self._attempt is not self.source.attempt:
            self._switch_attempt()
        if self._history is None:
            raise ValueError("the history is no longer available")
        self.readers = (*self.readers, reader)
        reader.attempt = self._attempt
        for delta in self._history:
            reader.deliver(delta, len(delta.raw) + len(delta.text))

    def leave(self, reader: Reader) -> None:
        self.readers = tuple([one for one in self.readers if one is not reader])

    def merged_history(self) -> Delta | None:
        """All that has come as one delta; None where nothing has, or it is no longer known."""
        return merge(self._history) if self._history else None

    def forget(self) -> None:
        """Keep nothing any more: from now on nobody can join."""
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
        """Another attempt goes on with the job, or begins it anew."""
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
