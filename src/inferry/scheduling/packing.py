"""Who goes together: what a worker has room for, and how jobs that go to it at once become plans.

Room is counted in three currencies that are held until given back: sequences, KV tokens at their predicted peak, and
prompt tokens in prefill. The fourth, prompt tokens per second, is `pacing`'s.
"""

from math import inf
from typing import TYPE_CHECKING

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan, Use
from inferry.domain.workers import WorkerView
from inferry.scheduling.pacing import LIVE, NOBODY, Beat, Pace
from inferry.scheduling.tickets import Ticket

if TYPE_CHECKING:
    from inferry.scheduling.placing.fleets import Fleet

_IMMEDIATE = ReleaseReason.IMMEDIATE
_MAX_WAIT = ReleaseReason.MAX_WAIT


ALMOST_FULL = 0.999
"""The load of a worker that is full of what keeps no better job out."""


class WorkerState:
    """A worker as the scheduler sees it: the latest belief, and everything in use there, foreign work included.

    A worker whose room is nothing in some currency `is_shut`. `load` is what `weigh` found, or None since something
    changed; `fleets` are told of that. `part` is the part in use of the currency that is used most: a lane that may
    fill no more than that has no room. The state outlives its view while jobs are in flight, so that a worker that
    comes back is not overfilled.

    `pace` is there only when the view names a rate. `best_live` is the best lane that has a live sequence decoding, or
    NOBODY; the pace binds lanes below it. `closed_in` is the walk in which the worker is kept for somebody, from lane
    `closed_from` on down. `stoppable` are the jobs of preemptible lanes, latest last; those `leaving` are counted until
    they have ended. `promised` are jobs that wait for that: they are counted here as well, so that nobody else takes
    their room.
    """

    __slots__ = (
        "batch_limit",
        "best_live",
        "closed_from",
        "closed_in",
        "decoding",
        "drafts",
        "fleets",
        "is_shut",
        "kv_limit",
        "kv_tokens",
        "leaving",
        "leaving_kv_tokens",
        "load",
        "name",
        "pace",
        "pads",
        "part",
        "prefill_ahead",
        "prefill_limit",
        "prefill_tokens",
        "promised",
        "sequence_limit",
        "sequences",
        "stoppable",
        "view",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.pace: Pace | None = None
        self.decoding = [0] * len(Lane)
        self.best_live: int = NOBODY
        self.stoppable: dict[Ticket, None] = {}
        self.leaving: dict[Ticket, None] = {}
        self.leaving_kv_tokens = 0
        self.promised: dict[Ticket, None] = {}
        self.view: WorkerView | None = None
        self.pads = self.is_shut = False
        self.sequences = self.kv_tokens = self.prefill_tokens = 0
        self.sequence_limit = self.kv_limit = self.prefill_limit = self.batch_limit = inf
        self.prefill_ahead = [0] * len(Lane)
        self.drafts: list[Draft] = []
        self.closed_in = 0
        self.closed_from = 0
        self.fleets: list[Fleet] = []
        self.load: float | None = None
        self.part = 0.0

    def believe(self, view: WorkerView | None, beat: Beat) -> None:
        """Replace the view; what this gateway has in flight is counted on."""
        own = self._own()
        self.view = view
        self.sequences, self.kv_tokens, self.prefill_tokens = own.sequences, own.kv_tokens, own.prefill_tokens
        if view is not None:
            self.pads = view.pads
            self.sequences += view.foreign.running + view.foreign.waiting
            self.kv_tokens += view.foreign.kv_tokens
            self.sequence_limit = _limit(view.room.sequences)
            self.batch_limit = _limit(view.room.batch_sequences)
            self.kv_limit = _limit(view.room.kv_tokens)
            self.prefill_limit = _limit(view.room.prefill_tokens)
            self.is_shut = min(self.sequence_limit, self.kv_limit, self.prefill_limit) <= 0
            rate = view.room.prefill_tokens_per_s
            if rate is None:
                self.pace = None
            elif self.pace is None:
                self.pace = Pace(beat, rate)
            else:
                self.pace.change(rate)
        for fleet in self.fleets:
            fleet.kv_limit = None
        self.changed()

    def own_use(self) -> Use:
        """What was sent there and has not ended."""
        own = self._own()
        for ticket in self.promised:
            own = Use(own.sequences - 1, own.kv_tokens - ticket.kv_tokens, own.prefill_tokens - ticket.prefill_tokens)
        return own

    def _own(self) -> Use:
        foreign = None if self.view is None else self.view.foreign
        if foreign is None:
            return Use(self.sequences, self.kv_tokens, self.prefill_tokens)
        return Use(
            self.sequences - foreign.running - foreign.waiting,
            self.kv_tokens - foreign.kv_tokens,
            self.prefill_tokens,
        )

    # What there is room for.

    def takes(self, ticket: Ticket, fill: float) -> bool:
        """Whether the job may go there now: it has place in the part `fill` of the room, and the pace allows it."""
        if self.sequences >= self.sequence_limit * fill:
            return False
        if self.sequences >= self.batch_limit and ticket.queue.line.is_batch:
            return False
        used, limit = self.prefill_ahead[ticket.lane], self.prefill_limit
        if used + ticket.prefill_tokens > limit * fill and (used or limit <= 0):
            return False
        used, limit = self.kv_tokens, self.kv_limit
        if used + ticket.kv_tokens > limit * fill and (used or limit <= 0):
            return False
        if self.pads and not self._lets_into_pass(ticket):
            return False
        pace = self.pace
        return pace is None or ticket.lane <= self.best_live or pace.allows(ticket.prefill_tokens, fill)

    def lacks_only_pace(self, ticket: Ticket, fill: float) -> bool:
        """Whether a job that the worker does not take waits for nothing but time."""
        return (
            self.pace is not None
            and ticket.lane > self.best_live
            and not self.is_full_for(ticket, fill)
            and self.has_prefill_room(ticket, fill)
            and (not self.pads or self._lets_into_pass(ticket))
        )

    def is_full_for(self, ticket: Ticket, fill: float) -> bool:
        """Whether sequences or KV keep the job out: what only the end of another job can change.

        A job that is larger than all of a currency enters while that is unused.
        """
        if self.sequences >= self.sequence_limit * fill:
            return True
        if self.sequences >= self.batch_limit and ticket.queue.line.is_batch:
            return True
        used, limit = self.kv_tokens, self.kv_limit
        return used + ticket.kv_tokens > limit * fill and (used > 0 or limit <= 0)

    def has_prefill_room(self, ticket: Ticket, fill: float) -> bool:
        used, limit = self.prefill_ahead[ticket.lane], self.prefill_limit
        return used + ticket.prefill_tokens <= limit * fill or (not used and limit > 0)

    def takes_somebody(self, least_kv_tokens: int, fill: float) -> bool:
        """Whether a job that needs no more KV than that, and next to no prefill, could go there."""
        used, limit = self.kv_tokens, self.kv_limit
        return (
            not self.pads
            and self.sequences < self.sequence_limit * fill
            and (used + least_kv_tokens <= limit * fill or (not used and limit > 0))
            and self.prefill_ahead[0] < self.prefill_limit * fill
        )

    def _lets_into_pass(self, ticket: Ticket) -> bool:
        """Nobody can join a padded pass that runs, so whoever may wait for company waits for its end, as for room. Jobs
        of a lane that holds nobody go at once and queue up in the worker.
        """
        return not self.sequences or ticket.queue.line.window == "off" or self.is_forming_a_plan_for(ticket)

    def is_forming_a_plan_for(self, ticket: Ticket) -> bool:
        return any(draft.takes(ticket) for draft in self.drafts)

    # How full it is.

    def changed(self) -> None:
        """Its load has to be found out again."""
        if self.load is not None:
            self.load = None
            for fleet in self.fleets:
                fleet.stale.append(self)

    def weigh(self) -> float:
        """The largest part in use over the currencies; where nothing is, more sequences are still more load."""
        if self.is_shut:
            load = inf
        else:
            load = self.sequences / self.sequence_limit
            if (part := self.kv_tokens / self.kv_limit) > load:
                load = part
            if (part := self.prefill_ahead[0] / self.prefill_limit) > load:
                load = part
        self.part = load
        if load < ALMOST_FULL and self.prefill_tokens:
            # Prompts of lower lanes keep no better job out, but they are load.
            part = self.prefill_tokens / self.prefill_limit
            if part > load:
                load = part if part < ALMOST_FULL else ALMOST_FULL
        if load == 0.0 and self.sequences:
            load = 1.0 - 1.0 / (1 + self.sequences)
        self.load = load
        return load

    # What comes and goes.

    def take(self, ticket: Ticket) -> None:
        self.sequences += 1
        self.kv_tokens += ticket.kv_tokens
        self._count_prefill(ticket.lane, ticket.prefill_tokens)
        if self.pace is not None and self.best_live != NOBODY:
            if ticket.lane > self.best_live:
                self.pace.spend(ticket.prefill_tokens)
            else:
                self.pace.spend_unasked(ticket.prefill_tokens)
        if self.load is not None:
            self.changed()

    def give_up(self, ticket: Ticket) -> None:
        """Undo `take` for a job that was never sent."""
        del self.promised[ticket]
        self.sequences -= 1
        self.kv_tokens -= ticket.kv_tokens
        self._count_prefill(ticket.lane, -ticket.prefill_tokens)
        self.changed()

    def _count_prefill(self, lane: int, tokens: int) -> None:
        """Prompts are ahead of jobs of their own and lower lanes only: nobody waits for room that lower lanes hold."""
        self.prefill_tokens += tokens
        ahead = self.prefill_ahead
        ahead[2] += tokens
        if lane < 2:
            ahead[1] += tokens
            if not lane:
                ahead[0] += tokens

    def free_prefill(self, ticket: Ticket) -> None:
        """The job's first token is there."""
        lane = ticket.lane
        self._count_prefill(lane, -ticket.prefill_tokens)
        ticket.prefill_tokens = 0
        self.decoding[lane] += 1
        if lane < self.best_live and lane in LIVE:
            self.best_live = lane
        if self.load is not None:
            self.changed()

    def _find_best_live(self) -> None:
        self.best_live = NOBODY
        for lane in reversed(LIVE):
            if self.decoding[lane]:
                self.best_live = lane

    def free(self, ticket: Ticket) -> None:
        """The job has ended."""
        self.sequences -= 1
        self.kv_tokens -= ticket.kv_tokens
        if ticket.prefill_tokens:
            self._count_prefill(ticket.lane, -ticket.prefill_tokens)
        else:
            lane = ticket.lane
            self.decoding[lane] -= 1
            if lane == self.best_live and not self.decoding[lane]:
                self._find_best_live()
        if self.stoppable:
            self.stoppable.pop(ticket, None)
        if self.leaving and ticket in self.leaving:
            del self.leaving[ticket]
            self.leaving_kv_tokens -= ticket.kv_tokens
        if self.load is not None:
            self.changed()


def _limit(tokens: int | None) -> float:
    return inf if tokens is None else tokens


class Draft:
    """A plan while a tick forms it."""

    __slots__ = ("jobs", "max_batch", "reason", "worker")

    def __init__(self, worker: WorkerState, first: Ticket) -> None:
        self.worker = worker
        self.reason = first.reason
        self.max_batch = first.queue.line.policy.max_batch
        self.jobs: list[InferenceJob] = [first.job]

    def takes(self, ticket: Ticket) -> bool:
        """Whether the job may share the plan. In a padded pass company counts for more than why it was released."""
        if self.reason is _MAX_WAIT or ticket.reason is _MAX_WAIT:
            return False
        if self.worker.pads:
            return len(self.jobs) < self.max_batch and self.jobs[0].batch_key == ticket.job.batch_key
        return self.reason is ticket.reason

    def plan(self, plan_id: int, now: float) -> BatchPlan:
        return BatchPlan(
            plan_id=plan_id,
            worker=self.worker.name,
            jobs=tuple(self.jobs),
            reason=self.reason,
            formed_at=now,
            padded_tokens=max(job.footprint.prompt.expected for job in self.jobs) if self.worker.pads else None,
        )


def write_down(ticket: Ticket, worker: WorkerState, drafts: list[Draft]) -> None:
    """Write a job that its worker has taken into the draft that takes it, or into a new one."""
    drafts_there = worker.drafts
    if drafts_there and not worker.pads and ticket.reason is _IMMEDIATE is drafts_there[-1].reason:
        drafts_there[-1].jobs.append(ticket.job)  # as nearly always
        return
    for draft in drafts_there:
        if draft.takes(ticket):
            draft.jobs.append(ticket.job)
            return
    draft = Draft(worker, ticket)
    drafts_there.append(draft)
    drafts.append(draft)
