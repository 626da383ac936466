"""Whether a server is alive, judged from what was heard of it and which questions it left open. Pure: time is an
argument.

Anything heard counts: a token of any call, the head of an answer, a metrics page. A server is silent when MISSES
questions in a row, asked one after the other, were left open and nothing else was heard meanwhile. One question is not
enough: an API server under load may answer late, and timers of this process fire first when it has stood still itself.
"""

import enum
import math

MISSED_PROBES = 2
SLOW_FACTOR = 3.0
"""How many times the slowest recent answer a server may take. Some write their metrics page in a second."""
SLOWEST_DECAY = 0.9
"""Part of the slowest answer that is left with every further one."""
MAX_TIMEOUT_S = 10.0
MAX_IDLE_TIMEOUT_S = 2.5
"""The same for a server that has no calls: how slow it was under load says nothing then."""
BODY_BYTES_PER_S = 2e6
"""How fast a server is expected to take in bodies. A burst of long prompts keeps an API server's event loop busy before
any byte comes back."""


class Verdict(enum.Enum):
    ALIVE = "heard"
    SUSPECT = "doubt"
    """A question was left open: ask again at once."""
    BECAME_UNRESPONSIVE = "became_unresponsive"
    UNRESPONSIVE = "silent"
    """It was silent before."""


class Liveness:
    """What is known of one server. `last_activity_at` is the last sign of life."""

    __slots__ = ("_missed", "_slowest_response_s", "_timeout_s", "is_unresponsive", "last_activity_at")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest_response_s = 0.0
        self._missed = 0
        self.last_activity_at = -math.inf
        self.is_unresponsive = False

    @property
    def is_suspect(self) -> bool:
        """Whether the last question was left open."""
        return self._missed > 0

    def probe_timeout_s(self, unread_bytes: int | None = 0) -> float:
        """How long the next question may stay open, where the server has so much to read first; None: it is idle."""
        max_timeout_s = MAX_IDLE_TIMEOUT_S if unread_bytes is None else MAX_TIMEOUT_S
        base_s = max(self._timeout_s, min(SLOW_FACTOR * self._slowest_response_s, max_timeout_s))
        return (base_s + (unread_bytes or 0) / BODY_BYTES_PER_S) / MISSED_PROBES

    def on_response(self, at: float) -> None:
        """A sign of life. One that is older than the last is none."""
        if at > self.last_activity_at:
            self.last_activity_at = at

    def on_probe_response(self, response_s: float, now: float) -> None:
        """A question was answered, with whatever status."""
        self._slowest_response_s = max(response_s, SLOWEST_DECAY * self._slowest_response_s)
        self.on_response(now)

    def evaluate(self, probed_at: float) -> Verdict:
        """What a question means that was asked then and is over, answered or not."""
        if self.last_activity_at >= probed_at:
            self._missed = 0
            self.is_unresponsive = False
            return Verdict.ALIVE
        self._missed += 1
        if self.is_unresponsive:
            return Verdict.UNRESPONSIVE
        if self._missed < MISSED_PROBES:
            return Verdict.SUSPECT
        self.is_unresponsive = True
        return Verdict.BECAME_UNRESPONSIVE
