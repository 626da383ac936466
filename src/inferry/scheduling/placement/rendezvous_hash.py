"""Equal sessions and equal beginnings go to equal workers: rendezvous hashing.

A worker that carries more than its part of the load is passed over, so that one popular prefix does not pile up on one
worker. When a worker leaves, only what was its own moves.
"""

from collections.abc import Sequence
from hashlib import shake_128
from struct import Struct
from typing import Final
from zlib import crc32

from inferry.scheduling.worker_state import WorkerState

_SLOTS: Final = 512
_RANKED_WORKERS = 4
_SCORES: Final = Struct(f"<{_SLOTS}Q")


class RendezvousHash:
    """The workers of a fleet, as seen from a key. Keys share slots, and a slot's ranking is worked out once."""

    __slots__ = ("_rankings", "_scores", "_workers")

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self._workers = workers
        self._scores: Sequence[Sequence[int]] = ()
        self._rankings: dict[int, Sequence[WorkerState]] = {}

    def ranking(self, key: str) -> Sequence[WorkerState]:
        """The few workers that the key belongs to, nearest first."""
        slot = crc32(key.encode()) % _SLOTS
        ranking = self._rankings.get(slot)
        if ranking is None:
            if not self._scores:
                self._scores = tuple(_scores(worker.name) for worker in self._workers)
            slot_scores = [scores[slot] for scores in self._scores]
            ranked = sorted(range(len(slot_scores)), key=slot_scores.__getitem__)
            ranking = self._rankings[slot] = tuple([self._workers[number] for number in ranked[:_RANKED_WORKERS]])
        return ranking


def _scores(name: str) -> tuple[int, ...]:
    """How far the worker is from every slot: one long hash of its name, which costs far less than a hash per slot."""
    return _SCORES.unpack(shake_128(name.encode()).digest(_SCORES.size))
