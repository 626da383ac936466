"""The HTML report of one load test, or of several side by side."""

import json
from collections.abc import Callable, Sequence

from inferry.loadgen.figures import after_warmup, curve
from inferry.loadgen.result import Result
from inferry.loadgen.rows import CallRow
from inferry.loadgen.tables import cost_table, failure_table, lane_table, tail_table
from inferry.report import html
from inferry.report.curves import Points, peaks
from inferry.report.formatting import seconds
from inferry.report.svg import MAX_SERIES, Series, bars, distribution, over_time
from inferry.sim.workload import SloTarget

LANES = ("P0", "P1", "P2")


def html_page(results: Sequence[Result]) -> str:
    """One result with a curve per lane, or several with a plot per lane and a curve per result."""
    lanes = [name for name in LANES if any(name in one.lanes for one in results)]
    several = len(results) > 1
    title = " against ".join(one.label for one in results) if several else results[0].workload
    names = [one.label for one in results] if several else lanes
    failures = failure_table(results)
    return html.page(
        title,
        (
            *map(_about, results),
            html.legend(names),
            html.section(
                "SLO attainment",
                _slo_text(results[0], lanes),
                [_attainment_plot(results, lanes), *_cost_plot(results, lanes)],
            ),
            html.table(lane_table(results)),
            html.table(tail_table(results)),
            html.section(
                "Latency",
                "Fraction of first tokens, inter-token intervals and answers up to this time. First tokens and answers "
                "are measured from when the call was due, intervals between two events of a stream that carry tokens. "
                "Dashed: the target.",
                [
                    *_distributions("first token", results, lanes, _first_tokens, lambda one: one.ttft_s),
                    *_distributions("inter-token latency", results, lanes, _itls, lambda one: one.itl_s),
                    *_distributions("end to end", results, lanes, _ends, lambda _: None),
                ],
            ),
            html.section("Over time", "", _over_time(results, lanes)),
            html.section("Cost and work", _cost_notes(results)),
            html.table(cost_table(results)),
            html.section("Failures", "") + html.table(failures) if failures.rows else "",
            *map(_details, results),
        ),
    )


# -- texts -------------------------------------------------------------------------------------------------------------


def _about(result: Result) -> str:
    label = f"{result.label}: " if result.label else ""
    warmup = f", the first {result.warmup_s:g} s not counted" if result.warmup_s else ""
    partial = " Interrupted before its end." if result.partial else ""
    return html.paragraph(
        f"{label}{result.workload}; {result.model} at {result.url}; {result.done:,} calls done, {result.failed:,} "
        f"failed in {result.wall_s:,.1f} s{warmup}; {result.at}. "
        f"The load generator was {result.generator.lag_p99_ms:.1f} ms late at p99.{partial}"
    )


def _slo_text(result: Result, lanes: Sequence[str]) -> str:
    text = [
        f"{lane}: first token within {seconds(result.slo_targets[lane].ttft_s)}, then one token every "
        f"{seconds(result.slo_targets[lane].itl_s)}"
        for lane in lanes
    ]
    return f"Fraction of planned calls with every token in time. {'. '.join(text)}."


def _cost_notes(results: Sequence[Result]) -> str:
    model = next((one.engine_model for one in results if one.engine_model), None)
    work = f"engine time in full batches, by the engine model {model}" if model else "tokens computed and produced"
    return (
        f"Work is {work}. A run pays for its fraction of all work. The bill is for the whole time, idle GPUs included."
    )


def _details(result: Result) -> str:
    settings = json.dumps({**result.settings, "versions": result.versions}, indent=1, ensure_ascii=False)
    return html.details(f"Settings of {result.label or 'this result'}", f"{result.command}\n{settings}")


# -- plots -------------------------------------------------------------------------------------------------------------

Values = Callable[[Result, str], Sequence[float]]


def _first_tokens(result: Result, lane: str) -> Sequence[float]:
    return curve(sorted(row.ttft_s for row in _rows(result, lane) if row.ttft_s is not None))


def _ends(result: Result, lane: str) -> Sequence[float]:
    return curve(sorted(row.end_s for row in _rows(result, lane)))


def _itls(result: Result, lane: str) -> Sequence[float]:
    return result.itls[lane].curve if lane in result.itls else ()


