"""How far behind its promise a stream fell, without looking at every token of every stream.

All decoding sequences write one token per step. A stream whose token i left at the end of step `anchor + i` is late by
at most max over its steps of (end of step - gap * step) + gap * anchor: a maximum over a suffix of one series for all
streams with that gap. The series is kept as a falling stack, so that a suffix maximum is one binary search.
"""

from array import array
from bisect import bisect_left

_LONG = 1_000


class LatenessSeries:
    """End times of steps, for one gap. Steps are added in order; only maxima up to the last step can be asked for."""

    __slots__ = ("_long", "_steps", "_values", "gap_s")

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self._long = _LONG
        self._steps = array("q")
        self._values = array("d")

    def add(self, step: int, ended_at: float) -> None:
        value = ended_at - self.gap_s * step
        values, steps = self._values, self._steps
        while values and values[-1] <= value:
            values.pop()
            steps.pop()
        values.append(value)
        steps.append(step)

    def worst_since(self, step: int, anchor: int) -> float:
        """max(end of token i - gap * i) over the tokens of steps `step` to the last one added."""
        return self._values[bisect_left(self._steps, step)] + self.gap_s * anchor

    def forget_before(self, step: int) -> None:
        cut = bisect_left(self._steps, step)
        del self._steps[:cut], self._values[:cut]
        self._long = max(_LONG, 2 * len(self._steps))

    @property
    def is_long(self) -> bool:
        """Whether it is worth asking which steps can be forgotten."""
        return len(self._steps) > self._long

    def __len__(self) -> int:
        return len(self._steps)
