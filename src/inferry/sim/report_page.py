"""The HTML report of a simulation: a table, attainment, time to first token, and open calls of every arm."""

from collections.abc import Mapping, Sequence

from inferry.domain.lanes import Lane
from inferry.report import html
from inferry.report.curves import Points
from inferry.report.formatting import NONE
from inferry.report.html import Table
from inferry.report.svg import MAX_SERIES, Series, bars, distribution, over_time
from inferry.sim.calls import CallRow
from inferry.sim.curves import first_token_curve, open_calls
from inferry.sim.formatting import show
from inferry.sim.report import Comparison, Spread

_COLUMNS = (
    ("SLO attainment", "attainment"),
    ("TTFT p50", "ttft_p50"),
    ("p95", "ttft_p95"),
    ("p99", "ttft_p99"),
    ("ITL p95", "itl_p95"),
    ("goodput/s", "goodput"),
    ("fairness", "fairness"),
)
_ARM_COLUMNS = (("utilisation", "utilisation"), ("all done", "wall_s"))


def html_page(
    title: str,
    arms: Sequence[Comparison],
    rows: Mapping[str, Sequence[CallRow]],
    ttft_target_s: Mapping[Lane, float],
    notes: Sequence[str] = (),
) -> str:
    """`rows` are the calls of each arm with its first seed, by the arm's name; `ttft_target_s` the TTFT targets."""
    lanes = [lane for lane in Lane if any(lane.name in arm.lanes for arm in arms)]
    several_seeds = bool(arms) and len(arms[0].reports) > 1
    of_first_seed = " The curves show the first seed." if several_seeds else ""
    until_s = max((arm.reports[0].wall_s for arm in arms), default=0.0)
    opened = [open_calls(rows.get(arm.arm, ()), until_s) for arm in arms]
    ranges = " Lines span the seeds." if several_seeds else ""
    return html.page(
        title,
        (
            *map(html.paragraph, notes),
            html.legend(arm.arm for arm in arms),
            html.section("SLO attainment", f"Fraction of planned calls.{ranges}", [_attainment(arms, lanes)]),
            html.table(_table(arms, lanes)),
            html.section(
                "Time to first token",
                f"Fraction of calls with a first token after this time. Dashed: the target.{of_first_seed}",
                [_first_tokens(lane, arms, rows, ttft_target_s[lane]) for lane in lanes],
            ),
            html.section(
                "Over time",
                "Highest number of calls at the same time.",
                [
                    over_time("queued in the gateway", _series(arms, [queued for queued, _ in opened]), until_s),
                    over_time("sent to an engine", _series(arms, [sent for _, sent in opened]), until_s),
                ],
            ),
        ),
    )


def _series(arms: Sequence[Comparison], curves: Sequence[Points]) -> list[Series]:
    return [
        Series(arm.arm, number % MAX_SERIES, points)
        for number, (arm, points) in enumerate(zip(arms, curves, strict=True))
    ]


def _first_tokens(
    lane: Lane, arms: Sequence[Comparison], rows: Mapping[str, Sequence[CallRow]], target_s: float
) -> str:
    series = [
        Series(arm.arm, number % MAX_SERIES, first_token_curve(rows.get(arm.arm, ()), lane), target_s)
        for number, arm in enumerate(arms)
    ]
    return distribution(lane.name, series)


def _attainment(arms: Sequence[Comparison], lanes: Sequence[Lane]) -> str:
    series = []
    for number, arm in enumerate(arms):
        found = {
            float(group): spread
            for group, lane in enumerate(lanes)
            if (spread := arm.lanes.get(lane.name, {}).get("attainment")) is not None
        }
        points = [(group, spread.median) for group, spread in found.items()]
        ranges = {group: (spread.low, spread.high) for group, spread in found.items() if spread.count > 1}
        series.append(Series(arm.arm, number % MAX_SERIES, points, ranges=ranges))
    names = [lane.name for lane in lanes]
    return bars("attainment by lane", names, series, maximum=1.0, unit="{:.1%}", side_by_side=max(1, len(arms)))


def _table(arms: Sequence[Comparison], lanes: Sequence[Lane]) -> Table:
    rows = []
    for arm in arms:
        for lane in lanes:
            figures = arm.lanes.get(lane.name)
            if figures is not None:
                cells = [_cell(name, figures.get(name)) for name in ("planned", *(name for _, name in _COLUMNS))]
                cells += [_cell(name, arm.over_seeds.get(name)) for _, name in _ARM_COLUMNS]
                rows.append([arm.arm, lane.name, *cells])
    return Table(("arm", "lane", "planned", *(heading for heading, _ in (*_COLUMNS, *_ARM_COLUMNS))), rows)


def _cell(name: str, spread: Spread | None) -> str:
    if spread is None:
        return NONE
    return show(name, spread.median) + (f"\n{_range(name, spread)}" if spread.count > 1 else "")


def _range(name: str, spread: Spread) -> str:
    """From the lowest to the highest; without the unit where it is that of the median."""
    low, middle, high = (show(name, value) for value in (spread.low, spread.median, spread.high))
    unit = middle.lstrip("0123456789.,")
    if low.endswith(unit) and high.endswith(unit):
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{low}{NONE}{high}"
