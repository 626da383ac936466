"""The server process in front of an engine: it receives requests and sends tokens, one item at a time.

Work for tokens is modelled as a flow: while `inflow` seconds of work arrive per second, the backlog grows or drains at
a constant rate and never falls below zero.
"""


class Server:
    """The delay of new work. Times must not decrease between calls."""

    __slots__ = ("_at", "_backlog_s", "_inflow", "busy_s")

    def __init__(self) -> None:
        self._backlog_s = 0.0
        self._inflow = 0.0
        self._at = 0.0
        self.busy_s = 0.0

    def delay_s(self, now: float) -> float:
        """Seconds until all work that has arrived is done."""
        elapsed = now - self._at
        if elapsed > 0:
            before = self._backlog_s
            self._backlog_s = max(0.0, before + (self._inflow - 1.0) * elapsed)
            self.busy_s += before + self._inflow * elapsed - self._backlog_s
            self._at = now
        return self._backlog_s

    def set_inflow(self, inflow: float, now: float) -> None:
        """From now on work arrives at this rate (seconds of work per second)."""
        self.delay_s(now)
        self._inflow = inflow

    def accept(self, work_s: float, now: float) -> float:
        """Add one item of work; the time at which it is done."""
        self._backlog_s = self.delay_s(now) + work_s
        return now + self._backlog_s
