"""Curves of a simulation: the distribution of first tokens, and how many calls are queued and sent over time."""

from collections.abc import Iterable, Sequence

from inferry.domain.lanes import Lane
from inferry.report.curves import Points, peaks
from inferry.sim.calls import CallRow

_MAX_POINTS = 240


def first_token_curve(rows: Iterable[CallRow], lane: Lane) -> Points:
    """(seconds, fraction of the lane's calls with a first token by then), sampled to a few hundred points."""
    values = sorted([row.ttft_s for row in rows if row.lane is lane and row.ttft_s is not None])
    if not values:
        return []
    stride = max(1, len(values) // _MAX_POINTS)
    points = [(values[i], (i + 1) / len(values)) for i in range(0, len(values), stride)]
    return [*points, (values[-1], 1.0)]


def open_calls(rows: Sequence[CallRow], until_s: float) -> tuple[Points, Points]:
    """(second, calls queued in the gateway) and (second, calls sent to an engine): the highest numbers per bin."""
    queued: list[tuple[float, int]] = []
    sent: list[tuple[float, int]] = []
    for row in rows:
        end = row.at + row.end_s
        queued.append((row.at, 1))
        if row.sent_s is None:
            queued.append((end, -1))
        else:
            queued.append((row.at + row.sent_s, -1))
            sent += [(row.at + row.sent_s, 1), (end, -1)]
    return peaks(queued, until_s), peaks(sent, until_s)
