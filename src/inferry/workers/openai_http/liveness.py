"""Whether a server is alive, from its responses and unanswered probes. Pure: time is an argument.

Every response counts as activity: a token of any call, a response head, a metrics page. A server is unresponsive after
MISSED_PROBES consecutive probes without any activity. One missed probe is not enough: a server under load may respond
late, and after a stall of this process its own timers fire first.
"""

import enum
import math
from typing import Final

MISSED_PROBES: Final = 2
SLOW_FACTOR: Final = 3.0
"""Probe timeout as a multiple of the slowest recent response: some metrics pages take a second."""
SLOWEST_DECAY: Final = 0.9
"""Decay of the slowest response with every further one."""
MAX_TIMEOUT_S: Final = 10.0
MAX_IDLE_TIMEOUT_S: Final = 2.5
"""The limit for an idle server: its response times under load do not apply."""
BODY_BYTES_PER_S: Final = 2e6
"""Expected speed at which a server reads bodies. A burst of long prompts delays its first responses."""


class Verdict(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """A probe was missed: probe again at once."""
    BECAME_UNRESPONSIVE = "became_unresponsive"
    UNRESPONSIVE = "unresponsive"
    """It was unresponsive before."""


class Liveness:
    """The state of one server. `last_activity_at` is the time of the last response."""

    __slots__ = ("_missed", "_slowest_response_s", "_timeout_s", "is_unresponsive", "last_activity_at")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest_response_s = 0.0
        self._missed = 0
        self.last_activity_at = -math.inf
        self.is_unresponsive = False

    @property
    def is_suspect(self) -> bool:
        """Whether the last probe was missed."""
        return self._missed > 0

    def probe_timeout_s(self, unread_bytes: int | None = 0) -> float:
        """Timeout of the next probe. `unread_bytes` are bodies that the server has to read first; None: it is idle."""
        max_timeout_s = MAX_IDLE_TIMEOUT_S if unread_bytes is None else MAX_TIMEOUT_S
        base_s = max(self._timeout_s, min(SLOW_FACTOR * self._slowest_response_s, max_timeout_s))
        return (base_s + (unread_bytes or 0) / BODY_BYTES_PER_S) / MISSED_PROBES

    def on_response(self, at: float) -> None:
        """Record activity at a time. Times before the last activity are ignored."""
        if at > self.last_activity_at:
            self.last_activity_at = at

    def on_probe_response(self, response_s: float, now: float) -> None:
        """Record the response to a probe, with any status."""
        self._slowest_response_s = max(response_s, SLOWEST_DECAY * self._slowest_response_s)
        self.on_response(now)

    def evaluate(self, probed_at: float) -> Verdict:
        """The verdict after a probe that was sent at `probed_at` and has ended."""
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
