"""How many items of a batch to have in flight, from what was refused. Pure.

A refusal says that the tenant's limit, the lane's queue or the fleet is full. The window shrinks to what was admitted
and grows by one per window of answers, so that few items are refused and every place that becomes free is used.
"""


class Window:
    """Additive increase, decrease to what was admitted."""

    def __init__(self) -> None:
        self._size = float("inf")
        self._not_before = 0.0

    @property
    def not_before(self) -> float:
        """Nothing begins before this time, unless an item in flight ends first."""
        return self._not_before

    def allows(self, in_flight: int, share: int, now: float) -> bool:
        return in_flight < min(self._size, share) and now >= self._not_before

    def refused(self, admitted: int, retry_at: float) -> None:
        """An item was refused while `admitted` others are in flight."""
        self._size = float(max(1, admitted))
        self._not_before = retry_at

    def answered(self) -> None:
        """An item in flight has ended: its place is free."""
        self._size += 1 / self._size
        self._not_before = 0.0
