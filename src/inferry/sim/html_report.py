"""A report people can open: one HTML page with a table and drawings, made by hand, nothing to install."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from inferry.domain.lanes import Lane
from inferry.sim.calls import CallRow
from inferry.sim.curves import Points, first_token_curve, open_calls
from inferry.sim.report import Comparison, Spread

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 220, 56, 40
_NONE = "–"  # noqa: RUF001 - what a person reads where there is no number
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:86rem;padding:0 1rem;color:#111}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .5rem;border-bottom:1px solid #ddd;"
    "text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left;white-space:normal}"
    "td small{display:block;color:#666}figure{display:inline-block;margin:0 1rem 1rem 0}figcaption{color:#444}"
    "svg text{font:11px system-ui,sans-serif;fill:#444}.wide{overflow-x:auto}"
)
_COLUMNS = (
    ("promises kept", "attainment"),
    ("first token p50", "ttft_p50"),
    ("p95", "ttft_p95"),
    ("p99", "ttft_p99"),
    ("itl p95", "itl_p95"),
    ("goodput/s", "goodput"),
    ("fairness", "fairness"),
)


def html_page(
    title: str,
    arms: Sequence[Comparison],
    rows: Mapping[str, Sequence[CallRow]],
    ttft_target_s: Mapping[Lane, float],
    notes: Sequence[str] = (),
) -> str:
    """`rows` are the calls of each arm with its first seed, by the arm's name; `ttft_target_s` first-token promises."""
    lanes = [lane for lane in Lane if any(lane.name in arm.lanes for arm in arms)]
    legend = " &nbsp; ".join(
        f'<span style="color:{_colour(number)}">■</span> {escape(arm.arm)}' for number, arm in enumerate(arms)
    )
    seeds = len(arms[0].reports) if arms else 1
    until_s = max((arm.reports[0].wall_s for arm in arms), default=0.0)
    opened = [open_calls(rows.get(arm.arm, ()), until_s) for arm in arms]
    only = " The curves are of the first seed." if seeds > 1 else ""
    return "".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style><h1>{escape(title)}</h1>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            f'<div class="wide">{_table(arms, lanes)}</div>',
            f"<p>{legend}</p><h2>Promises kept</h2>",
            _bars(arms, lanes),
            f"<h2>Time to the first token</h2><p>The part of calls whose first token had come after so many seconds; "
            f"the dashed line is the promise.{only}</p>",
            *(
                _curves(
                    f"{lane.name}", [first_token_curve(rows.get(a.arm, ()), lane) for a in arms], ttft_target_s[lane]
                )
                for lane in lanes
            ),
            "<h2>Over time</h2><p>The most calls at once: waiting in the gateway, and sent to an engine.</p>",
            _lines("waiting", [waiting for waiting, _ in opened]),
            _lines("at the engines", [running for _, running in opened]),
            "</html>\n",
        )
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


# The table.


def _table(arms: Sequence[Comparison], lanes: Sequence[Lane]) -> str:
    head = "<tr><th>arm</th><th>lane</th><th>planned</th>"
    head += "".join(f"<th>{heading}</th>" for heading, _ in _COLUMNS)
    head += "<th>utilisation</th><th>all done</th></tr>"
    body = []
    for arm in arms:
        for lane in lanes:
            figures = arm.lanes.get(lane.name)
            if figures is None:
                continue
            cells = [_cell(name, figures.get(name)) for _, name in _COLUMNS]
            cells += [_cell(name, arm.over_seeds.get(name)) for name in ("utilisation", "wall_s")]
            planned = _cell("planned", figures.get("planned"))
            body.append(f"<tr><td>{escape(arm.arm)}</td><td>{lane.name}</td>{planned}{''.join(cells)}</tr>")
    return f"<table>{head}{''.join(body)}</table>"


