"""What plots draw, as points: how first tokens are spread, and how many calls wait and run over time."""

from collections.abc import Iterable, Sequence

from inferry.domain.lanes import Lane
from inferry.sim.calls import CallRow

Points = list[tuple[float, float]]
_MAX_POINTS = 240


def first_token_curve(rows: Iterable[CallRow], lane: Lane) -> Points:
    """(seconds, part of the lane's calls whose first token had come by then); a few hundred points stand for all."""
    values = sorted([row.ttft_s for row in rows if row.lane is lane and row.ttft_s is not None])
    if not values:
        return []
    stride = max(1, len(values) // _MAX_POINTS)
    points = [(values[i], (i + 1) / len(values)) for i in range(0, len(values), stride)]
    return [*points, (values[-1], 1.0)]


def open_calls(rows: Sequence[CallRow], until_s: float) -> tuple[Points, Points]:
    """(time, calls that wait in the gateway) and (time, calls that an engine has): the most at once, bin by bin."""
    changes: list[tuple[float, int, int]] = []
    for row in rows:
        end = row.at + row.end_s
        if row.sent_s is None:
            changes += [(row.at, 1, 0), (end, -1, 0)]
        else:
            changes += [(row.at, 1, 0), (row.at + row.sent_s, -1, 1), (end, 0, -1)]
    changes.sort()
    waiting: Points = []
    running: Points = []
    queued = sent = number = 0
    for index in range(1, _MAX_POINTS + 1):
        ends_at = until_s * index / _MAX_POINTS
        max_queued, max_sent = queued, sent
        while number < len(changes) and changes[number][0] <= ends_at:
            at = changes[number][0]
            while number < len(changes) and changes[number][0] == at:
                queued += changes[number][1]
                sent += changes[number][2]
                number += 1
            max_queued, max_sent = max(max_queued, queued), max(max_sent, sent)
        waiting.append((ends_at, max_queued))
        running.append((ends_at, max_sent))
    return waiting, running
