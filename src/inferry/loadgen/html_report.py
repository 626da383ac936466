"""The report people open: one page with tables and plots, light or dark, that loads nothing from anywhere."""

import json
from collections.abc import Callable, Sequence
from html import escape

from inferry.loadgen.figures import after_warmup, curve
from inferry.loadgen.formatting import seconds
from inferry.loadgen.result import Result
from inferry.loadgen.rows import CallRow
from inferry.loadgen.svg import MAX_SERIES, Points, Series, bars, distribution, legend, over_time
from inferry.loadgen.tables import Table, cost_table, failure_table, lane_table
from inferry.sim.workload import SloTarget

LANES = ("P0", "P1", "P2")
_BINS = 240
_LIGHT = ("#2563eb", "#dc2626", "#047857", "#b45309", "#7c3aed", "#0e7490", "#be185d", "#4b5563")
_DARK = ("#60a5fa", "#f87171", "#34d399", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6", "#9ca3af")


def _style() -> str:
    def palette(colours: Sequence[str]) -> str:
        return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))

    series = "".join(
        f"polyline.s{n},line.s{n}{{stroke:var(--c{n})}}rect.s{n}{{fill:var(--c{n})}}i.s{n}{{background:var(--c{n})}}"
        for n in range(MAX_SERIES)
    )
    return (
        f":root{{color-scheme:light dark;--paper:#fff;--ink:#1f2937;--soft:#6b7280;--line:#e5e7eb;{palette(_LIGHT)}}}"
        "@media(prefers-color-scheme:dark){:root{--paper:#111827;--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;"
        f"{palette(_DARK)}}}}}"
        "body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:80rem;padding:1rem;"
        "background:var(--paper);color:var(--ink)}"
        "h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .25rem}p{margin:.25rem 0 .75rem}"
        ".soft,figcaption{color:var(--soft);font-size:.875rem}.wide{overflow-x:auto}"
        "table{border-collapse:collapse;margin:.75rem 0;font-size:.875rem;font-variant-numeric:tabular-nums}"
        "td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}"
        "td.word,th.word{text-align:left}th{color:var(--soft);font-weight:600}"
        ".plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr))}"
        "figure{margin:0}svg{display:block;width:100%;height:auto}"
        "svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg text.on{fill:var(--paper)}"
        "svg text.value{fill:var(--ink)}"
        "polyline{fill:none;stroke-width:2;stroke-linejoin:round}.grid{stroke:var(--line)}"
        ".mark{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:4 3}"
        ".legend span{margin-right:1.25rem;white-space:nowrap}"
        ".legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}"
        "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem}"
        f"{series}"
    )


def html_page(results: Sequence[Result]) -> str:
    """One result, with its lanes as curves; or several, with a plot for each lane and a curve for each result."""
    lanes = [name for name in LANES if any(name in one.lanes for one in results)]
    several = len(results) > 1
    title = " against ".join(one.label for one in results) if several else results[0].workload
    names = [one.label for one in results] if several else lanes
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_style()}</style></head><body>",
            f"<h1>{escape(title)}</h1>{''.join(map(_about, results))}",
            legend((name, number) for number, name in enumerate(names)),
            _section(
                "Promises kept",
                _slo_text(results[0], lanes),
                [_attainment_plot(results, lanes), *_cost_plot(results, lanes)],
            ),
            _html(lane_table(results)),
            _section(
                "Latency",
                "The part of first tokens, gaps and answers that had come after that long. First tokens and answers "
                "are counted from when the call was due, gaps between two events of a stream that bring tokens. "
                "Dashed: the promise.",
                [
                    *_distributions("first token", results, lanes, _first_tokens, lambda one: one.ttft_s),
                    *_distributions("gap", results, lanes, _itls, lambda one: one.itl_s),
                    *_distributions("end to end", results, lanes, _ends, lambda _: None),
                ],
            ),
            _section("Over time", "", _over_time(results, lanes)),
            _section("In money and work", _cost_notes(results), []),
            _html(cost_table(results)),
            _failures(results),
            *map(_details, results),
            "</body></html>\n",
        )
    )


# -- words and tables --------------------------------------------------------------------------------------------------


