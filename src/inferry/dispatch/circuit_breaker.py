"""A worker's circuit breaker: whether it gets work, and what share of its capacity. Pure; time is an argument.

Closed, it passes work and counts lost jobs. It opens when several different jobs are lost in a row, or too large a part
of recent ones. After a pause that doubles with every failure, one real generation decides (half open): the breaker
closes, and the worker's capacity grows from a small share back to all of it; or it stays open for longer.
"""

import enum
from collections import deque
from random import Random

from inferry.dispatch.values import HealthPolicy
from inferry.domain.values import replace
from inferry.domain.workers import Capacity


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """One worker's breaker. It starts half open: the worker has not generated yet.

    Invariant: one job never opens it, however often it is lost, since the job may be at fault. (Connections that are
    not accepted are no job's fault: `Pool.ended` counts each of them as a loss.) While it is not closed, only
    `end_probe` closes it. `opens` counts how often it left the closed state.
    """

    __slots__ = (
        "_closed_at",
        "_failures",
        "_lost",
        "_policy",
        "_random",
        "_served",
        "_served_samples",
        "_streak",
        "opens",
        "probe_at",
        "state",
    )

    def __init__(self, policy: HealthPolicy, seed: int = 0) -> None:
        self._policy = policy
        self._random = Random(seed)  # noqa: S311 (spreads pauses, guards nothing)
        self.state = BreakerState.HALF_OPEN
        self.opens = 0
        self.probe_at = 0.0
        self._failures = 0
        self._closed_at: float | None = None
        self._served = 0
        self._streak: set[str] = set()
        self._lost: deque[tuple[float, str]] = deque()
        # Jobs served by a time, the oldest first: `served` is called too often to read a clock.
        self._served_samples: deque[tuple[float, int]] = deque()

    def served(self) -> None:
        """A job completed. Called for every job, so it only counts."""
        self._served += 1
        if self._streak:
            self._streak.clear()

    def lost(self, job_id: str, now: float) -> bool:
        """A job was lost; returns whether that opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False
        self.advance(now)
        self._streak.add(job_id)
        self._lost.append((now, job_id))
        if len(self._streak) < self._policy.failure_threshold and not self._is_loss_rate_exceeded():
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Open in any case: the worker reports that it is down."""
        if self.state is BreakerState.CLOSED:
            self.opens += 1
            self._open(now)

    def begin_probe(self) -> None:
        self.state = BreakerState.HALF_OPEN

    def end_probe(self, generated: bool, now: float) -> None:
        """Record the result of the probe."""
        if not generated:
            self._open(now)
            return
        self.state = BreakerState.CLOSED
        self._closed_at = now if self.opens else None
        self._streak.clear()
        self._lost.clear()
        self._served_samples.clear()
        self._served_samples.append((now, self._served))

    def advance(self, now: float) -> None:
        """Update windows. To be called about once a second while the breaker is closed."""
        since = now - self._policy.failure_window_s
        while self._lost and self._lost[0][0] < since:
            self._lost.popleft()
        served_samples = self._served_samples
        if not served_samples or now - served_samples[-1][0] >= self._policy.failure_window_s / 16:
            served_samples.append((now, self._served))
        while len(served_samples) > 1 and served_samples[1][0] <= since:
            served_samples.popleft()
        if self.share(now) == 1.0:
            self._failures = 0  # the worker has held its full capacity: past failures no longer count

    def share(self, now: float) -> float:
        """The share of its capacity that the worker may use: all of it, except after a recovery."""
        if self._closed_at is None:
            return 1.0
        doublings = int((now - self._closed_at) / self._policy.slow_start_doubling_s)
        share = self._policy.slow_start_share * 2.0 ** min(doublings, 60)
        return min(1.0, share)

    def capacity(self, capacity: Capacity, now: float) -> Capacity:
        """The part of the capacity to use now."""
        share = self.share(now)
        if share == 1.0 or capacity.sequences is None:
            return capacity
        return replace(capacity, sequences=max(1, int(capacity.sequences * share)))

    def _is_loss_rate_exceeded(self) -> bool:
        lost = len({job_id for _, job_id in self._lost})
        served = self._served - self._served_samples[0][1]
        return lost >= self._policy.failure_threshold and lost >= self._policy.failure_ratio * (lost + served)

    def _open(self, now: float) -> None:
        policy = self._policy
        pause_s = min(policy.initial_backoff_s * 2.0 ** min(self._failures, 60), policy.max_backoff_s)
        self.probe_at = now + pause_s * (1 + policy.jitter * self._random.uniform(-1, 1))
        self._failures += 1
        self._closed_at = None
        self.state = BreakerState.OPEN
