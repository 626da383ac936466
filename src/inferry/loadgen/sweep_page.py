"""Tables and the HTML page of a sweep; terminal and page show the same tables."""

import json
from collections.abc import Callable

from inferry.loadgen.sweep_result import LevelFigures, Percentiles, SweepResult
from inferry.report import html
from inferry.report.formatting import count, seconds, share, tick
from inferry.report.html import Table
from inferry.report.svg import Series, lines

_LATENCIES: tuple[tuple[str, Callable[[LevelFigures], Percentiles | None]], ...] = (
    ("time to first token", lambda level: level.ttft),
    ("inter-token latency", lambda level: level.itl),
    ("end to end", lambda level: level.e2e),
)
_PARTS = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max"}


def throughput_table(result: SweepResult) -> Table:
    rows = [
        [
            f"{level.concurrency:,}",
            f"{level.seconds:,.1f} s",
            count(level.calls),
            count(level.failed),
            f"{level.calls_per_s:,.2f}",
            count(level.output_tokens_per_s),
            share(level.gpu_utilisation) if result.gpu_source else "not measured",
        ]
        for level in result.levels
    ]
    return Table(("concurrency", "measured", "calls", "failed", "calls/s", "out/s", "GPU"), rows)


def latency_tables(result: SweepResult) -> list[tuple[str, Table]]:
    """A table per latency, with a row per level."""
    tables = []
    for name, figures in _LATENCIES:
        rows = []
        for level in result.levels:
            found = figures(level)
            cells = [seconds(None if found is None else getattr(found, part)) for part in _PARTS]
            rows.append([f"{level.concurrency:,}", *cells])
        tables.append((name, Table(("concurrency", *_PARTS.values()), rows)))
    return tables


def failure_rows(result: SweepResult) -> Table:
    rows = [
        [f"{level.concurrency:,}", kind, count(times), result.failures.get(kind, "")]
        for level in result.levels
        for kind, times in level.failures.items()
    ]
    return Table(("concurrency", "failure", "calls", "message"), rows)


def findings(result: SweepResult) -> list[str]:
    """Where the server saturates, as sentences."""
    if not result.levels:
        return ["No level was measured."]
    best = max(result.levels, key=lambda level: level.output_tokens_per_s)
    last = result.levels[-1].concurrency
    said = [f"Highest throughput: {best.output_tokens_per_s:,.0f} output tokens/s at concurrency {best.concurrency:,}."]
    if result.saturated_at is None:
        said.append(f"Throughput still grew at concurrency {last:,}: the knee is beyond the sweep.")
    else:
        said.append(
            f"Knee: concurrency {result.saturated_at:,} is the lowest with throughput within 5 % of the highest."
        )
    target = seconds(result.ttft_target_s)
    if result.ttft_missed_at is None:
        said.append(f"The TTFT target of {target} was met at p95 at every level.")
    else:
        said.append(f"The TTFT target of {target} is first missed at p95 at concurrency {result.ttft_missed_at:,}.")
    said.append(f"GPU utilisation: {result.gpu_source or 'not measured'}.")
    return said


def html_page(result: SweepResult) -> str:
    groups = [f"{level.concurrency:,}" for level in result.levels]
    failures = failure_rows(result)
    label = f"{result.label}: " if result.label else ""
    partial = " Interrupted before its end." if result.partial else ""
    return html.page(
        f"{label}concurrency sweep of {result.model}",
        (
            html.paragraph(
                f"{result.workload}; lane {result.lane}; {result.url}"
                f"{f', version {result.server}' if result.server else ''}; {result.at}.{partial}"
            ),
            html.section("Findings", " ".join(findings(result))),
            html.section(
                "Throughput",
                "Output tokens and calls that arrived after the warm-up of a level, per second, by concurrency.",
                [*_throughput_plots(result, groups)],
            ),
            html.table(throughput_table(result)),
            html.section(
                "Latency",
                "By concurrency, from when a call was sent; inter-token latency between two events with tokens. "
                "With fewer than 1,000 values p99.9 is the maximum. Dashed: the TTFT target.",
                [_latency_plot(result, groups, name, figures) for name, figures in _LATENCIES],
            ),
            html.legend(_PARTS.values()),
            *(html.section(name, "") + html.table(table) for name, table in latency_tables(result)),
            html.section("Failures", "") + html.table(failures) if failures.rows else "",
            html.details(
                "Settings",
                f"{result.command}\n{json.dumps({**result.settings, 'versions': result.versions}, indent=1)}",
            ),
        ),
    )


def _throughput_plots(result: SweepResult, groups: list[str]) -> list[str]:
    levels = result.levels
    tokens = [(float(index), level.output_tokens_per_s) for index, level in enumerate(levels)]
    calls = [(float(index), level.calls_per_s) for index, level in enumerate(levels)]
    busy = [(float(n), level.gpu_utilisation) for n, level in enumerate(levels) if level.gpu_utilisation is not None]
    return [
        lines("output tokens per second", groups, [Series("output tokens/s", 0, tokens)], _number),
        lines("calls per second", groups, [Series("calls/s", 0, calls)], _number),
        lines("GPU utilisation", groups, [Series("GPU", 0, busy)], lambda value: f"{value:.0%}"),
    ]


def _latency_plot(
    result: SweepResult, groups: list[str], name: str, figures: Callable[[LevelFigures], Percentiles | None]
) -> str:
    target_s = result.ttft_target_s if name == _LATENCIES[0][0] else None
    found = [(float(index), figures(level)) for index, level in enumerate(result.levels)]
    drawn = [
        Series(label, colour, [(at, getattr(one, part)) for at, one in found if one is not None], target_s)
        for colour, (part, label) in enumerate(_PARTS.items())
    ]
    return lines(name, groups, drawn, tick, is_log=True)


def _number(value: float) -> str:
    return f"{value:,.4g}"
