"""How far behind its promise a stream fell, without looking at every token of every stream.

All decoding sequences write one token per step. A stream whose token i left at the end of step `anchor + i` is late by
at most max over its steps of (end of step - gap * step) + gap * anchor: a maximum over a suffix of one series for all
streams with that gap. The series is kept as a falling stack, so that a suffix maximum is one binary search.
"""

from array import array
from bisect import bisect_left

_MIN_TRIM_STEPS = 1_000


class LatenessSeries:
    """End times of steps, for one gap. Steps are added in order; only maxima up to the last step can be asked for."""

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
        """max(end of token i - gap * i) over the tokens of steps `step` to the last one added."""
        return self._values[bisect_left(self._steps, step)] + self.itl_s * anchor

    def forget_before(self, step: int) -> None:
        cut = bisect_left(self._steps, step)
        del self._steps[:cut], self._values[:cut]
        self._trim_at = max(_MIN_TRIM_STEPS, 2 * len(self._steps))

    @property
    def needs_trim(self) -> bool:
        """Whether it is worth asking which steps can be forgotten."""
        return len(self._steps) > self._trim_at

    def __len__(self) -> int:
        return len(self._steps)
