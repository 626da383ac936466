"""Equal sessions and equal beginnings go to equal workers: rendezvous hashing.

A worker that carries more than its part of the load is passed over, so that one popular prefix does not pile up on one
worker. When a worker leaves, only what was its own moves.
"""

from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

from inferry.scheduling.packing import WorkerState

_SLOTS = 512
_NEAREST = 4


class Circle:
    """The workers of a fleet, as seen from a key. Keys share slots, and a slot's ranking is worked out once."""

    __slots__ = ("_nearest", "_workers")

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self._workers = workers
        self._nearest: dict[int, Sequence[WorkerState]] = {}

    def nearest(self, key: str) -> Sequence[WorkerState]:
        """The few workers that the key belongs to, nearest first."""
        slot = crc32(key.encode()) % _SLOTS
        nearest = self._nearest.get(slot)
        if nearest is None:
            ranked = sorted(self._workers, key=lambda worker: _score(slot, worker.name))
            nearest = self._nearest[slot] = tuple(ranked[:_NEAREST])
        return nearest


def _score(slot: int, name: str) -> bytes:
    return blake2b(f"{slot} {name}".encode(), digest_size=8).digest()