def _about(result: Result) -> str:
    label = f"<b>{escape(result.label)}</b>: " if result.label else ""
    partial = " <b>Stopped before its end.</b>" if result.partial else ""
    return (
        f'<p class="soft">{label}{escape(result.workload)}; {escape(result.model)} at {escape(result.url)}; '
        f"{result.done:,} calls done, {result.failed:,} failed in {result.wall_s:,.1f} s"
        f"{f', the first {result.warmup_s:g} s not counted' if result.warmup_s else ''}; {escape(result.at)}. "
        f"The generator was {result.generator.lag_p99_ms:.1f} ms late at p99.{partial}</p>"
    )


def _slo_text(result: Result, lanes: Sequence[str]) -> str:
    text = [
        f"{lane}: first token within {seconds(result.slo_targets[lane].ttft_s)}, then one every "
        f"{seconds(result.slo_targets[lane].itl_s)}"
        for lane in lanes
    ]
    return f"Of the calls that were planned, those whose every token came in time. {'. '.join(text)}."


def _cost_notes(results: Sequence[Result]) -> str:
    model = next((one.engine_model for one in results if one.engine_model), None)
    work = f"engine time in full batches, by the model “{model}”" if model else "tokens computed and written"
    return (
        f"Work is {work}. A run pays the part of the bill that its work is of all work; the bill is the time that "
        "everything took, whether the GPU computed or not."
    )


def _section(heading: str, words: str, plots: Sequence[str]) -> str:
    shown = [plot for plot in plots if plot]
    grid = f'<div class="plots">{"".join(shown)}</div>' if shown else ""
    return f'<section><h2>{heading}</h2><p class="soft">{escape(words)}</p>{grid}</section>'


def _html(table: Table) -> str:
    words = {"", "arm", "lane", "failure", "what was said"}
    kinds = [' class="word"' if heading in words else "" for heading in table.headings]

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    return f'<div class="wide"><table><tr>{row(table.headings, "th")}</tr>{body}</table></div>'


def _failures(results: Sequence[Result]) -> str:
    table = failure_table(results)
    return f"<h2>Failures</h2>{_html(table)}" if table.rows else ""


def _details(result: Result) -> str:
    settings = json.dumps({**result.settings, "versions": result.versions}, indent=1, ensure_ascii=False)
    return (
        f"<details><summary>How {escape(result.label or 'it')} was measured</summary>"
        f"<pre>{escape(result.command)}\n{escape(settings)}</pre></details>"
    )


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
    """One plot with the lanes of one result, or one plot a lane with several results."""

    def series(result: Result, lane: str, colour: int, label: str) -> Series:
        return Series(label, colour % MAX_SERIES, _parts(values(result, lane)), slo_target(result.slo_targets[lane]))

    if len(results) == 1:
        return [distribution(name, [series(results[0], lane, n, lane) for n, lane in enumerate(lanes)])]
    return [
        distribution(f"{lane}, {name}", [series(one, lane, n, one.label) for n, one in enumerate(results)])
        for lane in lanes
    ]


def _parts(ordered: Sequence[float]) -> Points:
    """As steps: between two values nothing more has come."""
    many = len(ordered)
    return [(value, part / many) for number, value in enumerate(ordered) for part in (number, number + 1)]


def _attainment_plot(results: Sequence[Result], lanes: Sequence[str]) -> str:
    def value(result: Result, lane: str) -> float | None:
        return result.lanes[lane].attainment if lane in result.lanes else None

    return _lane_bars("calls that kept their promise", results, lanes, value, maximum=1.0, unit="{:.0%}")


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
        over_time("output tokens a second", tokens, until_s),
        over_time("calls that were due and not answered yet", open_calls, until_s),
    ]


def _total(result: Result) -> list[float]:
    lanes = list(result.tokens_by_second.values())
    return [sum(column) for column in zip(*lanes, strict=True)]


def _per_second(values: Sequence[float]) -> Points:
    return [(second + 0.5, value) for second, value in enumerate(values)]


def in_flight(rows: Sequence[CallRow], until_s: float, lane: str | None = None) -> Points:
    """(second, the most calls at once in the little time before it)."""
    changes = sorted(
        change
        for row in rows
        if lane in (None, row.lane)
        for change in ((row.due_s, 1), (row.due_s + max(row.end_s, 0.0), -1))
    )
    points = []
    number = now = 0
    for index in range(1, _BINS + 1):
        ends_at, maximum = until_s * index / _BINS, now
        while number < len(changes) and changes[number][0] <= ends_at:
            now += changes[number][1]
            maximum = max(maximum, now)
            number += 1
        points.append((ends_at, float(maximum)))
    return points
