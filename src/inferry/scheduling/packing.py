"""Who goes together: what a worker has room for, and how jobs that go to it at once become plans.

Room is counted in three currencies that are held until given back: sequences, KV tokens at their predicted peak, and
prompt tokens in prefill. The fourth, prompt tokens per second, is `pacing`'s.
"""

from math import inf

from msgspec import Struct

from inferry.domain.jobs import InferenceJob, Lane
from inferry.domain.plans import BatchPlan, ReleaseReason, WorkerView
from inferry.scheduling.pacing import LIVE, NOBODY, Beat, Pace
from inferry.scheduling.tickets import Ticket

_MAX_WAIT = ReleaseReason.MAX_WAIT


class Use(Struct, frozen=True, gc=False):
    """How much of a worker the jobs in flight take up."""

    sequences: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0


class WorkerState:
    """A worker as the scheduler sees it: the latest belief, and everything in use there, foreign work included.

    `load` is what `weigh` found, or None since something changed. The state outlives its view while jobs are in flight,
    so that a worker that comes back is not overfilled.

    `pace` is there only when the view names a rate. `best_live` is the best lane that has a live sequence decoding, or
    NOBODY; the pace binds lanes below it. `closed_in` is the walk in which the worker is kept for somebody, from lane
    `closed_from` on down. `stoppable` are the jobs of preemptible lanes, latest last; what of them is `leaving` is counted until it has ended. `promised` are jobs
    that wait for that: they are counted here as well, so that nobody else takes their room.
    """

    __slots__ = (
        "best_live",
        "closed_from",
        "closed_in",
        "decoding",
        "drafts",
        "kv_limit",
        "kv_tokens",
        "leaving_kv_tokens",
        "leaving_sequences",
        "load",
        "name",
        "pace",
        "pads",
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
        self.leaving_sequences = self.leaving_kv_tokens = 0
        self.promised: dict[Ticket, None] = {}
        self.view: WorkerView | None = None
        self.pads = False
        self.sequences = self.kv_tokens = self.prefill_tokens = 0
        self.sequence_limit = self.kv_limit = self.prefill_limit = inf
        self.drafts: list[Draft] = []
        self.closed_in = 0
        self.closed_from = 0
        self.load: float | None = 0.0

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
            self.kv_limit = _limit(view.room.kv_tokens)
            self.prefill_limit = _limit(view.room.prefill_tokens)
            rate = view.room.prefill_tokens_per_s
            if rate is None:
                self.pace = None
            elif self.pace is None:
                self.pace = Pace(beat, rate)
            else:
                self.pace.change(rate)
        self.load = None

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

    def has_room(self, ticket: Ticket, fill: float) -> bool:
        """Whether the job fits into the part `fill` of every currency, and may go at the pace there is."""
        return self.fits(ticket, fill) and self._keeps_pace(ticket, fill)

    def fits(self, ticket: Ticket, fill: float) -> bool:
        """Whether the job fits into the part `fill` of every currency that is held until given back.

        One that is larger than all of a currency enters while that is unused.
        """
        if self.sequences >= self.sequence_limit * fill:
            return False
        used, limit = self.prefill_tokens, self.prefill_limit
        if used + ticket.prefill_tokens > limit * fill and (used or limit <= 0):
            return False
        used, limit = self.kv_tokens, self.kv_limit
        return used + ticket.kv_tokens <= limit * fill or (not used and limit > 0)

    def _keeps_pace(self, ticket: Ticket, fill: float) -> bool:
        if self.pace is None or ticket.job.lane <= self.best_live:
            return True
        return self.pace.allows(ticket.prefill_tokens, fill)

    def lacks_only_pace(self, ticket: Ticket, fill: float) -> bool:
        """Whether a job that the worker does not take waits for nothing but time."""
        return self.pace is not None and ticket.job.lane > self.best_live and self._has_place(ticket, fill)

    def takes_somebody(self, fill: float) -> bool:
        """Whether the smallest of jobs could go there."""
        return (
            not self.pads
            and self.sequences < self.sequence_limit * fill
            and self.kv_tokens < self.kv_limit * fill
            and self.prefill_tokens < self.prefill_limit * fill
        )

    def is_full_for(self, ticket: Ticket, fill: float) -> bool:
        """Whether sequences or KV keep the job out: what only the end of another job can change."""
        if self.sequences >= self.sequence_limit * fill:
            return True
        used, limit = self.kv_tokens, self.kv_limit
        return used + ticket.kv_tokens > limit * fill and (used > 0 or limit <= 0)

    def has_prefill_room(self, ticket: Ticket, fill: float) -> bool:
        used, limit = self.prefill_tokens, self.prefill_limit
        return used + ticket.prefill_tokens <= limit * fill or (not used and limit > 0)

    def takes(self, ticket: Ticket, fill: float) -> bool:
        """Whether the job may go there now. A padded pass is left alone unless its worker says how many it runs."""
        return self._has_place(ticket, fill) and self._keeps_pace(ticket, fill)

    def _has_place(self, ticket: Ticket, fill: float) -> bool:
        if not self.fits(ticket, fill):
            return False
        if not self.pads or not self.sequences or self.sequence_limit != inf:
            return True
        return self.is_forming_a_plan_for(ticket)

    def is_forming_a_plan_for(self, ticket: Ticket) -> bool:
        return any(draft.takes(ticket) for draft in self.drafts)

    def weigh(self) -> float:
        """The largest fraction in use over the currencies; where none binds, more sequences are still more load."""
        load = self.sequences / self.sequence_limit if self.sequence_limit > 0 else inf
        if (part := self.kv_tokens / self.kv_limit if self.kv_limit > 0 else inf) > load:
            load = part
        if (part := self.prefill_tokens / self.prefill_limit if self.prefill_limit > 0 else inf) > load:
            load = part
        if load == 0.0 and self.sequences:
            load = 1.0 - 1.0 / (1 + self.sequences)
        self.load = load
        return load

    def take(self, ticket: Ticket) -> None:
        self.sequences += 1
        self.kv_tokens += ticket.kv_tokens
        self.prefill_tokens += ticket.prefill_tokens
        if self.pace is not None and self.best_live != NOBODY:
            if ticket.job.lane > self.best_live:
                self.pace.spend(ticket.prefill_tokens)
            else:
                self.pace.spend_unasked(ticket.prefill_tokens)
        self.load = None

    def give_up(self, ticket: Ticket) -> None:
        """Undo `take` for a job that was never sent."""
        del self.promised[ticket]
        self.sequences -= 1
        self.kv_tokens -= ticket.kv_tokens
        self.prefill_tokens -= ticket.prefill_tokens
        self.load = None

    def free_prefill(self, ticket: Ticket) -> None:
        self.prefill_tokens -= ticket.prefill_tokens
        ticket.prefill_tokens = 0
        ticket.decoding = True
        lane = ticket.job.lane
        self.decoding[lane] += 1
        if lane < self.best_live and lane in LIVE:
            self.best_live = lane
        self.load = None

    def free(self, ticket: Ticket) -> None:
        self.sequences -= 1
        self.kv_tokens -= ticket.kv_tokens
        self.prefill_tokens -= ticket.prefill_tokens
        if ticket.decoding:
            lane = ticket.job.lane
            self.decoding[lane] -= 1
            if lane == self.best_live and not self.decoding[lane]:
                self.best_live = next((other for other in LIVE if self.decoding[other]), NOBODY)
        if ticket.leaving:
            self.leaving_sequences -= 1
            self.leaving_kv_tokens -= ticket.kv_tokens
        if self.stoppable:
            self.stoppable.pop(ticket, None)
        self.load = None


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


def write_down(ticket: Ticket, drafts: list[Draft]) -> None:
    """Write a job that its worker has taken into the draft that takes it, or into a new one."""
    worker = ticket.worker
    assert worker is not None
    for draft in worker.drafts:
        if draft.takes(ticket):
            draft.jobs.append(ticket.job)
            return
    draft = Draft(worker, ticket)
    worker.drafts.append(draft)
    drafts.append(draft)
