"""What is learned for batching windows: how long a pass takes, and how many jobs follow a first one."""

from collections.abc import Sequence

from inferry.scheduling.worker_state import WorkerState

EWMA_ALPHA = 0.2
"""Weight of the latest observation."""


class PassDurations:
    """Seconds of a pass, by worker.

    Only a pass that began where no other ran is timed, up to the first job that leaves it. Too short a time makes holds
    shorter, never longer.
    """

    __slots__ = ("_durations_s", "_started_at")

    def __init__(self) -> None:
        self._started_at: dict[str, float] = {}
        self._durations_s: dict[str, float] = {}

    def record_start(self, worker: WorkerState, jobs: int, now: float) -> None:
        """`jobs` jobs were just sent there as one pass."""
        if jobs in (worker.sequences, worker.pooled_sequences):
            self._started_at.setdefault(worker.name, now)

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
    """How many jobs of a queue arrive soon after one that finds a worker idle.

    A mean rate would not do: calls that fan out arrive close together with long pauses between, and what matters is
    what follows a first one. Every such job opens a window, held or not. The window counts arrivals until its end, and
    updates `expected_followers` when the next one opens.
    """

    __slots__ = ("_arrivals", "_windows", "expected_followers", "window_ends_at")

    def __init__(self) -> None:
        self.expected_followers = 0.0
        self.window_ends_at: float | None = None
        self._windows = 0
        self._arrivals = 0

    def arrived(self, now: float) -> bool:
        """A job arrived; say whether it follows an earlier one."""
        if self.window_ends_at is None or now >= self.window_ends_at:
            return False
        self._arrivals += 1
        return True

    def open_window(self, until: float) -> None:
        """A first job arrived: count the jobs that follow until then."""
        if self.window_ends_at is not None:
            # At first the mean of the windows so far and of one without followers.
            self._windows += 1
            self.expected_followers += max(EWMA_ALPHA, 1 / (self._windows + 1)) * (
                self._arrivals - self.expected_followers
            )
        self.window_ends_at = until
        self._arrivals = 0
