"""What lower lanes are owed. Between lanes the order is strict, except that a lane with a share never starves.

A waiting lane earns credit as higher lanes are admitted: a share s of all prompt tokens is s / (1 - s) of theirs. Every
job of the lane spends credit, also in advance: up to `PREPAID_TOKENS` of service in order count against later credit.
Once the credit covers its first job, that job goes before higher lanes: the lane takes a turn.

The cost of turns is bounded: between two departures of a queue, turns of lower lanes on its workers come to one quantum
of prompt tokens at most, or to one job that is larger. A job further back waits for as much again with each departure
ahead of it. While no worker accepts a turn, one worker is reserved for it until that has drained enough; all others
keep accepting higher lanes. Where only the prefill rate delays a turn, the worker is reserved from paced lanes only.

The value of a share is bounded as well: while a lane has jobs waiting, it is admitted at least s / (1 - s) of the
prompt tokens of the lanes above it, less one quantum and what it had paid in advance. Credit is capped at a quantum, so
what a lane would earn beyond that while its turn waits is lost: about a thousandth under heavy overload. A job larger
than a quantum goes for a full one and leaves the lane in debt, since jobs are not split here.
"""

from collections.abc import Iterator, Sequence

from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS


class LaneShares:
    """The credit of every lane, and the lane whose turn it is. A turn lasts until it is used or no longer owed.

    Lanes that are owed at the same time take turns in rotation.
    """

    __slots__ = ("_paid_turn", "_rotation", "_turn_holder")

    def __init__(self, lane_queues: Sequence[LaneQueue]) -> None:
        self.use_lane_rules(lane_queues)
        self._paid_turn = False

    def use_lane_rules(self, lane_queues: Sequence[LaneQueue]) -> None:
        """Follow the shares of the lanes. A turn that is owed now is found again."""
        self._rotation = [lane_queue for lane_queue in lane_queues if lane_queue.rules.has_share]
        for lane_queue in lane_queues:
            lane_queue.above = tuple(higher for higher in lane_queues if higher.lane < lane_queue.lane)
            lane_queue.below = tuple(lower for lower in self._rotation if lower.lane > lane_queue.lane)
        self._turn_holder: LaneQueue | None = None

    def start(self) -> None:
        """A new walk: the first job of a lane may have changed."""
        for lane_queue in self._rotation:
            lane_queue.is_head_cost_known = False

    def admitted(self, lane_queue: LaneQueue, tokens: int) -> bool:
        """A job of the lane went to a worker. Waiting lanes below earn credit; say whether one may be owed a turn."""
        if self._paid_turn:
            self._paid_turn = False
        else:
            lane_queue.spend_credit(tokens)
        share_due = False
        for lower in lane_queue.below:
            if lower.ready:
                credit = lower.credit + tokens * lower.rules.credit_per_token
                lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS
                if credit >= 1 and lower.covers_head():
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
        """The queue's head goes before higher lanes: charge the lane, and count the tokens for overtaken queues."""
        lane_queue = queue.lane_queue
        lane_queue.credit -= tokens
        self._paid_turn = True
        self._rotation.remove(lane_queue)
        self._rotation.append(lane_queue)
        self._turn_holder = None
        for other in self._overtaken_by(queue):
            other.overtaken += tokens

    def _is_owed(self, lane_queue: LaneQueue) -> bool:
        """Whether the lane can pay for its first job and a higher lane has ready jobs."""
        if not lane_queue.ready or not lane_queue.covers_head():
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
