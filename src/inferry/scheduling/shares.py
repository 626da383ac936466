"""What lower lanes are owed. Between lanes the order is strict, except that a lane with a share is never starved.

A waiting lane earns credit as higher lanes are admitted: a share s of all prompt tokens is s / (1 - s) of theirs. Every
job of the lane that goes pays with it. Once the credit covers its first job, that job goes before its betters. Credit
is capped at a quantum and no head of a higher lane is overtaken by more than a quantum, which is therefore what a live
job may have to wait for.
A job larger than a quantum goes for a full quantum and leaves the lane in debt: jobs are not split here.
"""

from collections.abc import Iterator, Sequence

from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.quantum import QUANTUM_TOKENS


class Shares:
    """The credit of every lane, and whose turn it is. A turn, once given, is kept until it is used or pointless.

    Lanes that are owed at the same time take turns in rotation, so that none of them starves another.
    """

    __slots__ = ("_holder", "_lines", "_rotation")

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._rotation = [line for line in self._lines if line.policy.share]
        self._holder: Line | None = None

    def admitted(self, line: Line, tokens: int) -> bool:
        """A job of the lane went to a worker. Lanes below that wait earn; say whether one may be due a turn."""
        if line.credit > 0:
            # Whoever is served is owed less, and nobody is owed anything for jobs that are not there.
            line.credit = max(0.0, line.credit - tokens) if line.ready else 0.0
        due = False
        for lower in self._rotation:
            if lower.ready and lower.lane > line.lane:
                earned = tokens * lower.policy.share / (1 - lower.policy.share)
                lower.credit = min(QUANTUM_TOKENS, lower.credit + earned)
                due = due or (lower.credit >= 1 and _is_covered(lower))
        return due

    def turn(self) -> Queue | None:
        """The queue whose head goes before higher lanes now."""
        if self._holder is None or not self._is_owed(self._holder):
            self._holder = None
            for line in self._rotation:
                if line.credit >= 1 and self._is_owed(line) and not self._oversteps(line):
                    self._holder = line
                    break
        return None if self._holder is None else self._holder.first()

    def takes_turn(self, queue: Queue, tokens: int) -> None:
        """The queue's head is about to go before higher lanes: remember who is overtaken, and what it cannot pay."""
        line = queue.line
        if line.credit < tokens:
            line.credit -= tokens
        self._rotation.remove(line)
        self._rotation.append(line)
        self._holder = None
        for other in self._overtaken_by(queue):
            other.overtaken += tokens

    def _is_owed(self, line: Line) -> bool:
        """Whether the lane can pay for its first job and somebody stands before it."""
        return _is_covered(line) and any(higher.ready for higher in self._lines if higher.lane < line.lane)

    def _oversteps(self, line: Line) -> bool:
        """Whether a head of a higher lane would be overtaken by more than a quantum."""
        queue = line.first()
        return queue is not None and any(
            other.overtaken and other.overtaken + _price(queue) > QUANTUM_TOKENS for other in self._overtaken_by(queue)
        )

    def _overtaken_by(self, queue: Queue) -> Iterator[Queue]:
        """Queues of higher lanes that wait for some of the same workers."""
        for line in self._lines:
            if line.lane < queue.line.lane:
                yield from (other for other in line.waiting if other.route.overlaps(queue.route))


def _is_covered(line: Line) -> bool:
    queue = line.first() if line.ready else None
    return queue is not None and line.credit >= min(_price(queue), QUANTUM_TOKENS)


def _price(queue: Queue) -> int:
    head = queue.head()
    return 0 if head is None else head.prefill_tokens
