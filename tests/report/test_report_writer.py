"""The writer of pages, tables and plots."""

import re

import pytest

from inferry.report import html
from inferry.report.curves import BINS, peaks
from inferry.report.formatting import NONE, count, money, seconds, share, tick
from inferry.report.svg import MAX_SERIES, Series, bars, distribution, lines, over_time, stacked


def test_a_page_is_one_file_that_loads_nothing() -> None:
    made = html.page("A & B", [html.legend(["<one>", "two"]), html.section("Heading", "Text <here>.", ["", "<svg/>"])])
    assert made.startswith("<!doctype html>")
    assert "<title>A &amp; B</title>" in made
    assert "&lt;one&gt;" in made
    assert "Text &lt;here&gt;." in made
    assert made.count('<div class="plots">') == 1
    assert not re.search(r"(?:src|href)=|@import|url\(", made)


def test_a_section_without_plots_has_no_grid() -> None:
    assert html.section("Heading", "", [""]) == "<section><h2>Heading</h2></section>"


def test_the_second_line_of_a_cell_is_small_and_text_is_aligned_to_the_left() -> None:
    made = html.table(html.Table(("lane", "p95"), [["P0", "12 ms\n10–15"], ["<P1>", "1 s"]]))  # noqa: RUF001
    assert '<td class="word">P0</td><td>12 ms<small>10–15</small></td>' in made  # noqa: RUF001
    assert "&lt;P1&gt;" in made


def test_details_are_text() -> None:
    assert html.details("a & b", "<c>") == "<details><summary>a &amp; b</summary><pre>&lt;c&gt;</pre></details>"


def test_series_beyond_the_last_colour_use_the_first_again() -> None:
    made = html.legend([f"{number}" for number in range(MAX_SERIES + 1)])
    assert made.count('class="s0"') == 2
    assert len(html.COLOURS) == MAX_SERIES


def test_bars_show_ranges_instead_of_values() -> None:
    plain = bars("caption", ["P0"], [Series("arm", 0, [(0.0, 0.5)])], side_by_side=1, maximum=1.0, unit="{:.0%}")
    spread = Series("arm", 0, [(0.0, 0.5)], ranges={0.0: (0.25, 0.75)})
    ranged = bars("caption", ["P0"], [spread], side_by_side=1, maximum=1.0, unit="{:.0%}")
    assert 'class="range"' not in plain
    assert '<line class="range" x1="230.0" x2="230.0" y1="160.0" y2="60.0"/>' in ranged
    assert ">50%</text>" not in ranged.split('class="range"')[1]


def test_a_distribution_without_values_is_left_out_and_a_far_target_too() -> None:
    assert distribution("empty", [Series("arm", 0, [])]) == ""
    points = [(0.01, 0.5), (0.02, 1.0)]
    assert 'class="mark' in distribution("near", [Series("arm", 0, points, 0.05)])
    assert 'class="mark' not in distribution("far", [Series("arm", 0, points, 5.0)])


def test_a_plot_over_time_has_a_line_per_series_with_points() -> None:
    made = over_time("calls", [Series("a", 0, [(1.0, 2.0)]), Series("b", 1, [])], 10.0)
    assert made.count("<polyline") == 1


def test_peaks_are_the_highest_counts_of_their_bins() -> None:
    points = peaks([(0.0, 1), (1.0, 1), (2.0, -1), (2.0, 1), (3.0, -2)], 4.0)
    assert len(points) == BINS
    by_second = dict(points)
    assert (by_second[0.5], by_second[1.5], by_second[2.5], by_second[4.0]) == (1, 2, 2, 0)
    assert max(count for _, count in peaks([(0.5, 30), (0.5001, -30)], 1000.0)) == 30


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds(None), NONE),
        (seconds(0.0042), "4.2 ms"),
        (seconds(0.25), "250 ms"),
        (seconds(12.34), "12.3 s"),
        (share(0.9876), "98.8%"),
        (count(12345.6), "12,346"),
        (money(0.01234), "0.0123"),
        (money(1234.5), "1,234.50"),
        (tick(0.0002), "200 µs"),
        (tick(0.02), "20 ms"),
        (tick(100.0), "100 s"),
    ],
)
def test_figures_have_units(shown: str, text: str) -> None:
    assert shown == text


def test_lines_have_a_point_per_value_and_a_target() -> None:
    series = [Series("p50", 0, [(0.0, 0.01), (1.0, 0.1)], 0.2), Series("p99", 1, [(1.0, 0.5)], 0.2)]
    made = lines("ttft", ["1", "2"], series, tick, is_log=True)
    assert made.count("<polyline") == 2
    assert made.count("<circle") == 3
    assert made.count('class="mark"') == 1
    assert "<title>p50, 2: 100 ms</title>" in made
    assert lines("empty", ["1"], [Series("p50", 0, [])], tick) == ""
    assert lines("flat", ["1"], [Series("p50", 0, [(0.0, 0.0)])], tick).count("<circle") == 1


def test_stacked_bars_lie_upon_each_other() -> None:
    made = stacked("time", ["1"], [Series("a", 0, [(0.0, 1.0)]), Series("b", 1, [(0.0, 3.0)])], "{:.0f}".format)
    heights = re.findall(r'<rect class="s\d" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', made)
    assert heights == [("160.0", "50.0"), ("10.0", "150.0")]


def test_a_plot_may_have_a_legend_of_its_own() -> None:
    assert html.with_legend("<svg/>", ["one"]).startswith("<div><svg/>")
