"""Who goes next: the heads of all queues, by lane and then in fair order, except where a lower lane is owed a turn."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.batching.packing import Draft, WorkerState, add_to_draft
from inferry.scheduling.batching.prefix_groups import PrefixGroup, ready_siblings
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.placement.backfill import backfill_candidates
from inferry.scheduling.placement.reservation import reserve_for_share
from inferry.scheduling.placement.scorers import Placement
from inferry.scheduling.queues.fair_queue import fair_key
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.lane_shares import LaneShares
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import PLANNED, BlockedHead, QueuedJob
from inferry.scheduling.queues.timers import TimerHeap

_MAX_WAIT = ReleaseReason.MAX_WAIT
_SIBLING = ReleaseReason.SIBLING


class Selector:
    """Moves ready jobs onto workers until nobody else can go.

    A round of planning is one or more walks over the heads, best first. A head without room keeps the workers it waits
    for from everybody behind it, until the next walk: that is what stops small and lower-lane jobs from eating the room
    it needs. Only heads are looked at, so a walk costs what the number of queues costs, not the backlog.

    `changed_workers` are the workers that may have got room since the last round. A head that found none then need not
    be tried elsewhere now: a worker that did not change has no more room for it than it had. (`rescans_all_workers`
    does without that, to compare: it must decide the same.)
    """

    __slots__ = (
        "_blocked",
        "_drafts",
        "_lane_queues",
        "_lane_shares",
        "_placement",
        "_round",
        "_tick_context",
        "_timers",
        "_walk",
        "changed_workers",
        "rescans_all_workers",
    )

    def __init__(
        self, lane_queues: Sequence[LaneQueue], timers: TimerHeap, placement: Placement, tick_context: TickContext
    ) -> None:
        self._lane_queues = lane_queues
        self._timers = timers
        self._placement = placement
        self._tick_context = tick_context
        self._lane_shares = LaneShares(lane_queues)
        self._drafts: list[Draft] = []
        self._blocked: list[QueuedJob] = []
        self._round = 0
        self._walk = 0
        self.changed_workers: dict[WorkerState, None] = {}
        self.rescans_all_workers = False

    def plan_ready_jobs(self, nominees: Sequence[QueuedJob] = ()) -> list[Draft]:
        """Send everybody who can go, those first for whom room was made. In the end nobody has both a place in the
        order and room.
        """
        drafts = self._drafts = []
        self._round += 1
        for entry in nominees:
            worker = entry.worker
            assert worker is not None
            self._mark_sent(entry, worker)
            entry.run.charge(entry.charged_tokens)
            self._lane_shares.admitted(entry.queue.lane_queue, entry.charged_tokens)
            add_to_draft(entry, worker, drafts)
        while True:
            self._walk += 1
            self._blocked.clear()
            self._lane_shares.start()
            reserved_queue = self._serve_owed_lanes()
            self._serve_in_order(reserved_queue)
            if self._lane_shares.owed_queue() is reserved_queue and not self._backfill():
                break
        for draft in drafts:
            draft.worker.drafts.clear()
        self.changed_workers.clear()
        return drafts

    def reset_blocked(self) -> None:
        """Workers came or went, or nobody waits: whoever does from now on has to look everywhere first."""
        self._round += 1
        self.changed_workers.clear()

    # In which order.

    def _serve_owed_lanes(self) -> RouteQueue | None:
        """Lower lanes that are owed go first. One that finds no room has a worker kept for it: return its queue.

        What is owed is paid out of the whole room, also out of what the lane leaves to higher ones otherwise.
        """
        while (queue := self._lane_shares.owed_queue()) is not None and (entry := queue.head()) is not None:
            worker = self._place(entry, 1.0)
            if worker is None:
                assert entry.blocked is not None
                reserve_for_share(entry, entry.blocked, self._walk)
                break
            self._lane_shares.spend_turn(queue, entry.prefill_tokens)
            self._send(entry, worker)
        return queue

    def _serve_in_order(self, reserved_queue: RouteQueue | None) -> None:
        """Walk the heads to the end, or until another lower lane is owed a turn."""
        for lane_queue in self._lane_queues:
            if len(lane_queue.waiting) == 1:
                (queue,) = lane_queue.waiting
                if not queue.route.is_closed(self._walk) and self._serve_queue(queue, reserved_queue):
                    return
            elif lane_queue.waiting and self._serve_queues(lane_queue, reserved_queue):
                return

    def _serve_queue(self, queue: RouteQueue, reserved_queue: RouteQueue | None) -> bool:
        """Send from the only queue of a lane; say whether another lower lane is owed a turn for it."""
        fill, now = queue.lane_queue.fill, self._tick_context.now
        while (head := queue.head()) is not None:
            entry = queue.select_next(head, now)
            worker = None if queue is reserved_queue else self._place(entry, fill)
            if worker is None:
                self._block(entry)
                return False
            if entry is not head:
                if self._send(entry, worker, in_order=False) and self._lane_shares.owed_queue() is not reserved_queue:
                    return True
            elif worker.pads or entry.prefix_group is not None:
                if self._send_with_batch(entry, worker) and self._lane_shares.owed_queue() is not reserved_queue:
                    return True
            elif self._send(entry, worker) and self._lane_shares.owed_queue() is not reserved_queue:
                return True
        return False

    def _serve_queues(self, lane_queue: LaneQueue, reserved_queue: RouteQueue | None) -> bool:
        """The same, from all queues of a lane."""
        heads = [(fair_key(head), head) for queue in lane_queue.waiting if (head := queue.head()) is not None]
        heapify(heads)
        while heads:
            key, first = heads[0]
            queue = first.queue
            if queue.route.is_closed(self._walk):
                heappop(heads)
                continue
            if first.run.tenant.virtual_time == key[0]:
                entry = queue.select_next(first, self._tick_context.now)
                worker = None if queue is reserved_queue else self._place(entry, lane_queue.fill)
                if worker is None:
                    self._block(entry)
                    heappop(heads)
                    continue
                if entry is not first:
                    due = self._send(entry, worker, in_order=False)
                else:
                    due = self._send_with_batch(entry, worker)
                if due and self._lane_shares.owed_queue() is not reserved_queue:
                    return True
            # The queue has another head, or its tenant was served elsewhere.
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (fair_key(head), head))
        return False

    def _backfill(self) -> bool:
        """Let smaller jobs pass heads that no worker has room for; say whether somebody went."""
        for head in self._blocked:
            queue, blocked = head.queue, head.blocked
            if queue.size > 1 and blocked is not None:
                is_new = queue.blocked_since_round == self._round
                for entry, worker in backfill_candidates(
                    head, blocked, queue.route.workers if is_new else tuple(self.changed_workers)
                ):
                    self._send(entry, worker, in_order=False)
                    return True
        return False

    # Where, or nowhere.

    def _place(self, entry: QueuedJob, fill: float) -> WorkerState | None:
        """A worker for the head of a queue. One that has looked everywhere in vain looks only at what has changed."""
        tick_context, route, blocked = self._tick_context, entry.queue.route, entry.blocked
        if blocked is None or not self._already_tried(blocked, fill):
            tick_context.earliest_retry_at = None
            worker = self._placement.pick(route, entry, self._walk, fill)
            if worker is not None:
                return worker
            if blocked is None:
                blocked = entry.blocked = BlockedHead()
        else:
            tick_context.earliest_retry_at = blocked.retry_at
            if self.changed_workers:
                worker = self._placement.pick_among(self.changed_workers, route, entry, self._walk, fill)
                if worker is not None:
                    return worker
        # Where workers are kept for others it has not looked at all of them.
        blocked.tried_round = self._round if route.is_untouched(self._walk) else -1
        blocked.fill = fill
        blocked.retry_at = tick_context.earliest_retry_at
        if tick_context.earliest_retry_at is not None:
            tick_context.schedule_retry(tick_context.earliest_retry_at)
        return None

    def _already_tried(self, blocked: BlockedHead, fill: float) -> bool:
        """Whether nothing but the workers that changed is worth a look."""
        return (
            blocked.tried_round >= self._round - 1
            and blocked.fill >= fill
            and (blocked.retry_at is None or blocked.retry_at > self._tick_context.now)
            and not self.rescans_all_workers
        )

    def _block(self, entry: QueuedJob) -> None:
        """Nobody behind the head may have the workers it waits for."""
        queue = entry.queue
        route = queue.route
        if queue.blocked_in_round < self._round - 1:
            queue.blocked_since_round = self._round
        queue.blocked_in_round = self._round
        if route.is_untouched(self._walk):
            self._blocked.append(entry)
        route.close(self._walk)

    # With whom.

    def _send_with_batch(self, entry: QueuedJob, worker: WorkerState) -> bool:
        """Send the head of a queue and those who go along; say whether a lower lane may be due a turn for it."""
        if worker.pads:
            due = self._send(entry, worker)
            return self._fill_pass(entry.queue, worker) or due
        prefix_group = entry.prefix_group
        if prefix_group is None or prefix_group.size == 1 or entry.reason is _MAX_WAIT:
            return self._send(entry, worker)
        return self._send_siblings(entry, prefix_group, worker)

    def _fill_pass(self, queue: RouteQueue, worker: WorkerState) -> bool:
        """Fill the padded pass that was just opened with those who stand behind its first job."""
        due = False
        fill = queue.lane_queue.fill
        while (candidate := queue.head()) and worker.has_draft_for(candidate) and worker.accepts(candidate, fill):
            due |= self._send(candidate, worker)
        return due

    def _send_siblings(self, entry: QueuedJob, prefix_group: PrefixGroup, worker: WorkerState) -> bool:
        """Send a job and its siblings in one plan, a quantum of them at most."""
        due = self._send(entry, worker, add_to_plan=False)
        batch, budget_tokens = [entry], QUANTUM_TOKENS
        for candidate in ready_siblings(prefix_group):
            if candidate.reason is _MAX_WAIT or not self._placement.can_join(
                candidate, worker, entry.queue.lane_queue.fill, budget_tokens
            ):
                break
            budget_tokens -= candidate.prefill_tokens
            due |= self._send(candidate, worker, in_order=False, add_to_plan=False)
            batch.append(candidate)
        for member in batch:
            if len(batch) > 1:
                member.reason = _SIBLING
            add_to_draft(member, worker, self._drafts)
        return due

    # Off they go.

    def _send(self, entry: QueuedJob, worker: WorkerState, in_order: bool = True, add_to_plan: bool = True) -> bool:
        """Move a ready job onto a worker and into a plan; say whether a lower lane may be due a turn for it."""
        queue, tokens = entry.queue, entry.prefill_tokens
        worker.admit(entry)
        self._mark_sent(entry, worker)
        entry.run.serve(tokens, in_order)
        queue.remove(entry, in_order)
        if add_to_plan:
            add_to_draft(entry, worker, self._drafts)
        return self._lane_shares.admitted(queue.lane_queue, tokens)

    def _mark_sent(self, entry: QueuedJob, worker: WorkerState) -> None:
        """A job that its worker has taken counts as sent from here on."""
        lane_queue = entry.queue.lane_queue
        lane_queue.remove_entry(entry)
        lane_queue.drain.departures += 1
        if entry.due is not None:
            self._timers.drop(entry)
        entry.state = PLANNED
        entry.worker = worker
        entry.blocked = None
        entry.charged_tokens = entry.prefill_tokens
        if entry.job.prefix:
            self._placement.sent(entry, worker)
            self.changed_workers[worker] = None
        if entry.sibling_window is not None:
            entry.sibling_window.sent(entry, self._tick_context.now)
        if lane_queue.preemptible:
            worker.preemption_candidates[entry] = None
