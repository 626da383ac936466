"""Equal sessions and equal beginnings go to equal workers: rendezvous hashing with bounded load.

A worker that carries more than (1 + slack) of the mean is passed over, so that one popular prefix does not pile up on
one worker. When a worker leaves, only what was its own moves.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from zlib import crc32

from inferry.scheduling.packing import WorkerState

SLACK = 0.25
_SLOTS = 512
_NEAREST = 4


class Circle:
    """The workers of a route, as seen from a key. Keys share slots, and a slot's ranking is worked out once."""

    __slots__ = ("_nearest", "_sequences", "_walk", "members", "workers")

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self.workers = workers
        self.members = frozenset(workers)
        self._nearest: dict[int, Sequence[WorkerState]] = {}
        self._walk = -1
        self._sequences = 0

    def nearest(self, key: str) -> Sequence[WorkerState]:
        """The few workers that the key belongs to, nearest first."""
        slot = crc32(key.encode()) % _SLOTS
        nearest = self._nearest.get(slot)
        if nearest is None:
            ranked = sorted(self.workers, key=lambda worker: _score(slot, worker.name))
            nearest = self._nearest[slot] = tuple(ranked[:_NEAREST])
        return nearest

    def fair_load(self, walk: int) -> int:
        """How many sequences a worker may have before one more would be more than its part, slack included."""
        if self._walk != walk:
            self._walk = walk
            self._sequences = sum([worker.sequences for worker in self.workers])
        return ceil((1.0 + SLACK) * (self._sequences + 1) / len(self.workers))

    def sent_one(self) -> None:
        self._sequences += 1


def _score(slot: int, name: str) -> bytes:
    return blake2b(f"{slot} {name}".encode(), digest_size=8).digest()
