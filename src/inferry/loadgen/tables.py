"""The tables of one result or several; terminal and page show the same."""

from collections.abc import Callable, Sequence

from inferry.loadgen.costs import CostFigures
from inferry.loadgen.figures import LaneFigures
from inferry.loadgen.result import Result
from inferry.report.formatting import NONE, count, money, seconds, share
from inferry.report.html import Table

_LaneColumns = tuple[tuple[str, Callable[[LaneFigures], str]], ...]
_LANE_COLUMNS: _LaneColumns = (
    ("planned", lambda lane: count(lane.planned)),
    ("SLO", lambda lane: share(lane.attainment if lane.planned else None)),
    ("ttft p50", lambda lane: seconds(lane.ttft_p50)),
    ("p95", lambda lane: seconds(lane.ttft_p95)),
    ("p99", lambda lane: seconds(lane.ttft_p99)),
    ("itl p50", lambda lane: seconds(lane.itl_p50)),
    ("p95", lambda lane: seconds(lane.itl_p95)),
    ("p99", lambda lane: seconds(lane.itl_p99)),
    ("over", lambda lane: share(lane.itl_over_target)),
    ("e2e p50", lambda lane: seconds(lane.e2e_p50)),
    ("p95", lambda lane: seconds(lane.e2e_p95)),
    ("out/s", lambda lane: count(lane.output_rate)),
    ("good/s", lambda lane: count(lane.goodput)),
    ("failed", lambda lane: count(lane.failed)),
    ("done", lambda lane: seconds(lane.done_s)),
)


_TAIL_COLUMNS: _LaneColumns = (
    ("ttft p99", lambda lane: seconds(lane.ttft_p99)),
    ("p99.9", lambda lane: seconds(lane.ttft_p999)),
    ("max", lambda lane: seconds(lane.ttft_max)),
    ("itl p99", lambda lane: seconds(lane.itl_p99)),
    ("p99.9", lambda lane: seconds(lane.itl_p999)),
    ("max", lambda lane: seconds(lane.itl_max)),
    ("e2e p99", lambda lane: seconds(lane.e2e_p99)),
    ("p99.9", lambda lane: seconds(lane.e2e_p999)),
    ("max", lambda lane: seconds(lane.e2e_max)),
)


def lane_table(results: Sequence[Result]) -> Table:
    """A row per result and lane."""
    return _table(results, _LANE_COLUMNS)


def tail_table(results: Sequence[Result]) -> Table:
    """The longest latencies, a row per result and lane. With fewer than 1,000 values p99.9 is the maximum."""
    return _table(results, _TAIL_COLUMNS)


def _table(results: Sequence[Result], columns: _LaneColumns) -> Table:
    several = len(results) > 1
    headings = ("lane", *(heading for heading, _ in columns))
    rows = []
    for result in results:
        for number, (name, lane) in enumerate(result.lanes.items()):
            cells = [name, *(cell(lane) for _, cell in columns)]
            rows.append([result.label if not number else "", *cells] if several else cells)
    return Table(("arm", *headings) if several else headings, rows)


_TERMS: tuple[tuple[str, Callable[[CostFigures], float | None], Callable[[float | None], str]], ...] = (
    ("GPU utilisation (modelled work / wall)", lambda cost_figures: cost_figures.utilisation, share),
    ("p95 step latency", lambda cost_figures: cost_figures.step_p95_s, seconds),
    ("cost per run", lambda cost_figures: cost_figures.cost_per_run, money),
    ("runs over budget", lambda cost_figures: cost_figures.over_budget, share),
    ("runs done", lambda cost_figures: cost_figures.runs, count),
    ("batch lane done after", lambda cost_figures: cost_figures.batch_done_s, seconds),
    ("everything done after", lambda cost_figures: cost_figures.wall_s, seconds),
    ("bill", lambda cost_figures: cost_figures.bill, money),
)


def cost_table(results: Sequence[Result]) -> Table:
    """A row per figure, a column per result; with two results, the ratio of the second to the first."""
    rows = []
    for name, value, words in _TERMS:
        values = [value(result.cost_figures) for result in results]
        if all(one is None for one in values):
            continue
        cells = [name, *map(words, values)]
        if len(values) == 2:
            before, after = values
            cells.append(f"{after / before:.2f}×" if before and after is not None else NONE)  # noqa: RUF001
        rows.append(cells)
    labels = [result.label or "value" for result in results]
    return Table(("", *labels, "ratio") if len(labels) == 2 else ("", *labels), rows)


def failure_table(results: Sequence[Result]) -> Table:
    """Why calls failed, with the first message of the server."""
    rows = []
    for result in results:
        for name, lane in result.lanes.items():
            for kind, times in lane.failures.items():
                rows.append([result.label, name, kind, count(times), result.failures.get(kind, "")])
    return Table(("arm", "lane", "failure", "calls", "message"), rows)
