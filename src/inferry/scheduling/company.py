"""What is learned about waiting for company: how long a padded pass takes, and who comes soon after a first job."""

from collections.abc import Sequence

from inferry.scheduling.packing import WorkerState

LEARNS = 0.2
"""How much the latest counts beside everything before it."""


class Passes:
    """Seconds of a padded pass, by worker.

    Only a pass that began on an empty worker is timed, up to the first job that leaves it: what had to wait for another
    pass says nothing, and to be told too little makes holds shorter, never longer.
    """

    __slots__ = ("_began", "_seconds")

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def began(self, worker: WorkerState, jobs: int, now: float) -> None:
        """So many jobs were just sent there as one pass."""
        if worker.sequences == jobs:
            self._began[worker.name] = now

    def left(self, worker: WorkerState, now: float) -> None:
        """A job there has ended."""
        began = self._began.pop(worker.name, None)
        if began is not None:
            took, before = now - began, self._seconds.get(worker.name)
            self._seconds[worker.name] = took if before is None else before + LEARNS * (took - before)

    def forget(self, worker: str) -> None:
        self._began.pop(worker, None)
        self._seconds.pop(worker, None)

    def shortest_s(self, workers: Sequence[WorkerState]) -> float | None:
        """The shortest pass among workers that are known; None where none is."""
        known = [seconds for worker in workers if (seconds := self._seconds.get(worker.name)) is not None]
        return min(known) if known else None


class Company:
    """How many jobs of a queue come soon after one that finds a worker idle.

    A mean rate would not do: calls that fan out come close together with long breaks between, and what matters is what
    follows a first one. Every such job opens a watch, whether it is held or not; the watch counts who comes before it
    is over, and is added to what is `expected` when the next one opens.
    """

    __slots__ = ("_came", "_watches", "expected", "watch_until")

    def __init__(self) -> None:
        self.expected = 0.0
        self.watch_until: float | None = None
        self._watches = 0
        self._came = 0

    def came(self, now: float) -> bool:
        """A job has come; say whether it is company of an earlier one."""
        if self.watch_until is None or now >= self.watch_until:
            return False
        self._came += 1
        return True

    def watch(self, until: float) -> None:
        """A job has come that is nobody's company: see who comes until then."""
        if self.watch_until is not None:
            # At first the mean of what was seen and of one watch in vain, so that little is believed, but soon.
            self._watches += 1
            self.expected += max(LEARNS, 1 / (self._watches + 1)) * (self._came - self.expected)
        self.watch_until = until
        self._came = 0
