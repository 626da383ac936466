"""How fast a lane empties, measured; what a refused client is told to wait for."""

_SPAN_S = 5.0


class DrainRate:
    """Departures per second while the lane has work; recent spans count for more. The owner counts `departures` up."""

    __slots__ = ("_rate", "_since", "departures")

    def __init__(self) -> None:
        self._since = 0.0
        self.departures = 0
        self._rate: float | None = None

    def begin(self, now: float) -> None:
        """The lane had nothing queued until now; time before does not count."""
        self._since = now
        self.departures = 0

    def seconds_for(self, jobs: int, now: float) -> float | None:
        """How long that many jobs take to leave, if anything has left lately."""
        elapsed = now - self._since
        if elapsed > 0 and (self.departures or elapsed >= _SPAN_S):
            measured = self.departures / elapsed
            rate = measured if self._rate is None else (self._rate + measured) / 2
            if elapsed >= _SPAN_S:
                self._rate = rate
                self.begin(now)
        else:
            rate = self._rate or 0.0
        return jobs / rate if rate > 0 else None
