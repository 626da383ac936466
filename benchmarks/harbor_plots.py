"""Plots of a recorded comparison by lane and seed, with matplotlib: pip install 'inferry[plots]'."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harbor_figures import SLO_TARGETS_MS, figures
from benchmarks.harbor_record import CANCELLED, Call, Recording
from inferry.report.formatting import tick
from inferry.report.html import COLOURS

LABELS = {
    "direct": "direct, first come first served",
    "priority": "direct, engine's priorities",
    "sketch": "client-side sketch",
    "inferry": "Inferry",
}
_COLOUR = dict(zip(("inferry", "direct", "sketch", "priority"), COLOURS, strict=False))
_DOTS_PER_INCH = 100
_CURVE_POINTS = 400
_SHADES = 64


def draw(directory: Path, recordings: Sequence[Recording]) -> list[Path]:
    """First tokens, inter-token latency, attainment and throughput, each in its own file in the directory."""
    drawn = {
        "first-tokens.png": _curves(recordings, "First token", _ttfts_ms, 0),
        "itl.png": _curves(recordings, "Gap between two events of a call", _itls_ms, 1),
        "attainment.png": _attainment(recordings),
        "throughput.png": _throughput(recordings),
    }
    for name, figure in drawn.items():
        _save(figure, directory / name)
    return [directory / name for name in drawn]


def _figure(title: str, rows: int, columns: int, width: float, height: float, **more: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def _save(figure: Any, path: Path) -> None:
    """As PNG with few colours, a third of the size: the plots are in the repository."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH)
    Image.open(drawn).convert("RGB").quantize(_SHADES).save(path, optimize=True)


def _seeds(recordings: Sequence[Recording]) -> list[int]:
    return sorted({one.seed for one in recordings})


def _style(one: Recording) -> dict[str, Any]:
    """An arm has one colour; repetitions are dashed, then dotted."""
    repeated = ("-", "--", ":")
    return {"color": _COLOUR[one.arm], "linestyle": repeated[min(one.attempt, len(repeated)) - 1], "linewidth": 1.4}


def _legend(figure: Any, recordings: Sequence[Recording]) -> None:
    from matplotlib.lines import Line2D

    handles = {}
    for one in recordings:
        label = LABELS[one.arm] + (f", attempt {one.attempt}" if one.attempt > 1 else "")
        handles[label] = Line2D([], [], label=label, **_style(one))
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=3, fontsize="small")


def _ttfts_ms(call: Call) -> list[int]:
    return [call.deltas_ms[0]] if call.deltas_ms else []


def _itls_ms(call: Call) -> list[int]:
    return list(call.deltas_ms[1:])


def _curves(recordings: Sequence[Recording], title: str, values: Callable[[Call], list[int]], target_index: int) -> Any:
    """Cumulative distributions by lane and seed, on a logarithmic axis."""
    seeds = _seeds(recordings)
    figure, axes = _figure(f"{title}: part of all that took at most so long", len(SLO_TARGETS_MS), len(seeds), 11, 8.5)
    for row, (lane, targets) in enumerate(SLO_TARGETS_MS.items()):
        for column, seed in enumerate(seeds):
            here = axes[row][column]
            for one in recordings:
                if one.seed != seed:
                    continue
                found = sorted(
                    max(1, value)
                    for call in one.calls
                    if call.lane == lane and call.err != CANCELLED
                    for value in values(call)
                )
                if found:
                    last = len(found) - 1
                    points = sorted({round(last * number / _CURVE_POINTS) for number in range(_CURVE_POINTS + 1)})
                    here.plot(
                        [found[point] / 1000 for point in points],
                        [100 * (point + 1) / len(found) for point in points],
                        **_style(one),
                    )
            here.axvline(targets[target_index] / 1000, color="#9ca3af", linewidth=1)
            here.set_xscale("log")
            here.xaxis.set_major_formatter(lambda value, _: tick(value))
            here.set_ylim(0, 101)
            here.grid(alpha=0.25)
            here.set_title(f"{lane}, seed {seed}", fontsize="medium")
        axes[row][0].set_ylabel(f"% of {lane} (grey: promised)")
    _legend(figure, recordings)
    return figure


def _attainment(recordings: Sequence[Recording]) -> Any:
    """Bars by arm and seed, a panel for each lane."""
    seeds = _seeds(recordings)
    figure, axes = _figure("Calls that kept their promise", 1, len(SLO_TARGETS_MS), 11, 4, sharey=True)
    attained = [(one, figures(one)) for one in recordings]
    bar = 0.86 / max(sum(one.seed == seed for one in recordings) for seed in seeds)
    for panel, lane in zip(axes[0], SLO_TARGETS_MS, strict=True):
        for group, seed in enumerate(seeds):
            of_seed = [(one, row) for one, row in attained if one.seed == seed]
            for number, (one, row) in enumerate(of_seed):
                x = group + bar * (number + 0.5 - len(of_seed) / 2)
                share = 100 * row[lane]["slo"]
                panel.bar(x, share, bar * 0.92, color=_COLOUR[one.arm], alpha=1.0 if one.attempt == 1 else 0.55)
                panel.text(x, share + 1, f"{share:.0f}", ha="center", fontsize=6)
        panel.set_xticks(range(len(seeds)), [f"seed {seed}" for seed in seeds])
        panel.set_title(lane)
        panel.grid(axis="y", alpha=0.25)
        panel.set_ylim(0, 108)
    axes[0][0].set_ylabel("% of planned calls")
    from matplotlib.patches import Patch

    arms = dict.fromkeys(one.arm for one in recordings)
    handles = [Patch(color=_COLOUR[arm], label=LABELS[arm]) for arm in arms]
    if any(one.attempt > 1 for one in recordings):
        handles.append(Patch(color=_COLOUR["inferry"], alpha=0.55, label="Inferry, the same again"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize="small")
    return figure


def _throughput(recordings: Sequence[Recording]) -> Any:
    """Output tokens by second: all of them, and those of live lanes."""
    seeds = _seeds(recordings)
    figure, axes = _figure(
        "Output tokens a second, means over five seconds", 2, len(seeds), 11, 6, sharex=True, sharey=True
    )
    for column, seed in enumerate(seeds):
        for row, (what, lanes) in enumerate((("all lanes", ("P0", "P1", "P2")), ("P0 and P1", ("P0", "P1")))):
            here = axes[row][column]
            for one in recordings:
                if one.seed == seed:
                    seconds, rates = _rates([call for call in one.calls if call.lane in lanes])
                    here.plot(seconds, rates, **_style(one))
            here.set_title(f"{what}, seed {seed}", fontsize="medium")
            here.set_ylim(bottom=0)
            here.grid(alpha=0.25)
        axes[1][column].set_xlabel("seconds since the contest began")
    _legend(figure, recordings)
    return figure


def _rates(calls: Sequence[Call], over: int = 5) -> tuple[list[float], list[float]]:
    by_second: defaultdict[int, float] = defaultdict(float)
    for call in calls:
        times = call.times_ms
        for time in times:
            # For a cancelled call only the received tokens are known.
            by_second[(call.at_ms + time) // 1000] += call.out / len(times) if call.out else 1.0
    edges = range(0, max(by_second, default=0) + over + 1, over)
    middles = [(start + stop) / 2 for start, stop in pairwise(edges)]
    return middles, [sum(by_second[second] for second in range(a, b)) / over for a, b in pairwise(edges)]
