"""A report people can open: one HTML page with a table and drawings, made by hand, nothing to install."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from inferry.domain.jobs import Lane
from inferry.sim.calls import CallRow
from inferry.sim.report import Report

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 220, 44, 30
_LOW_S, _HIGH_S = 0.01, 200.0
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#111}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:0 1rem 1rem 0}"
    "svg text{font:11px system-ui,sans-serif;fill:#444}"
)


def html_page(title: str, reports: Sequence[Report], rows: Mapping[str, Sequence[CallRow]]) -> str:
    """`rows` are the calls of each arm, by its name."""
    figures = "".join(_first_tokens(lane, reports, rows) for lane in Lane if any(lane.name in r.lanes for r in reports))
    legend = " &nbsp; ".join(
        f'<span style="color:{_COLOURS[i % len(_COLOURS)]}">■</span> {escape(one.arm)}' for i, one in enumerate(reports)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{_table(reports)}<h2>Time to the first token</h2>"
        f"<p>The part of calls whose first token had come after so many seconds.</p><p>{legend}</p>{figures}</html>\n"
    )


def _table(reports: Sequence[Report]) -> str:
    head = "<tr><th>arm</th><th>lane</th><th>planned</th><th>promises kept</th><th>first token p50</th><th>p95</th>"
    head += "<th>gap p95</th><th>step p95</th><th>all done</th><th>output/s</th></tr>"
    body = "".join(
        f"<tr><td>{escape(one.arm)}</td><td>{name}</td><td>{lane.planned}</td><td>{lane.attainment:.1%}</td>"
        f"<td>{_seconds(lane.ttft_p50)}</td><td>{_seconds(lane.ttft_p95)}</td><td>{_seconds(lane.gap_p95)}</td>"
        f"<td>{_seconds(lane.step_p95)}</td><td>{one.wall_s:.1f} s</td><td>{one.output_rate:.0f}</td></tr>"
        for one in reports
        for name, lane in one.lanes.items()
    )
    return f"<table>{head}{body}</table>"


def _first_tokens(lane: Lane, reports: Sequence[Report], rows: Mapping[str, Sequence[CallRow]]) -> str:
    lines = "".join(
        _line(
            sorted(row.ttft_s for row in rows.get(one.arm, ()) if row.lane is lane and row.ttft_s is not None),
            _COLOURS[i % len(_COLOURS)],
        )
        for i, one in enumerate(reports)
    )
    ticks = "".join(
        f'<line x1="{_x(t):.1f}" y1="0" x2="{_x(t):.1f}" y2="{_HEIGHT}" stroke="#eee"/>'
        f'<text x="{_x(t):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{t:g} s</text>'
        for t in (0.01, 0.1, 1.0, 10.0, 100.0)
    )
    levels = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(part) + 4:.1f}" text-anchor="end">{part:.0%}</text>' for part in (0.0, 0.5, 0.95)
    )
    return (
        f'<figure><svg viewBox="0 -8 {_LEFT + _WIDTH + 12} {_HEIGHT + _BOTTOM + 8}" width="{_LEFT + _WIDTH + 12}" '
        f'role="img" aria-label="{lane.name}: time to the first token">{ticks}{levels}{lines}</svg>'
        f"<figcaption>{lane.name}</figcaption></figure>"
    )


def _line(values: Sequence[float], colour: str) -> str:
    if not values:
        return ""
    # A few hundred points look like all of them.
    stride = max(1, len(values) // 200)
    points = [(values[i], (i + 1) / len(values)) for i in range(0, len(values), stride)] + [(values[-1], 1.0)]
    path = " ".join(f"{_x(value):.1f},{_y(part):.1f}" for value, part in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _x(seconds: float) -> float:
    clipped = min(max(seconds, _LOW_S), _HIGH_S)
    return _LEFT + _WIDTH * log10(clipped / _LOW_S) / log10(_HIGH_S / _LOW_S)


def _y(part: float) -> float:
    return _HEIGHT * (1 - part)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"  # noqa: RUF001 - what a person reads where there is no number
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
