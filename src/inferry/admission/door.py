"""The door of the queues: is there a place for one more job, and if not, when will there be one for this one?

A lane takes newcomers up to a part of its limit; the rest is for jobs that come back. All lanes together hold so many
bytes of prompts. Who is refused gets a turn of its own: the time at which the queue will have had room for everybody
who was refused before, at the rate at which it drains. Whoever comes back then is known by its tenant, prompt and
budget, and goes before those who come for the first time: stock clients try twice more and then give up, so "come back
in a while and see" would lose most of them.

A burst of live work makes batch jobs look as if they could hardly ever go. The first time somebody is refused it is
taken to be short, and what the lane could do without it sets the turn; who comes back and finds no room then is told
what the present rate says.

Among tenants turns go round: one with a thousand calls outside does not send another's first to the end.

Turns are kept, not promised: nobody waits for who does not come. A newcomer is let in when there is room for it and for
those who are due while the queue empties.

One door serves one loop. It is told of every job that joins a queue (`joined`) or leaves one (`left`).
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from math import ceil
from typing import TypeVar

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy

SOONEST_S = 0.1
GUESSED_EACH_S, GUESSED_SOONEST_S = 0.1, 1.0
"""How far turns are apart, and when the first is, while nobody knows how fast the queue drains."""
LONGEST_S = 115.0
"""OpenAI's clients do not come back at all when told to wait for more than two minutes."""
BEYOND_S = 90.0
"""What those are told whose turn would be later still. They have none, and are spread out by chance from there on."""
EARLY_S = 0.25
"""Who is early by this is on time: clocks and timers differ."""
LATE_S = 5.0
"""Who is late by more than this has lost its turn."""
MOST_TURNS = 50_000

_Who = tuple[str, str, int]
_Key = TypeVar("_Key", str, int)


class Turns:
    """Who was told to come back to one lane, and when. Times are the owner's."""

    def __init__(self) -> None:
        self._of: dict[_Who, list[float]] = {}
        self._order: list[tuple[float, _Who]] = []
        self._due_in: dict[int, int] = {}
        self._tenants: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, who: _Who) -> bool:
        return who in self._of

    def book(self, who: _Who, at: float) -> None:
        if self._count < MOST_TURNS:
            heappush(self._of.setdefault(who, []), at)
            heappush(self._order, (at, who))
            self._due_in[int(at)] = self._due_in.get(int(at), 0) + 1
            self._tenants[who[0]] = self._tenants.get(who[0], 0) + 1
            self._last[who[0]] = at
            self._count += 1

    def next_in_s(self, tenant: str, ahead: int, each_s: float, now: float) -> float:
        """How long until the next turn of the tenant, with so many ahead of it who have none.

        Not at the moment of the one booked last: of several that are due and find no room each is told later than the
        one before, though as many have turns as before.
        """
        in_s = (ahead + self.before(tenant)) * each_s
        after_last_s = self._last.get(tenant, now) + each_s * len(self._tenants) - now
        return min(max(in_s, after_last_s), 2 * in_s)

    def before(self, tenant: str) -> int:
        """How many go before the next of the tenant: its own, and as many of each other tenant."""
        own = self._tenants.get(tenant, 0)
        return min(self._count, own * len(self._tenants))

    def is_due(self, who: _Who, by: float) -> bool:
        """Whether who has a turn by then."""
        turns = self._of.get(who)
        return turns is not None and turns[0] <= by

    def take(self, who: _Who) -> None:
        """Who has come for its first turn."""
        turns = self._of[who]
        second = int(heappop(turns))
        if not turns:
            del self._of[who]
        self._count -= 1
        _count_down(self._due_in, second)
        _count_down(self._tenants, who[0])
        if who[0] not in self._tenants:
            del self._last[who[0]]

    def due_until(self, until: float) -> int:
        """How many are to come by then, to the second."""
        last = int(until)
        return sum([count for second, count in self._due_in.items() if second <= last])

    def forget(self, before: float) -> None:
        """Those whose time was before have not come."""
        order = self._order
        while order and order[0][0] < before:
            _, who = heappop(order)
            if self.is_due(who, before):  # else it has come
                self.take(who)


