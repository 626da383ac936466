"""What lower lanes are owed. Between lanes the order is strict, except that a lane with a share is never starved.

A waiting lane earns credit as higher lanes are admitted: a share s of all prompt tokens is s / (1 - s) of theirs. Every
job of the lane that goes pays with it, also in advance: up to `PREPAID_TOKENS` of what it is served in order count
against what it will be owed. Once the credit covers its first job, that job goes before its betters: it takes its turn.

The law of what turns cost: between two departures of a queue, the turns of lower lanes that go to any of its workers
come to one quantum of prompt tokens at most, or to one job that is larger than that. So that is what the first of a
queue waits for, in tokens. A job further back waits for as much again each time somebody of its queue goes before it.
While a turn finds no room, one worker is kept from its betters, the one that was least loaded when it began to wait,
until that has drained enough for this one job; all its other workers go on taking them. Where it lacks nothing but
pace, the worker is kept from nobody but lanes that are paced as well.

The law of what a share is worth: while a lane has jobs waiting, it is admitted at least s / (1 - s) of the prompt
tokens of the lanes above it, less one quantum and what it had paid in advance. Credit is capped at a quantum, so what
a lane would earn beyond that while its turn waits for room or for the turn of another lane is lost: about a thousandth
under heavy overload. A job larger than a quantum goes for a full one and leaves the lane in debt: jobs are not split
here.
"""

from collections.abc import Iterator, Sequence

from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.quantum import QUANTUM_TOKENS


class Shares:
    """The credit of every lane, and whose turn it is. A turn, once given, is kept until it is used or pointless.

    Lanes that are owed at the same time take turns in rotation, so that none of them starves another.
    """

    __slots__ = ("_holder", "_paid_turn", "_rotation")

    def __init__(self, lines: Sequence[Line]) -> None:
        self._rotation = [line for line in lines if line.policy.share]
        for line in lines:
            line.above = tuple(higher for higher in lines if higher.lane < line.lane)
            line.below = tuple(lower for lower in self._rotation if lower.lane > line.lane)
        self._holder: Line | None = None
        self._paid_turn = False

    def start(self) -> None:
        """A new walk. Who is first in a lane may be another since the last one."""
        for line in self._rotation:
            line.price = None

    def admitted(self, line: Line, tokens: int) -> bool:
        """A job of the lane went to a worker. Lanes below that wait earn; say whether one may be due a turn."""
        if self._paid_turn:
            self._paid_turn = False
        else:
            line.pays(tokens)
        due = False
        for lower in line.below:
            if lower.ready:
                credit = lower.credit + tokens * lower.earns
                lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS
                if credit >= 1 and credit >= (lower.first_price() if lower.price is None else lower.price):
                    due = True
        return due

    def turn(self) -> Queue | None:
        """The queue whose head goes before higher lanes now."""
        holder = self._holder
        if holder is None or not self._is_owed(holder):
            holder = None
            for line in self._rotation:
                if line.credit >= 1 and self._is_owed(line) and not self._oversteps(line):
                    holder = line
                    break
            self._holder = holder
        return None if holder is None else holder.first()

    def takes_turn(self, queue: Queue, tokens: int) -> None:
        """The queue's head is about to go before higher lanes: remember who is overtaken, and what it cannot pay."""
        line = queue.line
        line.credit -= tokens
        self._paid_turn = True
        self._rotation.remove(line)
        self._rotation.append(line)
        self._holder = None
        for other in self._overtaken_by(queue):
            other.overtaken += tokens

    def _is_owed(self, line: Line) -> bool:
        """Whether the lane can pay for its first job and somebody stands before it."""
        if not line.ready or line.credit < (line.first_price() if line.price is None else line.price):
            return False
        return sum([higher.ready for higher in line.above]) > 0

    def _oversteps(self, line: Line) -> bool:
        """Whether a head of a higher lane would be overtaken by more than a quantum."""
        queue = line.first()
        head = None if queue is None else queue.head()
        return (
            queue is not None
            and head is not None
            and any(
                other.overtaken and other.overtaken + head.prefill_tokens > QUANTUM_TOKENS
                for other in self._overtaken_by(queue)
            )
        )

    def _overtaken_by(self, queue: Queue) -> Iterator[Queue]:
        """Queues of higher lanes that wait for some of the same workers."""
        for line in queue.line.above:
            yield from (other for other in line.waiting if other.route.overlaps(queue.route))