def _rows(result: Result, lane: str) -> list[CallRow]:
    return [
        row for row in after_warmup(result.calls, result.warmup_s) if row.lane == lane and row.outcome != "cancelled"
    ]


def _distributions(
    name: str,
    results: Sequence[Result],
    lanes: Sequence[str],
    values: Values,
    slo_target: Callable[[SloTarget], float | None],
) -> list[str]:
    """One plot with the lanes of one result, or a plot per lane with several results."""

    def series(result: Result, lane: str, colour: int, label: str) -> Series:
        return Series(label, colour % MAX_SERIES, _parts(values(result, lane)), slo_target(result.slo_targets[lane]))

    if len(results) == 1:
        return [distribution(name, [series(results[0], lane, n, lane) for n, lane in enumerate(lanes)])]
    return [
        distribution(f"{lane}, {name}", [series(one, lane, n, one.label) for n, one in enumerate(results)])
        for lane in lanes
    ]


def _parts(ordered: Sequence[float]) -> Points:
    """As steps: the fraction is constant between two values."""
    many = len(ordered)
    return [(value, part / many) for number, value in enumerate(ordered) for part in (number, number + 1)]


def _attainment_plot(results: Sequence[Result], lanes: Sequence[str]) -> str:
    def value(result: Result, lane: str) -> float | None:
        return result.lanes[lane].attainment if lane in result.lanes else None

    return _lane_bars("attainment by lane", results, lanes, value, maximum=1.0, unit="{:.0%}")


def _cost_plot(results: Sequence[Result], lanes: Sequence[str]) -> list[str]:
    if not any(one.cost_figures.cost_per_run_by_lane for one in results):
        return []

    def value(result: Result, lane: str) -> float | None:
        return result.cost_figures.cost_per_run_by_lane.get(lane)

    return [_lane_bars("cost per run", results, lanes, value, maximum=None, unit="{:.2g}")]


def _lane_bars(
    caption: str,
    results: Sequence[Result],
    lanes: Sequence[str],
    value: Callable[[Result, str], float | None],
    *,
    maximum: float | None,
    unit: str,
) -> str:
    def points(result: Result, wanted: Sequence[str]) -> Points:
        found = [(float(lanes.index(lane)), value(result, lane)) for lane in wanted]
        return [(group, one) for group, one in found if one is not None]

    if len(results) == 1:
        drawn = [Series(lane, n, points(results[0], [lane])) for n, lane in enumerate(lanes)]
        return bars(caption, lanes, drawn, maximum=maximum, unit=unit, side_by_side=1)
    drawn = [Series(one.label, n % MAX_SERIES, points(one, lanes)) for n, one in enumerate(results)]
    return bars(caption, lanes, drawn, maximum=maximum, unit=unit, side_by_side=len(results))


def _over_time(results: Sequence[Result], lanes: Sequence[str]) -> list[str]:
    until_s = max(one.wall_s for one in results)
    if len(results) == 1:
        one = results[0]
        tokens = [Series(lane, n, _per_second(one.tokens_by_second.get(lane, []))) for n, lane in enumerate(lanes)]
        open_calls = [Series(lane, n, in_flight(one.calls, until_s, lane)) for n, lane in enumerate(lanes)]
    else:
        tokens = [Series(one.label, n % MAX_SERIES, _per_second(_total(one))) for n, one in enumerate(results)]
        open_calls = [Series(one.label, n % MAX_SERIES, in_flight(one.calls, until_s)) for n, one in enumerate(results)]
    return [
        over_time("output tokens per second", tokens, until_s),
        over_time("calls due and not answered", open_calls, until_s),
    ]


def _total(result: Result) -> list[float]:
    lanes = list(result.tokens_by_second.values())
    return [sum(column) for column in zip(*lanes, strict=True)]


def _per_second(values: Sequence[float]) -> Points:
    return [(second + 0.5, value) for second, value in enumerate(values)]


def in_flight(rows: Sequence[CallRow], until_s: float, lane: str | None = None) -> Points:
    """(second, highest number of calls that were due and not answered, in the bin before it)."""
    calls = [row for row in rows if lane in (None, row.lane)]
    changes = [(row.due_s, 1) for row in calls] + [(row.due_s + max(row.end_s, 0.0), -1) for row in calls]
    return peaks(changes, until_s)
