"""HTML pages with tables and plots, light or dark, in one file that loads nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from msgspec import Struct

from inferry.report.svg import MAX_SERIES

COLOURS = ("#2563eb", "#dc2626", "#047857", "#b45309", "#7c3aed", "#0e7490", "#be185d", "#4b5563")
"""Colours of series on a light page."""
_DARK_COLOURS = ("#60a5fa", "#f87171", "#34d399", "#fbbf24", "#a78bfa", "#22d3ee", "#f472b6", "#9ca3af")
TEXT_COLUMNS = frozenset({"", "arm", "lane", "failure", "message"})
"""Headings of the columns that are aligned to the left. Other columns have figures."""


class Table(Struct, frozen=True):
    """Headings and cells. The second line of a cell is shown smaller."""

    headings: tuple[str, ...]
    rows: list[list[str]]


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page. The parts are HTML."""
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_style()}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        )
    )


def paragraph(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def section(heading: str, text: str, plots: Sequence[str] = ()) -> str:
    """A heading, a sentence or two, and plots beside each other. Empty plots are left out."""
    shown = [plot for plot in plots if plot]
    grid = f'<div class="plots">{"".join(shown)}</div>' if shown else ""
    return f"<section><h2>{escape(heading)}</h2>{paragraph(text) if text else ''}{grid}</section>"


def legend(names: Iterable[str]) -> str:
    """The names of the series, in the order of their colours."""
    entries = [f'<span><i class="s{n % MAX_SERIES}"></i>{escape(name)}</span>' for n, name in enumerate(names)]
    return f'<p class="legend">{"".join(entries)}</p>'


def with_legend(plot: str, names: Iterable[str]) -> str:
    """A plot with a legend of its own, for a section whose plots have different series."""
    return f"<div>{plot}{legend(names)}</div>"


def table(content: Table) -> str:
    kinds = [' class="word"' if heading in TEXT_COLUMNS else "" for heading in content.headings]

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{kind}>{_cell(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in content.rows)
    return f'<div class="wide"><table><tr>{row(content.headings, "th")}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    first, _, second = text.partition("\n")
    return f"{escape(first)}<small>{escape(second)}</small>" if second else escape(first)


def details(summary: str, text: str) -> str:
    """Text that is shown on demand, as it is."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def _style() -> str:
    def palette(colours: Sequence[str]) -> str:
        return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))

    series = "".join(
        f"polyline.s{n},line.s{n}{{stroke:var(--c{n})}}rect.s{n},circle.s{n}{{fill:var(--c{n})}}i.s{n}{{background:var(--c{n})}}"
        for n in range(MAX_SERIES)
    )
    return (
        f":root{{color-scheme:light dark;--paper:#fff;--ink:#1f2937;--soft:#6b7280;--line:#e5e7eb;{palette(COLOURS)}}}"
        "@media(prefers-color-scheme:dark){:root{--paper:#111827;--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;"
        f"{palette(_DARK_COLOURS)}}}}}"
        "body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:80rem;padding:1rem;"
        "background:var(--paper);color:var(--ink)}"
        "h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .25rem}p{margin:.25rem 0 .75rem}"
        ".soft,figcaption{color:var(--soft);font-size:.875rem}.wide{overflow-x:auto}"
        "table{border-collapse:collapse;margin:.75rem 0;font-size:.875rem;font-variant-numeric:tabular-nums}"
        "td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}"
        "td.word,th.word{text-align:left}th{color:var(--soft);font-weight:600}"
        "td small{display:block;color:var(--soft)}"
        ".plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr))}"
        "figure{margin:0}svg{display:block;width:100%;height:auto}"
        "svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg text.on{fill:var(--paper)}"
        "svg text.value{fill:var(--ink)}"
        "polyline{fill:none;stroke-width:2;stroke-linejoin:round}.grid{stroke:var(--line)}.range{stroke:var(--ink)}"
        ".mark{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:4 3}"
        ".legend span{margin-right:1.25rem;white-space:nowrap}"
        ".legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}"
        "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem}"
        f"{series}"
    )
