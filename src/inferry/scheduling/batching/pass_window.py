"""What is learned about waiting for company: how long a padded pass takes, and who comes soon after a first job."""

from collections.abc import Sequence

from inferry.scheduling.batching.packing import WorkerState

EWMA_ALPHA = 0.2
"""How much the latest counts beside everything before it."""


class PassDurations:
    """Seconds of a padded pass, by worker.

    Only a pass that began on an empty worker is timed, up to the first job that leaves it: what had to wait for another
    pass says nothing, and to be told too little makes holds shorter, never longer.
    """

    __slots__ = ("_durations_s", "_started_at")

    def __init__(self) -> None:
        self._started_at: dict[str, float] = {}
        self._durations_s: dict[str, float] = {}

    def record_start(self, worker: WorkerState, jobs: int, now: float) -> None:
        """So many jobs were just sent there as one pass."""
        if worker.sequences == jobs:
            self._started_at[worker.name] = now

    def job_left(self, worker: WorkerState, now: float) -> None:
        """A job there has ended."""
        record_start = self._started_at.pop(worker.name, None)
        if record_start is not None:
            duration_s, previous_s = now - record_start, self._durations_s.get(worker.name)
            self._durations_s[worker.name] = (
                duration_s if previous_s is None else previous_s + EWMA_ALPHA * (duration_s - previous_s)
            )

    def forget(self, worker: str) -> None:
        self._started_at.pop(worker, None)
        self._durations_s.pop(worker, None)

    def shortest_s(self, workers: Sequence[WorkerState]) -> float | None:
        """The shortest pass among workers that are known; None where none is."""
        durations_s = [
            duration_s for worker in workers if (duration_s := self._durations_s.get(worker.name)) is not None
        ]
        return min(durations_s) if durations_s else None


class FollowerStats:
    """How many jobs of a queue come soon after one that finds a worker idle.

    A mean rate would not do: calls that fan out come close together with long breaks between, and what matters is what
    follows a first one. Every such job opens a watch, whether it is held or not; the watch counts who comes before it
    is over, and is added to what is `expected_followers` when the next one opens.
    """

    __slots__ = ("_arrivals", "_windows", "expected_followers", "window_ends_at")

    def __init__(self) -> None:
        self.expected_followers = 0.0
        self.window_ends_at: float | None = None
        self._windows = 0
        self._arrivals = 0

    def arrived(self, now: float) -> bool:
        """A job has come; say whether it is company of an earlier one."""
        if self.window_ends_at is None or now >= self.window_ends_at:
            return False
        self._arrivals += 1
        return True

    def open_window(self, until: float) -> None:
        """A job has come that is nobody's company: see who comes until then."""
        if self.window_ends_at is not None:
            # At first the mean of what was seen and of one watch in vain, so that little is believed, but soon.
            self._windows += 1
            self.expected_followers += max(EWMA_ALPHA, 1 / (self._windows + 1)) * (
                self._arrivals - self.expected_followers
            )
        self.window_ends_at = until
        self._arrivals = 0
