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

from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS


class LaneShares:
    """The credit of every lane, and whose turn it is. A turn, once given, is kept until it is used or pointless.

    Lanes that are owed at the same time take turns in rotation, so that none of them starves another.
    """

    __slots__ = ("_paid_turn", "_rotation", "_turn_holder")

    def __init__(self, lane_queues: Sequence[LaneQueue]) -> None:
        self._rotation = [lane_queue for lane_queue in lane_queues if lane_queue.policy.share]
        for lane_queue in lane_queues:
            lane_queue.above = tuple(higher for higher in lane_queues if higher.lane < lane_queue.lane)
            lane_queue.below = tuple(lower for lower in self._rotation if lower.lane > lane_queue.lane)
        self._turn_holder: LaneQueue | None = None
        self._paid_turn = False

    def start(self) -> None:
        """A new walk. Who is first in a lane may be another since the last one."""
        for lane_queue in self._rotation:
            lane_queue.cached_head_cost = None

    def admitted(self, lane_queue: LaneQueue, tokens: int) -> bool:
        """A job of the lane went to a worker. Lanes below that wait earn; say whether one may be due a turn."""
        if self._paid_turn:
            self._paid_turn = False
        else:
            lane_queue.spend_credit(tokens)
        share_due = False
        for lower in lane_queue.below:
            if lower.ready:
                credit = lower.credit + tokens * lower.credit_per_token
                lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS
                if credit >= 1 and credit >= (
                    lower.head_cost() if lower.cached_head_cost is None else lower.cached_head_cost
                ):
                    share_due = True
        return share_due

    def owed_queue(self) -> RouteQueue | None:
        """The queue whose head goes before higher lanes now."""
        turn_holder = self._turn_holder
        if turn_holder is None or not self._is_owed(turn_holder):
            turn_holder = None
            for lane_queue in self._rotation:
                if lane_queue.credit >= 1 and self._is_owed(lane_queue) and not self._exceeds_quantum(lane_queue):
                    turn_holder = lane_queue
                    break
            self._turn_holder = turn_holder
        return None if turn_holder is None else turn_holder.first()

    def spend_turn(self, queue: RouteQueue, tokens: int) -> None:
        """The queue's head is about to go before higher lanes: remember who is overtaken, and what it cannot pay."""
        lane_queue = queue.lane_queue
        lane_queue.credit -= tokens
        self._paid_turn = True
        self._rotation.remove(lane_queue)
        self._rotation.append(lane_queue)
        self._turn_holder = None
        for other in self._overtaken_by(queue):
            other.overtaken += tokens

    def _is_owed(self, lane_queue: LaneQueue) -> bool:
        """Whether the lane can pay for its first job and somebody stands before it."""
        if not lane_queue.ready or lane_queue.credit < (
            lane_queue.head_cost() if lane_queue.cached_head_cost is None else lane_queue.cached_head_cost
        ):
            return False
        return sum([higher.ready for higher in lane_queue.above]) > 0

    def _exceeds_quantum(self, lane_queue: LaneQueue) -> bool:
        """Whether a head of a higher lane would be overtaken by more than a quantum."""
        queue = lane_queue.first()
        head = None if queue is None else queue.head()
        return (
            queue is not None
            and head is not None
            and any(
                other.overtaken and other.overtaken + head.prefill_tokens > QUANTUM_TOKENS
                for other in self._overtaken_by(queue)
            )
        )

    def _overtaken_by(self, queue: RouteQueue) -> Iterator[RouteQueue]:
        """Queues of higher lanes that wait for some of the same workers."""
        for lane_queue in queue.lane_queue.above:
            yield from (other for other in lane_queue.waiting if other.route.overlaps(queue.route))
