"""Sequences that the simulated engine has not admitted yet, in the order of its policy."""

from heapq import heapify, heappop, heappush

from inferry.sim.sequence import EngineSequence

Entry = tuple[int, int, EngineSequence]


class WaitingQueue:
    """By priority (lower first) or by arrival alone. Aborted sequences stay in the heap until they reach its head."""

    __slots__ = ("_by_priority", "_heap", "count")

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[Entry] = []
        self.count = 0
        """Sequences that wait and are not aborted."""

    def rank(self, sequence: EngineSequence) -> tuple[int, int]:
        return sequence.priority if self._by_priority else 0, sequence.arrival

    def push(self, sequence: EngineSequence) -> None:
        heappush(self._heap, (*self.rank(sequence), sequence))
        self.count += 1

    def head(self) -> EngineSequence | None:
        heap = self._heap
        while heap:
            if not heap[0][2].aborted:
                return heap[0][2]
            heappop(heap)
        return None

    def pop_head(self) -> None:
        heappop(self._heap)
        self.count -= 1

    def is_next(self, sequence: EngineSequence) -> bool:
        """Whether a sequence that was just pushed is the next to be admitted."""
        return self.count == 1 or (self._by_priority and self.head() is sequence)

    def take_late(self, step: int) -> list[Entry]:
        """Remove the sequences that arrived after this step was put together; `restore` puts them back."""
        late = [entry for entry in self._heap if entry[2].earliest_step > step]
        if late:
            self._heap = [entry for entry in self._heap if entry[2].earliest_step <= step]
            heapify(self._heap)
        return late

    def restore(self, entries: list[Entry]) -> None:
        for entry in entries:
            heappush(self._heap, entry)

    def clear(self) -> list[EngineSequence]:
        """Remove all; the sequences that were not aborted are returned."""
        left = [sequence for *_, sequence in self._heap if not sequence.aborted]
        self._heap, self.count = [], 0
        return left