def _cell(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"<td>{_NONE}</td>"
    small = f"<small>{_span(name, spread)}</small>" if spread.count > 1 else ""
    return f"<td>{show(name, spread.median)}{small}</td>"


def show(name: str, value: float) -> str:
    """A figure of a report as people read it."""
    if name == "attainment":
        return f"{value:.1%}"
    if name == "utilisation":
        return f"{value:.0%}"
    if name == "fairness":
        return f"{value:.2f}"
    if name in ("goodput", "planned"):
        return f"{value:,.0f}"
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _span(name: str, spread: Spread) -> str:
    """From the least to the most; the unit is left out where it is that of the median."""
    low, middle, high = (show(name, value) for value in (spread.low, spread.median, spread.high))
    unit = middle.lstrip("0123456789.,")
    if low.endswith(unit) and high.endswith(unit):
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{low}{_NONE}{high}"


# Drawings.


def _bars(arms: Sequence[Comparison], lanes: Sequence[Lane]) -> str:
    """A group of bars per lane, one bar per arm; a thin line spans the seeds."""
    width = _WIDTH / max(1, len(lanes))
    bar = min(36.0, width * 0.8 / max(1, len(arms)))
    drawn = []
    for group, lane in enumerate(lanes):
        start = _LEFT + group * width + (width - bar * len(arms)) / 2
        middle = _LEFT + (group + 0.5) * width
        drawn.append(f'<text x="{middle:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{lane.name}</text>')
        for number, arm in enumerate(arms):
            spread = arm.lanes.get(lane.name, {}).get("attainment")
            if spread is None:
                continue
            x, y = start + number * bar, _HEIGHT * (1 - spread.median)
            drawn.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" height="{_HEIGHT - y:.1f}" '
                f'fill="{_colour(number)}"><title>{escape(arm.arm)}, {lane.name}: {spread.median:.1%}</title></rect>'
            )
            if spread.count > 1:
                low, high, at = _HEIGHT * (1 - spread.low), _HEIGHT * (1 - spread.high), x + bar / 2
                drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="#111"/>')
    return _figure("promises kept, by lane", _levels((0.0, 0.25, 0.5, 0.75, 1.0)), drawn)


def _curves(caption: str, curves: Sequence[Points], ttft_target_s: float) -> str:
    """Curves over seconds on a logarithmic axis that spans what there is."""
    seconds = [x for curve in curves for x, _ in curve] + [ttft_target_s]
    low = floor(log10(max(min(seconds), 1e-4)))
    high = max(low + 1, ceil(log10(max(seconds))))

    def x_of(value: float) -> float:
        return _LEFT + _WIDTH * (log10(max(value, 10.0**low)) - low) / (high - low)

    ticks = [
        f'<line x1="{x_of(10.0**power):.1f}" x2="{x_of(10.0**power):.1f}" y1="0" y2="{_HEIGHT}" stroke="#eee"/>'
        f'<text x="{x_of(10.0**power):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{tick(10.0**power)}</text>'
        for power in range(low, high + 1)
    ]
    at = x_of(ttft_target_s)
    slo_target = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_HEIGHT}" stroke="#111" stroke-dasharray="4 3"/>'
    lines = [
        _polyline([(x_of(x), _HEIGHT * (1 - y)) for x, y in curve], _colour(number))
        for number, curve in enumerate(curves)
    ]
    return _figure(caption, _levels((0.0, 0.5, 0.95)), [*ticks, slo_target, *lines])


def _lines(caption: str, curves: Sequence[Points]) -> str:
    """Curves of counts over time."""
    max_x = max((x for curve in curves for x, _ in curve), default=1.0) or 1.0
    max_y = max((y for curve in curves for _, y in curve), default=1.0) or 1.0
    marks = [
        f'<text x="{_LEFT - 6}" y="{_HEIGHT * (1 - part) + 4:.1f}" text-anchor="end">{max_y * part:,.0f}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{_HEIGHT * (1 - part):.1f}" y2="{_HEIGHT * (1 - part):.1f}" '
        f'stroke="#eee"/><text x="{_LEFT + _WIDTH * part:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">'
        f"{max_x * part:,.0f} s</text>"
        for part in (0.0, 0.5, 1.0)
    ]
    lines = [
        _polyline([(_LEFT + _WIDTH * x / max_x, _HEIGHT * (1 - y / max_y)) for x, y in curve], _colour(number))
        for number, curve in enumerate(curves)
    ]
    return _figure(caption, marks, lines)


def _levels(parts: Iterable[float]) -> list[str]:
    return [
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{_HEIGHT * (1 - part):.1f}" y2="{_HEIGHT * (1 - part):.1f}" '
        f'stroke="#eee"/><text x="{_LEFT - 6}" y="{_HEIGHT * (1 - part) + 4:.1f}" text-anchor="end">{part:.0%}</text>'
        for part in parts
    ]


def tick(seconds: float) -> str:
    """A mark on an axis of time."""
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:,.0f} s"


def _polyline(points: Points, colour: str) -> str:
    if not points:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _figure(caption: str, *parts: Iterable[str]) -> str:
    drawn = "".join("".join(part) for part in parts)
    size = f'viewBox="0 -10 {_LEFT + _WIDTH + 24} {_HEIGHT + _BOTTOM}" width="{_LEFT + _WIDTH + 24}"'
    return (
        f'<figure><svg {size} role="img" aria-label="{escape(caption)}">{drawn}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
