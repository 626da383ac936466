"""Who goes first where not everybody can be in time.

Fair order decides who is next while every promise can be kept. In a burst that is more than workers can do in time, it
lets jobs wait just long enough to be late, one after the other, and a long prompt makes several short ones late. So the
ready jobs of a queue are gone through in the order they are due, with as many prompt tokens a second as have gone
lately; whenever one of them could not be in time, the longest so far is given up. That leaves as few late as any order
could (Moore, 1968). A head that is lost or given up lets the others of its queue go first, the earliest first.

The law: a job gives way only to those that can still keep their promise: when its own is lost, or when it is given up,
which nobody is before the oldest of them has waited for `DISTRESS` of it. It never gives way for longer than until
`YIELDS` times its promise is over; from then on it has its place in fair order again. So where a lane is overloaded for
good nobody starves, and tenants keep their shares: those who give way are charged nothing and stay first. Lanes without
a promise keep fair order alone, and so do workers that pad, where company counts for more.
"""

from collections import deque
from heapq import heappop, heappush

from inferry.scheduling.tickets import READY, Ticket

LOST = 0.95
"""The part of its promise after which a job that still waits is taken to be late: its prompt has to be computed too."""
YIELDS = 2.0
DISTRESS = 0.25
"""The part of its promise that the oldest hopeful job has waited for before anybody is given up."""
LOOKS = 0.02
"""How often it is decided anew who can be in time, as a part of the promise."""
MOST = 256
"""Those who are due first; what comes after them is decided when they have gone."""
SPAN_S = 1.0
"""How far back it is looked how fast prompts go."""
TRUSTED_S = 0.25
"""How long prompts must have been seen to go, and for how long an earlier distress is worth."""
_WORTH_COMPACTING = 64


class Hopes:
    """The ready jobs of a queue in the order they came. Those that left, or lost hope, stand there until looked at.

    The owner counts up `sent_tokens`, the prompts that have gone from the queue.
    """

    __slots__ = ("_given_up", "_looked_at", "_row", "_seen_s", "_seen_tokens", "_sent_before", "sent_tokens")

    def __init__(self) -> None:
        self._row: deque[Ticket] = deque()
        self._given_up: set[Ticket] = set()
        self._looked_at = 0.0
        self._seen_tokens = self._seen_s = 0.0
        self._sent_before = 0
        self.sent_tokens = 0

    def add(self, ticket: Ticket, ready: int) -> None:
        """A job is ready, one of so many."""
        if ready == 1:
            self._row.clear()
            self._given_up.clear()
        self._row.append(ticket)
        if len(self._row) > 2 * ready + _WORTH_COMPACTING:
            self._row = deque(other for other in self._row if other.stage is READY)

    def instead_of(self, head: Ticket, ttft_s: float, now: float) -> Ticket:
        """Who goes now: the head, or the first to come of those who can still be in time where the head cannot."""
        row, late_since = self._row, now - LOST * ttft_s
        while row and (row[0].stage is not READY or row[0].job.arrived_at < late_since):
            row.popleft()
        if not row or now - head.job.arrived_at > YIELDS * ttft_s:
            return head
        if now - row[0].job.arrived_at < DISTRESS * ttft_s:
            self._given_up.clear()
        elif now >= self._looked_at + LOOKS * ttft_s:
            self._look(ttft_s, now)
        given_up = self._given_up
        if head.job.arrived_at >= late_since and head not in given_up:
            return head
        for ticket in row:
            if ticket.stage is READY and ticket.job.arrived_at >= late_since and ticket not in given_up:
                return ticket
        return head

    def _look(self, ttft_s: float, now: float) -> None:
        """Decide who is given up, with what has gone since the last look."""
        passed = now - self._looked_at
        if passed > 10 * LOOKS * ttft_s:  # there was no distress for a while
            known_s = min(self._seen_s, TRUSTED_S)
            self._seen_tokens *= known_s / self._seen_s if known_s else 0.0
            self._seen_s = known_s
        else:
            keep = 1 / (1 + passed / SPAN_S)
            self._seen_tokens = self._seen_tokens * keep + self.sent_tokens - self._sent_before
            self._seen_s = self._seen_s * keep + passed
        self._looked_at, self._sent_before = now, self.sent_tokens
        self._given_up.clear()
        if self._seen_s < TRUSTED_S or self._seen_tokens <= 0:
            return
        token_s = self._seen_s / self._seen_tokens
        late_since = now - LOST * ttft_s
        done_s = 0.0
        longest: list[tuple[float, int, Ticket]] = []
        for ticket in self._row:
            if ticket.stage is not READY or ticket.job.arrived_at < late_since:
                continue
            needs_s = ticket.prefill_tokens * token_s
            done_s += needs_s
            heappush(longest, (-needs_s, ticket.number, ticket))
            if done_s > ticket.job.arrived_at - late_since:
                needed_s, _, given_up = heappop(longest)
                done_s += needed_s
                self._given_up.add(given_up)
            if len(longest) + len(self._given_up) >= MOST:
                break
