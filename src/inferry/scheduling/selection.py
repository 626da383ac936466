"""The one path from queues to plans: heads by lane and then in fair order, lower lanes that are owed a turn before.

A round of planning is one or more walks over the heads, best first. A head that no worker accepts closes the workers it
waits for to every job behind it, until the next walk: so small jobs and lower lanes cannot use up the capacity that it
needs. Only heads are looked at, so a walk costs as much as there are queues, however long they are.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final

from inferry.domain.lanes import ReleaseReason
from inferry.scheduling.batching.packing import Draft, add_to_drafts
from inferry.scheduling.batching.prefix_groups import ready_siblings
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.hold_bound import next_released, overdue_queues
from inferry.scheduling.placement.backfill import backfill_candidates
from inferry.scheduling.placement.binding import bind_closed, bind_refused
from inferry.scheduling.placement.pick import Picker
from inferry.scheduling.placement.reservation import reserve_for_share
from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.placement.scorer import Candidates, Placement
from inferry.scheduling.queues.fair_queue import fair_key
from inferry.scheduling.queues.lane_queue import LaneQueue, RouteQueue
from inferry.scheduling.queues.lane_shares import LaneShares
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.queues.queued_job import PLANNED, BlockedHead, PrefixGroup, QueuedJob
from inferry.scheduling.queues.timers import TimerHeap
from inferry.scheduling.worker_state import WorkerState

REBIND_INTERVAL_S: Final = 0.01
"""How often the limit that binds a queue is determined again, for decision records: under load ticks are shorter."""
_MAX_WAIT: Final = ReleaseReason.MAX_WAIT
_SIBLING: Final = ReleaseReason.SIBLING


class Selector:
    """Moves ready jobs onto workers until no other job can go.

    `changed_workers` are those that may have gained capacity since the last round. A head that was tried everywhere in
    that round is tried on them only, unless `rescans_all_workers` asks for all: the decisions are the same.
    """

    __slots__ = (
        "_blocked",
        "_candidates",
        "_drafts",
        "_lane_queues",
        "_picker",
        "_rebind_at",
        "_rebinds",
        "_round",
        "_tick_context",
        "_timers",
        "_walk",
        "_workers",
        "changed_workers",
        "lane_shares",
        "rescans_all_workers",
    )

    def __init__(
        self,
        lane_queues: Sequence[LaneQueue],
        workers: dict[str, WorkerState],
        timers: TimerHeap,
        picker: Picker,
        tick_context: TickContext,
    ) -> None:
        self._lane_queues = list(lane_queues)
        self._workers = workers
        self._timers = timers
        self._picker = picker
        self._tick_context = tick_context
        self.lane_shares = LaneShares(lane_queues)
        self._drafts: list[Draft] = []
        self._blocked: list[tuple[RouteQueue, QueuedJob]] = []
        self._candidates: Candidates | None = None
        self._rebind_at = 0.0
        self._rebinds = False
        self._round = 0
        self._walk = 0
        self.changed_workers: dict[WorkerState, None] = {}
        self.rescans_all_workers = False

    def plan_ready_jobs(self, nominees: Sequence[tuple[QueuedJob, WorkerState]] = ()) -> list[Draft]:
        """Send every job that can go, nominees first. The list is valid until the next call."""
        drafts = self._drafts
        drafts.clear()
        self._round += 1
        now = self._tick_context.now
        self._rebinds = now >= self._rebind_at
        if self._rebinds:
            self._rebind_at = now + REBIND_INTERVAL_S
        for entry, worker in nominees:
            lane_queue = self._lane_queue_of(entry)
            self._mark_sent(entry, lane_queue, worker)
            entry.run.charge(entry.charged_tokens)
            self.lane_shares.admitted(lane_queue, entry.charged_tokens)
            self._add_to_plan(entry, worker)
        if self._tick_context.bounds_holds:
            self._send_overdue()
        while True:
            self._walk += 1
            self._blocked.clear()
            if self._serve_single_job():
                break
            self.lane_shares.start()
            reserved_queue = self._serve_owed_lanes()
            self._serve_in_order(reserved_queue)
            if self.lane_shares.owed_queue() is reserved_queue and not self._backfill():
                break
        for draft in drafts:
            self._workers[draft.worker].drafts.clear()
        self.changed_workers.clear()
        return drafts

    def _send_overdue(self) -> None:
        """Send jobs that may not be held back any longer."""
        self._walk += 1
        for overdue in overdue_queues(self._lane_queues, self._tick_context, self._walk):
            while (released := next_released(overdue, self._tick_context, self._walk)) is not None:
                entry, queue = released
                entry.is_released = True
                if (placement := self._pick(entry, queue.route, 1.0, None)) is None:
                    entry.is_released = False
                    break
                self._send(entry, queue, placement, in_order=queue.head() is entry)

    def reset_blocked(self) -> None:
        """Workers came or went: every blocked head is tried everywhere again."""
        self.retry_blocked()
        self.changed_workers.clear()

    def retry_blocked(self) -> None:
        """Routes have more workers or fewer: every blocked head is tried everywhere again."""
        self._round += 1

    def _lane_queue_of(self, entry: QueuedJob) -> LaneQueue:
        return next(lane_queue for lane_queue in self._lane_queues if lane_queue.rules.number == entry.lane)

    # The order.

    def _serve_single_job(self) -> bool:
        """Serve the only ready job of all lanes, which needs no order; say whether it was sent."""
        ready, waiting = 0, self._lane_queues[0]
        for lane_queue in self._lane_queues:
            if lane_queue.ready:
                ready += lane_queue.ready
                waiting = lane_queue
        if ready != 1:
            return False
        for queue in waiting.waiting:
            head = queue.head()
            return head is not None and self._serve_head(queue, head, None) is not None
        return False

    def _serve_owed_lanes(self) -> RouteQueue | None:
        """Serve lower lanes that are owed. Where no worker accepts one, reserve one for it and return its queue.

        What is owed may use all of the capacity, also the lane's reserve for higher lanes.
        """
        while (queue := self.lane_shares.owed_queue()) is not None and (entry := queue.head()) is not None:
            placement = self._place(entry, queue, 1.0)
            if placement is None:
                assert entry.blocked is not None
                reserve_for_share(entry, entry.blocked, queue.route, self._walk)
                break
            self.lane_shares.spend_turn(queue, placement.prefill_tokens)
            self._send(entry, queue, placement)
        return queue

    def _serve_in_order(self, reserved_queue: RouteQueue | None) -> None:
        """Walk the heads to the end, or until another lower lane is owed a turn."""
        for lane_queue in self._lane_queues:
            if len(lane_queue.waiting) == 1:
                (queue,) = lane_queue.waiting
                if queue.route.is_closed(self._walk):
                    if queue.bound is None or self._rebinds:
                        self._bind_closed(queue, reserved_queue)
                elif self._serve_queue(queue, reserved_queue):
                    return
            elif lane_queue.waiting and self._serve_queues(lane_queue, reserved_queue):
                return

    def _serve_queue(self, queue: RouteQueue, reserved_queue: RouteQueue | None) -> bool:
        """Send from the only queue of a lane; say whether another lower lane is owed a turn."""
        while (head := queue.head()) is not None:
            sent = self._serve_head(queue, head, reserved_queue)
            if sent is None:
                return False
            if sent and self.lane_shares.owed_queue() is not reserved_queue:
                return True
        return False

    def _serve_queues(self, lane_queue: LaneQueue, reserved_queue: RouteQueue | None) -> bool:
        """The same, from all queues of a lane."""
        heads = [(fair_key(head), head, queue) for queue in lane_queue.waiting if (head := queue.head()) is not None]
        heapify(heads)
        while heads:
            key, first, queue = heads[0]
            if queue.route.is_closed(self._walk):
                if queue.bound is None or self._rebinds:
                    self._bind_closed(queue, reserved_queue)
                heappop(heads)
                continue
            if first.run.tenant.virtual_time == key[0]:
                sent = self._serve_head(queue, first, reserved_queue)
                if sent is None:
                    heappop(heads)
                    continue
                if sent and self.lane_shares.owed_queue() is not reserved_queue:
                    return True
            # The queue has another head, or its tenant was served elsewhere.
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (fair_key(head), head, queue))
        return False

    def _serve_head(self, queue: RouteQueue, head: QueuedJob, reserved_queue: RouteQueue | None) -> bool | None:
        """Send the head, or the job that passes it over, and its batch; say whether a lower lane may be owed a turn.

        None where no worker accepts it: then its workers are closed.
        """
        entry = queue.select_next(head, self._tick_context.now)
        placement = None if queue is reserved_queue else self._place(entry, queue, queue.rules.fill)
        if placement is None:
            self._block(entry, queue)
            return None
        if entry is not head:
            return self._send(entry, queue, placement, in_order=False)
        if placement.worker.pads:
            due = self._send(entry, queue, placement)
            return self._fill_pass(queue, placement.worker) or due
        prefix_group = entry.prefix_group
        if prefix_group is None or prefix_group.size == 1 or entry.reason is _MAX_WAIT:
            return self._send(entry, queue, placement)
        return self._send_siblings(entry, queue, prefix_group, placement)

    def _backfill(self) -> bool:
        """Let one smaller job overtake a blocked head; say whether one did."""
        for queue, head in self._blocked:
            blocked = head.blocked
            if queue.size > 1 and blocked is not None:
                is_new = queue.blocked_since_round == self._round
                for entry, worker in backfill_candidates(
                    queue, head, blocked, queue.route.workers if is_new else tuple(self.changed_workers)
                ):
                    entry.picked_by = "backfill"
                    self._send(entry, queue, Placement(worker, entry.prefill_tokens), in_order=False)
                    return True
        return False

    # The worker.

    def _place(self, entry: QueuedJob, queue: RouteQueue, fill: float) -> Placement | None:
        """A worker for the job. One that was tried everywhere is tried on changed workers only."""
        tick_context, route, blocked = self._tick_context, queue.route, entry.blocked
        if blocked is None or not self._already_tried(blocked, fill):
            tick_context.earliest_retry_at = None
            placement = self._pick(entry, route, fill, None)
            if placement is not None:
                return placement
            if blocked is None:
                blocked = entry.blocked = BlockedHead()
        else:
            tick_context.earliest_retry_at = blocked.retry_at
            if self.changed_workers:
                placement = self._pick(entry, route, fill, self.changed_workers)
                if placement is not None:
                    return placement
        if queue.bound is None or self._rebinds:
            bind_refused(queue, entry, fill, self._walk, tick_context.now)
        # Where workers are reserved it has not been tried on all of them.
        blocked.tried_round = self._round if route.is_untouched(self._walk) else None
        blocked.fill = fill
        blocked.retry_at = tick_context.earliest_retry_at
        if tick_context.earliest_retry_at is not None:
            tick_context.schedule_retry(tick_context.earliest_retry_at)
        return None

    def _pick(
        self, entry: QueuedJob, route: RouteFilter, fill: float, among: dict[WorkerState, None] | None
    ) -> Placement | None:
        candidates = self._candidates
        if candidates is None:
            candidates = self._candidates = Candidates(route, self._walk, fill)
        candidates.show(route, self._walk, fill, among)
        return self._picker.pick(entry, candidates)

    def _already_tried(self, blocked: BlockedHead, fill: float) -> bool:
        """Whether only workers that changed can accept the job."""
        return (
            blocked.tried_round is not None
            and blocked.tried_round >= self._round - 1
            and blocked.fill >= fill
            and (blocked.retry_at is None or blocked.retry_at > self._tick_context.now)
            and not self.rescans_all_workers
        )

    def _block(self, entry: QueuedJob, queue: RouteQueue) -> None:
        """Close the workers that the job waits for."""
        route = queue.route
        if queue.blocked_in_round is None or queue.blocked_in_round < self._round - 1:
            queue.blocked_since_round = self._round
        queue.blocked_in_round = self._round
        if route.is_untouched(self._walk):
            self._blocked.append((queue, entry))
        route.close(self._walk)

    def _bind_closed(self, queue: RouteQueue, reserved_queue: RouteQueue | None) -> None:
        """Note what a queue waits for that is not looked at, unless its own head closed its workers."""
        if queue is not reserved_queue and queue.blocked_in_round != self._round:
            bind_closed(queue, self._tick_context.now)

    # The batch.

    def _fill_pass(self, queue: RouteQueue, worker: WorkerState) -> bool:
        """Fill the padded pass that was just opened with the jobs behind its first; say whether a turn may be owed."""
        due = False
        fill = queue.rules.fill
        while (
            (candidate := queue.head())
            and worker.has_draft_for(candidate)
            and worker.accepts(candidate, candidate.prefill_tokens, fill)
        ):
            candidate.picked_by = "padded_batch"
            due |= self._send(candidate, queue, Placement(worker, candidate.prefill_tokens))
        return due

    def _send_siblings(
        self, entry: QueuedJob, queue: RouteQueue, prefix_group: PrefixGroup, placement: Placement
    ) -> bool:
        """Send a job and its siblings in one plan, a quantum of prompt tokens at most."""
        worker = placement.worker
        due = self._send(entry, queue, placement, add_to_plan=False)
        batch, budget_tokens = [entry], QUANTUM_TOKENS
        for candidate in ready_siblings(prefix_group):
            if candidate.reason is _MAX_WAIT:
                break
            joined = self._picker.join(candidate, worker, queue.rules.fill, budget_tokens)
            if joined is None:
                break
            budget_tokens -= joined.prefill_tokens
            candidate.picked_by = "sibling"
            due |= self._send(candidate, queue, joined, in_order=False, add_to_plan=False)
            batch.append(candidate)
        for member in batch:
            if len(batch) > 1:
                member.reason = _SIBLING
            self._add_to_plan(member, worker)
        return due

    # The job goes.

    def _send(
        self, entry: QueuedJob, queue: RouteQueue, placement: Placement, in_order: bool = True, add_to_plan: bool = True
    ) -> bool:
        """Move a ready job onto its worker and into a plan; say whether a lower lane may be owed a turn."""
        worker, tokens = placement.worker, placement.prefill_tokens
        entry.prefill_tokens = tokens
        worker.admit(entry)
        self._mark_sent(entry, queue.lane_queue, worker)
        entry.run.serve(tokens, in_order)
        queue.remove(entry, in_order)
        if add_to_plan:
            self._add_to_plan(entry, worker)
        return self.lane_shares.admitted(queue.lane_queue, tokens)

    def _mark_sent(self, entry: QueuedJob, lane_queue: LaneQueue, worker: WorkerState) -> None:
        """A job that its worker has admitted counts as sent from here on."""
        lane_queue.remove_entry(entry)
        if entry.due is not None:
            self._timers.drop(entry)
        entry.state = PLANNED
        entry.worker = worker.name
        entry.blocked = None
        entry.charged_tokens = entry.prefill_tokens
        if entry.job.prefix:
            self._picker.sent(entry, worker)
            self.changed_workers[worker] = None
        if entry.sibling_window is not None:
            entry.sibling_window.sent(entry.job, entry.prefill_tokens, self._tick_context.now)
        rules = entry.rules
        if rules.preemptible:
            worker.preemption_candidates[entry] = None
        if rules.borrow_groups and rules.groups is not None and worker.group not in rules.groups:
            worker.borrowers[entry] = None

    def _add_to_plan(self, entry: QueuedJob, worker: WorkerState) -> None:
        draft = add_to_drafts(entry, worker.name, worker.precision, worker.pads, worker.drafts)
        if draft is not None:
            self._drafts.append(draft)
