"""Plots of a simulation as PNG files, with matplotlib (the `plots` extra)."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferry.domain.lanes import Lane
from inferry.report.formatting import tick
from inferry.report.html import COLOURS
from inferry.sim.calls import CallRow
from inferry.sim.curves import first_token_curve, open_calls
from inferry.sim.report import Comparison


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw_pngs(
    directory: Path,
    title: str,
    arms: Sequence[Comparison],
    rows: Mapping[str, Sequence[CallRow]],
    ttft_target_s: Mapping[Lane, float],
) -> list[Path]:
    """SLO attainment, TTFT and open calls, one file each."""
    lanes = [lane for lane in Lane if any(lane.name in arm.lanes for arm in arms)]
    figures = {
        "attainment.png": _attainment_figure(title, arms, lanes),
        "first-tokens.png": _ttft_figure(title, arms, rows, lanes, ttft_target_s),
        "open-calls.png": _open_calls_figure(title, arms, rows),
    }
    for name, figure in figures.items():
        figure.savefig(directory / name, dpi=120)
    return [directory / name for name in figures]


def _figure(title: str, width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _attainment_figure(title: str, arms: Sequence[Comparison], lanes: Sequence[Lane]) -> Any:
    figure = _figure(f"{title}: SLO attainment", 7, 4)
    axes = figure.add_subplot()
    bar = 0.8 / max(1, len(arms))
    for number, arm in enumerate(arms):
        spreads = [arm.lanes.get(lane.name, {}).get("attainment") for lane in lanes]
        places = [group - 0.4 + bar * (number + 0.5) for group in range(len(lanes))]
        there = [(x, spread) for x, spread in zip(places, spreads, strict=True) if spread is not None]
        axes.bar(
            [x for x, _ in there],
            [100 * spread.median for _, spread in there],
            bar * 0.94,
            yerr=[
                [100 * (spread.median - spread.low) for _, spread in there],
                [100 * (spread.high - spread.median) for _, spread in there],
            ],
            color=COLOURS[number % len(COLOURS)],
            label=arm.arm,
            capsize=3 if len(arm.reports) > 1 else 0,
        )
    axes.set_xticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.set_ylim(0, 105)
    axes.set_ylabel("% of planned calls")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(3, len(arms)), fontsize="small")
    return figure


def _ttft_figure(
    title: str,
    arms: Sequence[Comparison],
    rows: Mapping[str, Sequence[CallRow]],
    lanes: Sequence[Lane],
    ttft_target_s: Mapping[Lane, float],
) -> Any:
    figure = _figure(f"{title}: time to the first token", 4.6 * max(1, len(lanes)), 4)
    for place, lane in enumerate(lanes, 1):
        axes = figure.add_subplot(1, len(lanes), place)
        for number, arm in enumerate(arms):
            points = first_token_curve(rows.get(arm.arm, ()), lane)
            axes.plot(
                [x for x, _ in points],
                [100 * y for _, y in points],
                color=COLOURS[number % len(COLOURS)],
                label=arm.arm if place == 1 else None,
            )
        slo_target = axes.axvline(ttft_target_s[lane], color="#111", linestyle="--", linewidth=1)
        if place == 1:
            slo_target.set_label("TTFT target")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda seconds, _: tick(seconds))
        axes.set_title(lane.name)
        axes.set_ylabel("% of calls that have it" if place == 1 else "")
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(4, len(arms) + 1), fontsize="small")
    return figure


def _open_calls_figure(title: str, arms: Sequence[Comparison], rows: Mapping[str, Sequence[CallRow]]) -> Any:
    figure = _figure(f"{title}: open calls", 9, 4)
    until_s = max((arm.reports[0].wall_s for arm in arms), default=0.0)
    panels = [figure.add_subplot(1, 2, place) for place in (1, 2)]
    for axes, name in zip(panels, ("waiting in the gateway", "sent to an engine"), strict=True):
        axes.set_title(name)
        axes.set_xlabel("seconds")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("most calls at once")
    for number, arm in enumerate(arms):
        colour = COLOURS[number % len(COLOURS)]
        curves = open_calls(rows.get(arm.arm, ()), until_s)
        for axes, points in zip(panels, curves, strict=True):
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour)
        panels[0].plot([], [], color=colour, label=arm.arm)
    figure.legend(loc="outside lower center", ncols=min(3, len(arms)), fontsize="small")
    return figure
