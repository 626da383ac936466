"""How far a stream fell behind its inter-token target, without looking at every token of every stream.

All decoding sequences produce one token per step. A stream whose token i left at the end of step `anchor + i` is late
by max over its steps of (end of step - itl * step) + itl * anchor: a maximum over a suffix of one series for all
streams with that target. The series is kept as a monotone stack, so a suffix maximum is one binary search.
"""

from array import array
from bisect import bisect_left

_MIN_TRIM_STEPS = 1_000


class LatenessSeries:
    """End times of steps, for one inter-token target. Steps are added in order; maxima reach up to the last one."""

    __slots__ = ("_steps", "_trim_at", "_values", "itl_s")

    def __init__(self, itl_s: float) -> None:
        self.itl_s = itl_s
        self._trim_at = _MIN_TRIM_STEPS
        self._steps = array("q")
        self._values = array("d")

    def add(self, step: int, ended_at: float) -> None:
        value = ended_at - self.itl_s * step
        values, steps = self._values, self._steps
        while values and values[-1] <= value:
            values.pop()
            steps.pop()
        values.append(value)
        steps.append(step)

    def worst_since(self, step: int, anchor: int) -> float:
        """max(end of token i - itl * i) over the tokens of steps `step` to the last one added."""
        return self._values[bisect_left(self._steps, step)] + self.itl_s * anchor

    def forget_before(self, step: int) -> None:
        cut = bisect_left(self._steps, step)
        del self._steps[:cut], self._values[:cut]
        self._trim_at = max(_MIN_TRIM_STEPS, 2 * len(self._steps))

    @property
    def needs_trim(self) -> bool:
        """Whether enough steps are kept to make `forget_before` worth its cost."""
        return len(self._steps) > self._trim_at

    def __len__(self) -> int:
        return len(self._steps)


class LatenessTracker:
    """A series per inter-token target that any stream has had."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[float, LatenessSeries] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._series)

    def start(self, itl_s: float, step: int, ended_at: float) -> None:
        """Make sure that this target has a series, with this step in it."""
        if itl_s not in self._series:
            series = self._series[itl_s] = LatenessSeries(itl_s)
            series.add(step, ended_at)

    def add(self, step: int, ended_at: float) -> None:
        for series in self._series.values():
            series.add(step, ended_at)

    def worst_since(self, itl_s: float, step: int, anchor: int) -> float:
        return self._series[itl_s].worst_since(step, anchor)

    @property
    def needs_trim(self) -> bool:
        return any(series.needs_trim for series in self._series.values())

    def forget_before(self, step: int) -> None:
        for series in self._series.values():
            if series.needs_trim:
                series.forget_before(step)
