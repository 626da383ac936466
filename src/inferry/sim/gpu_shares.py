"""The time of simulated engines divided among calls, by the rule of the ledger's GPU-seconds.

What the tokens of a call add to steps is its own. The rest, the fixed part of steps, is divided evenly among the calls
that run at the same time, so a call that runs beside others costs less.
"""

from collections.abc import Sequence

from inferry.sim.calls import CallRow
from inferry.sim.costs import CostModel


def gpu_seconds(rows: Sequence[CallRow], costs: CostModel, busy_s: Sequence[float]) -> list[float]:
    """GPU-seconds of each row. `busy_s` is the time that each worker has computed."""
    found = [0.0] * len(rows)
    for worker, busy in enumerate(busy_s):
        mine = [index for index, row in enumerate(rows) if row.worker == worker and row.sent_s is not None]
        own = {index: _own_s(rows[index], costs) for index in mine}
        shares = _shares([(rows[index].at + (rows[index].sent_s or 0.0), _end(rows[index])) for index in mine])
        total, fixed_s = sum(shares) or 1.0, max(0.0, busy - sum(own.values()))
        scale = min(1.0, busy / (sum(own.values()) or 1.0))  # tokens of a row that steps before it have computed
        for index, share in zip(mine, shares, strict=True):
            found[index] = own[index] * scale + fixed_s * share / total
    return found


def _own_s(row: CallRow, costs: CostModel) -> float:
    return costs.prefill_token_s * (row.prompt - row.cached) + costs.sequence_s * row.produced


def _end(row: CallRow) -> float:
    return row.at + row.end_s


def _shares(spans: Sequence[tuple[float, float]]) -> list[float]:
    """The integral of 1 / n over each span, where n is the number of spans at a time."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    upto: dict[float, float] = {}
    running, total, before = 0, 0.0, 0.0
    for at, change in events:
        if running:
            total += (at - before) / running
        upto[at] = total
        running, before = running + change, at
    return [upto[end] - upto[begin] for begin, end in spans]
