"""Which job goes first under overload, when not every job can meet its TTFT target (Moore-Hodgson).

Fair order decides while every target can be met. In a burst beyond the capacity of the workers it would let job after
job wait just long enough to be late, and one long prompt would make several short ones late. So the ready jobs of a
queue are taken in the order they are due, at the recent rate of prompt tokens per second; whenever one would be late,
the longest so far is passed over. No order leaves fewer late jobs (Moore, 1968). A head that is late or passed over
lets the other jobs of its queue go first, the earliest first.

The bounds: a job is passed over only for jobs that can still meet their target. After `MAX_PASSED_OVER_TTFTS` times its
target it has its place in fair order again. So under lasting overload no job starves and tenants keep their shares: a
job that is passed over is charged nothing and stays first. Batch lanes keep fair order alone, and so do workers that
pad.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Final

from inferry.scheduling.queues.queued_job import READY, QueuedJob

LATE_FRACTION: Final = 0.95
"""The part of its target after which a waiting job counts as late: its prompt has to be computed too."""
MAX_PASSED_OVER_TTFTS: Final = 8.0
REVIEW_FRACTION: Final = 0.02
"""Period of the selection, as a part of the target."""
RATE_PERIODS = 10
"""Periods of observation before the prefill rate is used; it is dropped after as many without a selection."""
MAX_REVIEWED = 256
"""Jobs that one selection looks at, those due first."""
_COMPACTION_THRESHOLD: Final = 64


class OverloadSelector:
    """The ready jobs of a queue in order of arrival. Those that left or are late are dropped at the next look.

    The owner counts `sent_tokens`, the prompt tokens that have left the queue.
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
        """A job is ready, one of `ready`."""
        if ready == 1:
            self._pending.clear()
            self._passed_over.clear()
        self._pending.append(entry)
        if len(self._pending) > 2 * ready + _COMPACTION_THRESHOLD:
            self._pending = deque(other for other in self._pending if other.state is READY)

    def select(self, head: QueuedJob, ttft_s: float, now: float) -> QueuedJob:
        """The job that goes now: the head, or where that is late or passed over, the earliest job still in time."""
        pending, late_cutoff = self._pending, now - LATE_FRACTION * ttft_s
        while pending and (pending[0].state is not READY or pending[0].slo_start_at < late_cutoff):
            pending.popleft()
        if not pending or now - head.slo_start_at > MAX_PASSED_OVER_TTFTS * ttft_s:
            return head
        if now >= self._reviewed_at + REVIEW_FRACTION * ttft_s:
            self._review(ttft_s, now)
        passed_over = self._passed_over
        if head.slo_start_at >= late_cutoff and head not in passed_over:
            return head
        for entry in pending:
            if entry.state is READY and entry.slo_start_at >= late_cutoff and entry not in passed_over:
                return entry
        return head

    def _review(self, ttft_s: float, now: float) -> None:
        """Select the jobs to pass over, at the rate observed over about one TTFT target."""
        elapsed_s = now - self._reviewed_at
        min_rate_s = RATE_PERIODS * REVIEW_FRACTION * ttft_s
        if elapsed_s > min_rate_s:  # nothing was queued for a while
            self._rate_tokens = self._rate_s = 0.0
        else:
            decay = 1 / (1 + elapsed_s / ttft_s)
            self._rate_tokens = self._rate_tokens * decay + self.sent_tokens - self._sent_tokens_before
            self._rate_s = self._rate_s * decay + elapsed_s
        self._reviewed_at, self._sent_tokens_before = now, self.sent_tokens
        self._passed_over.clear()
        if self._rate_s < min_rate_s or self._rate_tokens <= 0:
            return
        s_per_token = self._rate_s / self._rate_tokens
        late_cutoff = now - LATE_FRACTION * ttft_s
        reviewed: list[QueuedJob] = []
        for entry in self._pending:
            if entry.state is READY and entry.slo_start_at >= late_cutoff:
                reviewed.append(entry)
                if len(reviewed) >= MAX_REVIEWED:
                    break
        # All targets of a lane are the same from `slo_start_at` on: a short prompt may be due before an earlier one.
        reviewed.sort(key=_slo_start_at)
        finish_s = 0.0
        longest: list[tuple[float, int, QueuedJob]] = []
        for entry in reviewed:
            prefill_s = entry.prefill_tokens * s_per_token
            finish_s += prefill_s
            heappush(longest, (-prefill_s, -entry.number, entry))
            if finish_s > entry.slo_start_at - late_cutoff:
                removed_s, _, passed_over = heappop(longest)
                finish_s += removed_s
                self._passed_over.add(passed_over)


def _slo_start_at(entry: QueuedJob) -> float:
    return entry.slo_start_at
