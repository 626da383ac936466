"""Plots as SVG. Their colours are those of the page (`report.html`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from msgspec import Struct

from inferry.report.curves import Points
from inferry.report.formatting import tick

WIDTH, HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 410.0, 10.0, 210.0
_MINOR = (1, 2, 5)
MAX_SERIES = 8
"""Number of colours; series beyond it use them again."""
MAX_SPAN_FACTOR = 8.0
"""A target is left out if it is beyond this multiple of the largest value."""
_LETTER_WIDTH = 6.6


class Series(Struct, frozen=True):
    """A curve, or the values of bars. `target_line` is the target of the values; `ranges` are (low, high) by group."""

    name: str
    colour: int
    points: Points
    target_line: float | None = None
    ranges: Mapping[float, tuple[float, float]] = {}


def distribution(caption: str, series: Sequence[Series]) -> str:
    """Points are (seconds, fraction of values up to it); the axis of seconds is logarithmic and spans the values."""
    values = [x for one in series for x, _ in one.points if x > 0]
    if not values:
        return ""
    # A target far beyond all values would squeeze the curves.
    target_lines = {
        (one.target_line, one.colour)
        for one in series
        if one.target_line is not None and one.target_line < MAX_SPAN_FACTOR * max(values)
    }
    low, high = _span(min(values), max([*values, *(target_line for target_line, _ in target_lines)]))

    def x_of(value: float) -> float:
        part = (log10(max(value, low)) - log10(low)) / (log10(high) - log10(low))
        return _LEFT + (_RIGHT - _LEFT) * part

    ticks = [value for value in _ticks(low, high) if low <= value <= high]
    shapes = [_vertical(x_of(value), tick(value)) for value in ticks]
    shapes += [_horizontal(_y(part), f"{part:.0%}") for part in (0.0, 0.5, 0.95)]
    shared = len({target_line for target_line, _ in target_lines}) < len(target_lines)
    shapes += [
        f'<line class="{"mark" if shared else f"mark s{colour}"}" x1="{x_of(target_line):.1f}" '
        f'x2="{x_of(target_line):.1f}" '
        f'y1="{_TOP}" y2="{_BOTTOM}"/>'
        for target_line, colour in sorted(target_lines)
    ]
    shapes += [_path([(x_of(x), _y(y)) for x, y in one.points], one) for one in series if one.points]
    return _figure(caption, shapes)


def over_time(caption: str, series: Sequence[Series], until_s: float) -> str:
    """Points are (second, value)."""
    maximum = _round_up(max((y for one in series for _, y in one.points), default=0.0))
    until_s = max(until_s, 1.0)
    shapes = [_horizontal(_y(part), f"{maximum * part:,.4g}") for part in (0.0, 0.5, 1.0)]
    step = _round_up(until_s / 5)
    number = 0
    while number * step <= until_s:
        at = number * step
        shapes.append(_vertical(_LEFT + (_RIGHT - _LEFT) * at / until_s, f"{at:,.4g} s"))
        number += 1
    shapes += [
        _path([(_LEFT + (_RIGHT - _LEFT) * min(1.0, x / until_s), _y(y / maximum)) for x, y in one.points], one)
        for one in series
        if one.points
    ]
    return _figure(caption, shapes)


def lines(
    caption: str,
    groups: Sequence[str],
    series: Sequence[Series],
    label: Callable[[float], str],
    *,
    is_log: bool = False,
) -> str:
    """Curves over names at even distances, such as sizes that double; points are (index of a name, value).

    `label` formats a value of the axis, which starts at 0 unless `is_log`. The targets of series are horizontal lines.
    """
    values = [y for one in series for _, y in one.points if y > 0 or not is_log]
    if not values:
        return ""
    targets = {one.target_line for one in series if one.target_line is not None}
    targets = {value for value in targets if value < MAX_SPAN_FACTOR * max(values)}
    if is_log:
        low, high = _span(min(values), max([*values, *targets]))
        ticks = [value for value in _ticks(low, high) if low <= value <= high]
    else:
        low, high = 0.0, _round_up(max([*values, *targets]))
        ticks = [high * part for part in (0.0, 0.25, 0.5, 0.75, 1.0)]

    def y_of(value: float) -> float:
        if is_log:
            return _y((log10(max(value, low)) - log10(low)) / (log10(high) - log10(low)))
        return _y(value / high)

    def x_of(index: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / len(groups)

    shapes = [_horizontal(y_of(value), label(value)) for value in ticks]
    shapes += [_vertical(x_of(index), escape(name)) for index, name in enumerate(groups)]
    shapes += [
        f'<line class="mark" x1="{_LEFT}" x2="{_RIGHT}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>'
        for value in sorted(targets)
    ]
    for one in series:
        places = [(x_of(x), y_of(y)) for x, y in one.points]
        shapes += [_path(places, one)] if places else []
        shapes += [
            f'<circle class="s{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(one.name)}, {escape(groups[int(at)])}: {label(value)}</title></circle>"
            for (x, y), (at, value) in zip(places, one.points, strict=True)
        ]
    return _figure(caption, shapes)


def stacked(caption: str, groups: Sequence[str], series: Sequence[Series], label: Callable[[float], str]) -> str:
    """A bar per name, with the values of all series upon each other; points are (index of a name, value)."""
    totals = [sum(y for one in series for x, y in one.points if x == index) for index in range(len(groups))]
    top = _round_up(max(totals, default=0.0))
    width = (_RIGHT - _LEFT) / max(1, len(groups))
    shapes = [_horizontal(_y(part), label(top * part)) for part in (0.0, 0.5, 1.0)]
    for index, name in enumerate(groups):
        middle, base = _LEFT + (index + 0.5) * width, 0.0
        shapes.append(f'<text x="{middle:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>')
        for one in series:
            value = sum(y for x, y in one.points if x == index)
            y, height = _y((base + value) / top), _y(base / top) - _y((base + value) / top)
            shapes.append(
                f'<rect class="s{one.colour}" x="{middle - width * 0.35:.1f}" y="{y:.1f}" width="{width * 0.7:.1f}" '
                f'height="{height:.1f}"><title>{escape(one.name)}: {label(value)}</title></rect>'
            )
            base += value
    return _figure(caption, shapes)


def bars(
    caption: str,
    groups: Sequence[str],
    series: Sequence[Series],
    *,
    side_by_side: int,
    maximum: float | None,
    unit: str,
) -> str:
    """A group of bars per name; a series has a point (group, value) in each group that it is part of.

    `side_by_side` is how many series share a group, 1 or all; `unit` formats a value, such as `{:.0%}`.
    """
    top = maximum or _round_up(max((y for one in series for _, y in one.points), default=0.0))
    group_width = (_RIGHT - _LEFT) / max(1, len(groups))
    bar = min(46.0, group_width * 0.84 / max(1, side_by_side))
    shapes = [_horizontal(_y(part), unit.format(top * part)) for part in (0.0, 0.5, 1.0)]
    for number, name in enumerate(groups):
        middle = _LEFT + (number + 0.5) * group_width
        shapes.append(f'<text x="{middle:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>')
    for place, one in enumerate(series):
        for group, value in one.points:
            x = _LEFT + (group + 0.5) * group_width + (place % side_by_side - side_by_side / 2) * bar
            y = _y(min(1.0, value / top))
            text = unit.format(value)
            shapes.append(
                f'<rect class="s{one.colour}" x="{x + 1:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" '
                f'height="{_BOTTOM - y:.1f}"><title>{escape(one.name)}: {text}</title></rect>'
            )
            if group in one.ranges:
                low, high = (_y(min(1.0, end / top)) for end in one.ranges[group])
                middle = x + bar / 2
                shapes.append(
                    f'<line class="range" x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
                )
            elif len(text) * _LETTER_WIDTH <= bar + 2:
                inside = y < _TOP + 14
                shapes.append(
                    f'<text class="{"on" if inside else "value"}" x="{x + bar / 2:.1f}" '
                    f'y="{y + 13 if inside else y - 3:.1f}" text-anchor="middle">{text}</text>'
                )
    return _figure(caption, shapes)


def _y(part: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * part


def _vertical(x: float, words: str) -> str:
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'
        f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{words}</text>'
    )


def _horizontal(y: float, words: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
    )


def _path(points: Points, one: Series) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="s{one.colour}" points="{path}"><title>{escape(one.name)}</title></polyline>'


def _figure(caption: str, shapes: Iterable[str]) -> str:
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(caption)}">{"".join(shapes)}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _span(low: float, high: float) -> tuple[float, float]:
    """From the step of 1, 2, 5 below the smallest value to the one above the largest; at least a factor of four."""
    low, high = _step_below(max(low, 1e-5)), _step_above(high)
    while high / low < 4:
        high = _step_above(high * 1.01)
    return low, high


def _step_below(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return max(step * power for step in _MINOR if step * power <= value * 1.0001)


def _step_above(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return min(step * power for step in (*_MINOR, 10) if step * power >= value * 0.9999)


def _ticks(low: float, high: float) -> list[float]:
    """Every decade, with 2 and 5 between where there are few decades."""
    first, last = floor(log10(low)), ceil(log10(high))
    steps = _MINOR if high / low <= 150 else (1,)
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def _round_up(value: float) -> float:
    """The next round number."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return min(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)
