"""Where prompts that begin alike went lately, as far as the scheduler knows from what it sent itself."""

from collections.abc import Sequence
from typing import Final

from inferry.scheduling.worker_state import WorkerState

_MAX_PREFIXES: Final = 65_536
_MAX_WORKERS: Final = 4


class PrefixIndex:
    """A bounded memory of prefix hashes and the workers they were sent to, latest first.

    Two generations: when the young one is full it becomes the old one, and what was in the old one and not seen since
    is forgotten. That costs nothing per use, unlike keeping an exact order.
    """

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._limit = limit
        self._young: dict[str, Sequence[WorkerState]] = {}
        self._old: dict[str, Sequence[WorkerState]] = {}

    def find(self, prefix: Sequence[str]) -> tuple[int, Sequence[WorkerState]]:
        """How many slices of the longest warm prefix, and where."""
        young, old = self._young, self._old
        depth = len(prefix)
        for key in reversed(prefix):
            workers = young.get(key) or old.get(key)
            if workers:
                return depth, workers
            depth -= 1
        return 0, ()

    def slices_on(self, prefix: Sequence[str], worker: WorkerState) -> int:
        """How many slices are warm on this worker. Where more workers have one than are remembered, it may be one."""
        young, old = self._young, self._old
        depth = len(prefix)
        for key in reversed(prefix):
            workers = young.get(key) or old.get(key)
            if workers and (worker in workers or len(workers) == _MAX_WORKERS):
                return depth
            depth -= 1
        return 0

    def sent(self, prefix: Sequence[str], worker: WorkerState) -> None:
        young, old = self._young, self._old
        for key in prefix:
            workers = young.get(key) or old.get(key)
            if not workers:
                young[key] = (worker,)
            elif workers[0] is not worker:
                young[key] = (worker, *[other for other in workers if other is not worker][: _MAX_WORKERS - 1])
            else:
                young[key] = workers
        if len(young) > self._limit:
            self._old, self._young = young, {}

    def forget(self, worker: WorkerState) -> None:
        """The worker is gone, and what it had cached with it. Rare, so it may walk through everything."""
        for generation in (self._young, self._old):
            for key, workers in list(generation.items()):
                if worker in workers:
                    generation[key] = tuple(other for other in workers if other is not worker)
