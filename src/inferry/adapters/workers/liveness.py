"""Whether a server is alive, judged from what was heard of it and which questions it left open. Pure: time is an
argument.

Anything heard counts: a token of any call, the head of an answer, a metrics page. A server is silent when MISSES
questions in a row, asked one after the other, were left open and nothing else was heard meanwhile. One question is not
enough: an API server under load may answer late, and timers of this process fire first when it has stood still itself.
"""

import enum
import math

MISSES = 2
SLOWER = 3.0
"""How many times the slowest recent answer a server may take. Some write their metrics page in a second."""
FORGETS = 0.9
"""Part of the slowest answer that is left with every further one."""
LONGEST_S = 10.0
LONGEST_IDLE_S = 2.5
"""The same for a server that has no calls: how slow it was under load says nothing then."""
BYTES_PER_S = 2e6
"""How fast a server is expected to take in bodies. A burst of long prompts keeps an API server's event loop busy before
any byte comes back."""


class Verdict(enum.Enum):
    HEARD = "heard"
    DOUBT = "doubt"
    """A question was left open: ask again at once."""
    FELL_SILENT = "fell_silent"
    SILENT = "silent"
    """It was silent before."""


class Liveness:
    """What is known of one server. `heard_at` is the last sign of life."""

    __slots__ = ("_misses", "_slowest_s", "_timeout_s", "heard_at", "is_silent")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest_s = 0.0
        self._misses = 0
        self.heard_at = -math.inf
        self.is_silent = False

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last question was left open."""
        return self._misses > 0

    def question_s(self, unread_bytes: int | None = 0) -> float:
        """How long the next question may stay open, where the server has so much to read first; None: it is idle."""
        longest_s = LONGEST_IDLE_S if unread_bytes is None else LONGEST_S
        least_s = max(self._timeout_s, min(SLOWER * self._slowest_s, longest_s))
        return (least_s + (unread_bytes or 0) / BYTES_PER_S) / MISSES

    def heard(self, at: float) -> None:
        """A sign of life. One that is older than the last is none."""
        if at > self.heard_at:
            self.heard_at = at

    def answered(self, took_s: float, now: float) -> None:
        """A question was answered, with whatever status."""
        self._slowest_s = max(took_s, FORGETS * self._slowest_s)
        self.heard(now)

    def judge(self, asked_at: float) -> Verdict:
        """What a question means that was asked then and is over, answered or not."""
        if self.heard_at >= asked_at:
            self._misses = 0
            self.is_silent = False
            return Verdict.HEARD
        self._misses += 1
        if self.is_silent:
            return Verdict.SILENT
        if self._misses < MISSES:
            return Verdict.DOUBT
        self.is_silent = True
        return Verdict.FELL_SILENT
