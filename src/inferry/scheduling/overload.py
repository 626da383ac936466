"""Who goes first where not everybody can be in time.

Fair order decides who is next while every promise can be kept. In a burst that is more than workers can do in time, it
lets jobs wait just long enough to be late, one after the other, and a long prompt makes several short ones late. So the
ready jobs of a queue are gone through in the order they are due, with as many prompt tokens a second as have gone
lately; whenever one of them could not be in time, the longest so far is given up. That leaves as few late as any order
could (Moore, 1968). A head that is lost or given up lets the others of its queue go first, the earliest first.

The law: a job gives way only to those that can still keep their promise: when its own is lost, or when it is given up,
which nobody is before the oldest of them has waited for `OVERLOAD_FRACTION` of it. It never gives way for longer than
until `MAX_PASSED_OVER_TTFTS` times its promise is over; from then on it has its place in fair order again. So where a
lane is overloaded for good nobody starves, and tenants keep their shares: those who give way are charged nothing and
stay first. Lanes without a promise keep fair order alone, and so do workers that pad, where company counts for more.
"""

from collections import deque
from heapq import heappop, heappush

from inferry.scheduling.queues.queued_job import READY, QueuedJob

LATE_FRACTION = 0.95
"""The part of its promise after which a job that still waits is taken to be late: its prompt has to be computed too."""
MAX_PASSED_OVER_TTFTS = 2.0
OVERLOAD_FRACTION = 0.25
"""The part of its promise that the oldest hopeful job has waited for before anybody is given up."""
REVIEW_FRACTION = 0.02
"""How often it is decided anew who can be in time, as a part of the promise."""
MAX_REVIEWED = 256
"""Those who are due first; what comes after them is decided when they have gone."""
RATE_WINDOW_S = 1.0
"""How far back it is looked how fast prompts go."""
MIN_RATE_WINDOW_S = 0.25
"""How long prompts must have been seen to go, and for how long an earlier distress is worth."""
_COMPACTION_THRESHOLD = 64


class OverloadSelector:
    """The ready jobs of a queue in the order they came. Those that left, or lost hope, stand there until looked at.

    The owner counts up `sent_tokens`, the prompts that have gone from the queue.
    """

    __slots__ = (
        "_passed_over",
        "_pending",
        "_rate_s",
        "_rate_tokens",
        "_reviewed_at",
        "_sent_tokens_before",
        "sent_tokens",
    )

    def __init__(self) -> None:
        self._pending: deque[QueuedJob] = deque()
        self._passed_over: set[QueuedJob] = set()
        self._reviewed_at = 0.0
        self._rate_tokens = self._rate_s = 0.0
        self._sent_tokens_before = 0
        self.sent_tokens = 0

    def add(self, entry: QueuedJob, ready: int) -> None:
        """A job is ready, one of so many."""
        if ready == 1:
            self._pending.clear()
            self._passed_over.clear()
        self._pending.append(entry)
        if len(self._pending) > 2 * ready + _COMPACTION_THRESHOLD:
            self._pending = deque(other for other in self._pending if other.state is READY)

    def select(self, head: QueuedJob, ttft_s: float, now: float) -> QueuedJob:
        """Who goes now: the head, or the first to come of those who can still be in time where the head cannot."""
        pending, late_cutoff = self._pending, now - LATE_FRACTION * ttft_s
        while pending and (pending[0].state is not READY or pending[0].job.arrived_at < late_cutoff):
            pending.popleft()
        if not pending or now - head.job.arrived_at > MAX_PASSED_OVER_TTFTS * ttft_s:
            return head
        if now - pending[0].job.arrived_at < OVERLOAD_FRACTION * ttft_s:
            self._passed_over.clear()
        elif now >= self._reviewed_at + REVIEW_FRACTION * ttft_s:
            self._review(ttft_s, now)
        passed_over = self._passed_over
        if head.job.arrived_at >= late_cutoff and head not in passed_over:
            return head
        for entry in pending:
            if entry.state is READY and entry.job.arrived_at >= late_cutoff and entry not in passed_over:
                return entry
        return head

    def _review(self, ttft_s: float, now: float) -> None:
        """Decide who is given up, with what has gone since the last look."""
        elapsed_s = now - self._reviewed_at
        if elapsed_s > 10 * REVIEW_FRACTION * ttft_s:  # there was no distress for a while
            known_s = min(self._rate_s, MIN_RATE_WINDOW_S)
            self._rate_tokens *= known_s / self._rate_s if known_s else 0.0
            self._rate_s = known_s
        else:
            decay = 1 / (1 + elapsed_s / RATE_WINDOW_S)
            self._rate_tokens = self._rate_tokens * decay + self.sent_tokens - self._sent_tokens_before
            self._rate_s = self._rate_s * decay + elapsed_s
        self._reviewed_at, self._sent_tokens_before = now, self.sent_tokens
        self._passed_over.clear()
        if self._rate_s < MIN_RATE_WINDOW_S or self._rate_tokens <= 0:
            return
        s_per_token = self._rate_s / self._rate_tokens
        late_cutoff = now - LATE_FRACTION * ttft_s
        finish_s = 0.0
        longest: list[tuple[float, int, QueuedJob]] = []
        for entry in self._pending:
            if entry.state is not READY or entry.job.arrived_at < late_cutoff:
                continue
            prefill_s = entry.prefill_tokens * s_per_token
            finish_s += prefill_s
            heappush(longest, (-prefill_s, entry.number, entry))
            if finish_s > entry.job.arrived_at - late_cutoff:
                removed_s, _, passed_over = heappop(longest)
                finish_s += removed_s
                self._passed_over.add(passed_over)
            if len(longest) + len(self._passed_over) >= MAX_REVIEWED:
                break
