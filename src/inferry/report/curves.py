"""Points of curves that several reports draw."""

from collections.abc import Iterable, Sequence

Points = Sequence[tuple[float, float]]
BINS = 240


def peaks(changes: Iterable[tuple[float, int]], until_s: float) -> Points:
    """(end of a bin in seconds, the highest count within the bin) for a count that changes by `(second, difference)`.

    Changes at the same time count as one.
    """
    ordered = sorted(changes)
    points = []
    number = now = 0
    for index in range(1, BINS + 1):
        ends_at, highest = until_s * index / BINS, now
        while number < len(ordered) and ordered[number][0] <= ends_at:
            at = ordered[number][0]
            while number < len(ordered) and ordered[number][0] == at:
                now += ordered[number][1]
                number += 1
            highest = max(highest, now)
        points.append((ends_at, float(highest)))
    return points