class Door:
    """Who may join a queue. `keeps_turns` may be switched off: then whoever comes finds what is there."""

    def __init__(
        self, lanes: Mapping[Lane, LanePolicy], *, max_queued_bytes: int | None = None, keeps_turns: bool = True
    ) -> None:
        self.queued_bytes = 0
        self._max_queued_bytes = max_queued_bytes
        self._keeps_turns = keeps_turns
        self._limits = {lane: policy.queue_limit for lane, policy in lanes.items()}
        self._marks = {
            lane: max(1, ceil(policy.queue_limit * policy.refuse_at - 1e-9)) for lane, policy in lanes.items()
        }
        self._depths = [0] * len(Lane)
        self._queued: list[dict[str, int]] = [{} for _ in Lane]
        self._turns = [Turns() for _ in Lane]

    def waiting_outside(self) -> dict[Lane, int]:
        """How many of each lane were told to come back and have not come yet."""
        return {lane: len(self._turns[lane]) for lane in Lane}

    def joined(self, job: InferenceJob) -> None:
        self._depths[job.lane] += 1
        self.queued_bytes += len(job.payload.body)
        queued = self._queued[job.lane]
        queued[job.tenant] = queued.get(job.tenant, 0) + 1

    def left(self, job: InferenceJob) -> None:
        self._depths[job.lane] -= 1
        self.queued_bytes -= len(job.payload.body)
        _count_down(self._queued[job.lane], job.tenant)

    def hold(self, size: int) -> None:
        """A body that is to be looked at before it is a job takes memory too. Raises QueueFull."""
        if not self._has_memory_for(size):
            raise self._too_many_bytes()
        self.queued_bytes += size

    def let_go(self, size: int) -> None:
        self.queued_bytes -= size

    def is_open(self, job: InferenceJob) -> bool:
        """Whether the job may be queued without another question. Nearly always; then `refusal` need not be asked."""
        lane = job.lane
        return (
            self._depths[lane] < self._marks[lane]
            and not self._turns[lane]
            and (self._max_queued_bytes is None or self._has_memory_for(len(job.payload.body)))
        )

    def refusal(self, job: InferenceJob, each_s: float, at_best_s: float, now: float) -> QueueFull | None:
        """Why the job may not be queued now, and when to come back; None: it may.

        `each_s` is how long one job of its lane takes to leave the queue, `at_best_s` how long it would if nobody came
        for better lanes; 0 where nothing is known of that.
        """
        lane = job.lane
        depth = self._depths[lane]
        if not self._has_memory_for(len(job.payload.body)):
            return self._told(self._too_many_bytes(), job, each_s, at_best_s, now)
        turns, who = self._turns[lane], _who(job)
        turns.forget(now - LATE_S)
        if depth < self._room(job, who, each_s, now):
            if who in turns:
                turns.take(who)
            return None
        full = QueueFull(f"lane {lane.name} has {depth} jobs queued and takes no more for now")
        return self._told(full, job, each_s, at_best_s, now)

    def _room(self, job: InferenceJob, who: _Who, each_s: float, now: float) -> int:
        """Up to how many jobs the lane may hold for this one to join."""
        lane, mark = job.lane, self._marks[job.lane]
        turns, queued = self._turns[lane], self._queued[lane]
        if turns.is_due(who, now + EARLY_S):
            return self._limits[lane]
        # The rest is also for tenants with less than their part of the queue: one that floods it shuts nobody else out.
        tenants = len(queued) + (job.tenant not in queued)
        if tenants > 1 and queued.get(job.tenant, 0) < mark // tenants:
            return self._limits[lane]
        # Those who are due while the queue empties come first, but nobody waits for them: they may not come.
        depth = self._depths[lane]
        return mark - min(depth, turns.due_until(now + depth * each_s))

    def _told(self, refusal: QueueFull, job: InferenceJob, each_s: float, at_best_s: float, now: float) -> QueueFull:
        """Work out when the job should come back.

        One that comes before its time gets a later one: it may as well be another with the same words. The first stays.
        """
        if not self._keeps_turns:
            return refusal
        soonest_s = SOONEST_S
        if each_s <= 0:
            each_s, at_best_s, soonest_s = GUESSED_EACH_S, GUESSED_EACH_S, GUESSED_SOONEST_S
        lane = job.lane
        turns, who = self._turns[lane], _who(job)
        if turns.is_due(who, now + EARLY_S):
            turns.take(who)
        else:
            each_s = at_best_s
        too_many = max(0, self._depths[lane] - self._marks[lane]) + 1
        in_s = max(soonest_s, turns.next_in_s(job.tenant, too_many, each_s, now))
        if in_s <= LONGEST_S:
            turns.book(who, now + in_s)
            refusal.is_own_turn = True
        else:
            in_s = BEYOND_S
        refusal.retry_after_s = in_s
        return refusal

    def _has_memory_for(self, size: int) -> bool:
        """One is always taken, however large."""
        most = self._max_queued_bytes
        return most is None or not self.queued_bytes or self.queued_bytes + size <= most

    def _too_many_bytes(self) -> QueueFull:
        return QueueFull(
            f"queued prompts take {self.queued_bytes} bytes, and no more than {self._max_queued_bytes} may"
        )


def _count_down(counts: dict[_Key, int], key: _Key) -> None:
    rest = counts[key] - 1
    if rest:
        counts[key] = rest
    else:
        del counts[key]


def _who(job: InferenceJob) -> _Who:
    return (job.tenant, job.prompt_hash, job.token_budget)
