"""Whether a worker may be trusted with work, and with how much: a circuit breaker. Pure; time is an argument.

Closed, it lets work through and counts what is lost. It opens when different jobs are lost one after another, or when
too many of those of the last while are. After a pause that doubles from failure to failure one real generation decides
(half open): it closes, and the worker's room grows from a small share back to all of it; or it stays open for longer.
"""

import enum
from collections import deque
from random import Random

from inferry.dispatch.values import HealthPolicy
from inferry.domain.values import replace
from inferry.domain.workers import Room


class Breaker(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """One worker's breaker. Half open to begin with: nobody has seen the worker generate yet.

    Law: one lost job never opens it, however often that job comes back: it may be the job's fault. While it is not
    closed only `probed` changes that. `opens` counts how often it left the closed state.
    """

    __slots__ = (
        "_closed_at",
        "_failures",
        "_lost",
        "_marks",
        "_policy",
        "_random",
        "_served",
        "_streak",
        "opens",
        "probe_at",
        "state",
    )

    def __init__(self, policy: HealthPolicy, seed: int = 0) -> None:
        self._policy = policy
        self._random = Random(seed)  # noqa: S311 (spreads pauses, guards nothing)
        self.state = Breaker.HALF_OPEN
        self.opens = 0
        self.probe_at = 0.0
        self._failures = 0
        self._closed_at: float | None = None
        self._served = 0
        self._streak: set[str] = set()
        self._lost: deque[tuple[float, str]] = deque()
        # How many had been served by when, oldest first: `served` is called too often to look at a clock.
        self._marks: deque[tuple[float, int]] = deque()

    def served(self) -> None:
        """A job ended well. Called for every job, so it does no more than count."""
        self._served += 1
        if self._streak:
            self._streak.clear()

    def lost(self, job_id: str, now: float) -> bool:
        """A job was lost there; whether that has opened the breaker."""
        if self.state is not Breaker.CLOSED:
            return False
        self.look(now)
        self._streak.add(job_id)
        self._lost.append((now, job_id))
        if len(self._streak) < self._policy.losses and not self._loses_too_many():
            return False
        self.trip(now)
        return True

    def trip(self, now: float) -> None:
        """Open, whatever was counted: the worker itself says that it is down."""
        if self.state is Breaker.CLOSED:
            self.opens += 1
            self._open(now)

    def probing(self) -> None:
        self.state = Breaker.HALF_OPEN

    def probed(self, generated: bool, now: float) -> None:
        """How the probe ended."""
        if not generated:
            self._open(now)
            return
        self.state = Breaker.CLOSED
        self._closed_at = now if self.opens else None
        self._streak.clear()
        self._lost.clear()
        self._marks.clear()
        self._marks.append((now, self._served))

    def look(self, now: float) -> None:
        """Time has passed. To be called about once a second while the breaker is closed."""
        since = now - self._policy.window_s
        while self._lost and self._lost[0][0] < since:
            self._lost.popleft()
        marks = self._marks
        if not marks or now - marks[-1][0] >= self._policy.window_s / 16:
            marks.append((now, self._served))
        while len(marks) > 1 and marks[1][0] <= since:
            marks.popleft()
        if self.share(now) == 1.0:
            self._failures = 0  # it has had all its room and held it: what was is over

    def share(self, now: float) -> float:
        """The part of its room that the worker may have: all of it, but for the time after a recovery."""
        if self._closed_at is None:
            return 1.0
        doublings = int((now - self._closed_at) / self._policy.double_every_s)
        share = self._policy.first_share * 2.0 ** min(doublings, 60)
        return min(1.0, share)

    def room(self, room: Room, now: float) -> Room:
        """What is to be used of this room now."""
        share = self.share(now)
        if share == 1.0 or room.sequences is None:
            return room
        return replace(room, sequences=max(1, int(room.sequences * share)))

    def _loses_too_many(self) -> bool:
        lost = len({job_id for _, job_id in self._lost})
        served = self._served - self._marks[0][1]
        return lost >= self._policy.losses and lost >= self._policy.loss_share * (lost + served)

    def _open(self, now: float) -> None:
        policy = self._policy
        pause_s = min(policy.first_pause_s * 2.0 ** min(self._failures, 60), policy.longest_pause_s)
        self.probe_at = now + pause_s * (1 + policy.jitter * self._random.uniform(-1, 1))
        self._failures += 1
        self._closed_at = None
        self.state = Breaker.OPEN
