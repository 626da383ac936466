"""The process in front of an engine: it takes requests in and passes tokens on, one thing after the other.

Tokens are many, so their work is a flow and not a list: while `inflow` seconds of work arrive per second, the backlog
grows or drains at a steady rate and is never below zero.
"""


class Server:
    """How long what comes now has to wait. Time is only ever asked for in order."""

    __slots__ = ("_at", "_backlog_s", "_inflow", "busy_s")

    def __init__(self) -> None:
        self._backlog_s = 0.0
        self._inflow = 0.0
        self._at = 0.0
        self.busy_s = 0.0

    def delay_s(self, now: float) -> float:
        """How long something that comes now waits until everything before it is done."""
        elapsed = now - self._at
        if elapsed > 0:
            before = self._backlog_s
            self._backlog_s = max(0.0, before + (self._inflow - 1.0) * elapsed)
            self.busy_s += before + self._inflow * elapsed - self._backlog_s
            self._at = now
        return self._backlog_s

    def set_inflow(self, inflow: float, now: float) -> None:
        """From now on so much work comes per second."""
        self.delay_s(now)
        self._inflow = inflow

    def accept(self, work_s: float, now: float) -> float:
        """Take in a piece of work; the time it is done."""
        self._backlog_s = self.delay_s(now) + work_s
        return now + self._backlog_s
