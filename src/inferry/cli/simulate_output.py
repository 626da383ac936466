"""Terminal output of simulations: a progress bar in virtual time, and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferry.domain.lanes import Lane
from inferry.report.formatting import NONE
from inferry.sim.calls import Run
from inferry.sim.formatting import show
from inferry.sim.report import Comparison, Spread
from inferry.sim.simulation import Simulation
from inferry.sim.workload import SloTarget

_LANE_COLUMNS = (
    ("SLO", "attainment"),
    ("ttft p50", "ttft_p50"),
    ("p95", "ttft_p95"),
    ("p99", "ttft_p99"),
    ("itl p95", "itl_p95"),
    ("good/s", "goodput"),
    ("fair", "fairness"),
)
_ARM_COLUMNS = (("busy", "utilisation"), ("done", "wall_s"))
Play = Callable[[Simulation, Sequence[Run], str], None]


SESSIONS_RAMP_S = 10.0
"""Time in which the first runs of a closed loop begin."""


@contextmanager
def progress(total: int, word: str, sessions: int | None = None) -> Iterator[Play]:
    """Plays simulations under one progress bar: their number, and the virtual time relative to the last arrival.

    With `sessions` runs are a closed loop of that many at a time.
    """
    columns = (
        TextColumn("{task.fields[place]}"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[clock]} virtual"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, clock="0 s", place="")
        done = 0

        def play(simulation: Simulation, runs: Sequence[Run], name: str) -> None:
            nonlocal done
            done += 1
            last = max((run.at for run in runs), default=0.0) or 1e-9
            place = f"{word} {done} of {total}" if total else f"{word} {done}"
            bar.update(task, description=name, completed=0, total=last, clock="0 s", place=place)

            def on_progress(now: float) -> None:
                bar.update(task, completed=min(now, last), clock=f"{now:,.0f} s")

            if sessions is None:
                simulation.play(runs, on_progress=on_progress)
            else:
                simulation.play_sessions(iter(runs), sessions, None, SESSIONS_RAMP_S, on_progress)

        yield play


def comparison_table(arms: Sequence[Comparison]) -> Table:
    """A row per arm and lane; with several seeds the median, followed by minimum and maximum."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("arm", width=12)
    table.add_column("lane", no_wrap=True)
    for heading, _ in (*_LANE_COLUMNS, *_ARM_COLUMNS):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, arm in enumerate(arms):
        if place:
            table.add_row()
        for number, (lane, figures) in enumerate(arm.lanes.items()):
            cells = [(name, figures.get(name), NONE) for _, name in _LANE_COLUMNS]
            # Values of the whole arm are in its first row.
            cells += [(name, None if number else arm.over_seeds.get(name), "") for _, name in _ARM_COLUMNS]
            table.add_row("" if number else arm.arm, lane, *_row(cells, "median"))
            if len(arm.reports) > 1:
                table.add_row("", "  min", *_row(cells, "low"), style="dim")
                table.add_row("", "  max", *_row(cells, "high"), style="dim")
    return table


def _row(cells: Sequence[tuple[str, Spread | None, str]], which: str) -> list[str]:
    return [empty if spread is None else show(name, getattr(spread, which)) for name, spread, empty in cells]


def slo_line(slo_targets: Mapping[Lane, SloTarget], lanes: Sequence[str]) -> str:
    parts = [
        f"{lane.name} TTFT {_time(one.ttft_s)}{_per_1k_tokens(one)}, ITL {_time(one.itl_s)}"
        for lane, one in slo_targets.items()
        if lane.name in lanes
    ]
    return f"SLO targets: {'; '.join(parts)}"


def _per_1k_tokens(target: SloTarget) -> str:
    return f" + {_time(target.ttft_s_per_1k_tokens)} per 1,000 uncached tokens" if target.ttft_s_per_1k_tokens else ""


def _time(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"
