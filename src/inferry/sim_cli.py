"""`inferry simulate`: what a configuration would do with a workload, in virtual time."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferry import config as configuration
from inferry.domain.jobs import Lane
from inferry.domain.plans import Room
from inferry.sim import costs as engines
from inferry.sim.arrivals import UnknownTrace, read_trace
from inferry.sim.calls import CallRow, Run
from inferry.sim.doors import Direct
from inferry.sim.gateway import GatewayDoor
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.page import html_page
from inferry.sim.report import Report, report, to_json
from inferry.sim.world import Door, World

_NONE = "–"  # noqa: RUF001 - what a person reads where there is no number
_SCENARIOS: dict[str, Callable[..., list[Run]]] = {"harbor": harbor, "simple-harbor": simple_harbor}

Arm = tuple[str, Door, engines.EngineFlags]


def simulate(
    trace: Annotated[Path | None, typer.Option(help="A recorded trace (.csv.gz or .jsonl.gz).", metavar="FILE")] = None,
    scenario: Annotated[str | None, typer.Option(help="harbor or simple-harbor.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the scenario.")] = 7,
    seconds: Annotated[float, typer.Option(help="How long the scenario's arrivals last.")] = 60.0,
    scale: Annotated[float, typer.Option(help="More or less of the scenario.")] = 1.0,
    digests: Annotated[int, typer.Option(help="Batch jobs waiting at the start of the scenario.")] = 300,
    lane: Annotated[str, typer.Option(help="Lane of a trace's calls: P0, P1 or P2.")] = "P1",
    engine: Annotated[
        Path | None, typer.Option(help="Engine model; none: the one shipped.", metavar="MODEL.json")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many engines.")] = 1,
    config_files: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="A configuration to try; give several to compare.", metavar="FILE"),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Also without a gateway: both queues of the engine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw it.", metavar="OUT.html|OUT.png")] = None,
) -> None:
    """Play a workload against a model of the engine, with the real scheduler, and compare configurations."""
    if (trace is None) == (scenario is None):
        _fail("name either a --trace or a --scenario")
    if plot is not None and plot.suffix not in (".html", ".png"):
        _fail("--plot wants a file that ends in .html or .png")
    if plot is not None and plot.suffix == ".png":
        _need_matplotlib()
    runs = _from_trace(trace, lane) if trace is not None else _from_scenario(scenario, seed, seconds, scale, digests)
    model = _model(engine)
    rows: dict[str, Sequence[CallRow]] = {}
    reports = []
    for name, door, flags in _arms(config_files or [], model, direct):
        world = World(door, model.costs, flags, workers=workers)
        _play(world, runs, name)
        reports.append(report(world, name))
        rows[name] = world.rows
    if as_json:
        sys.stdout.write(to_json(reports).decode() + "\n")
    else:
        Console().print(_table(reports))
    if plot is not None:
        title = f"{scenario}, seed {seed}" if trace is None else trace.name
        if plot.suffix == ".png":
            _draw_png(plot, title, reports, rows)
        else:
            plot.write_text(html_page(title, reports, rows))
        Console(stderr=True).print(f"drawn in {plot}", highlight=False)


def _from_trace(path: Path, lane: str) -> list[Run]:
    if lane not in Lane.__members__:
        _fail("--lane must be P0, P1 or P2")
    try:
        return read_trace(path, Lane[lane])
    except (OSError, EOFError, UnknownTrace, msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        _fail(f"cannot read {path}: {error}")


def _from_scenario(name: str | None, seed: int, seconds: float, scale: float, digests: int) -> list[Run]:
    make = _SCENARIOS.get(name or "")
    if make is None:
        _fail(f"there is no scenario {name!r}; there are {', '.join(_SCENARIOS)}")
    return make(seed, seconds=seconds, scale=scale, digests=digests)


def _model(path: Path | None) -> engines.EngineModel:
    try:
        return engines.load_model(path or engines.DEFAULT_MODEL)
    except OSError as error:
        _fail(f"cannot read the engine model {path or engines.DEFAULT_MODEL}: {error.strerror}")
    except msgspec.DecodeError as error:
        _fail(f"{path} is no engine model: {error}")


def _arms(files: Sequence[Path], model: engines.EngineModel, direct: bool) -> list[Arm]:
    arms: list[Arm] = []
    if direct:
        for policy, words in (("fcfs", "first come first served"), ("priority", "engine priority")):
            flags = msgspec.structs.replace(model.flags, policy=policy)
            arms.append((f"direct, {words}", Direct(), flags))
    wanted: Sequence[Path | None] = files or [None]
    for file in wanted:
        try:
            config = configuration.load(file)
        except configuration.ConfigError as error:
            _fail(str(error))
        name = "defaults" if file is None else file.stem
        arms.append((name, GatewayDoor(config.lane_policies(), _room(config, model.flags)), model.flags))
    return arms


def _room(config: configuration.Config, flags: engines.EngineFlags) -> Room:
    """What the gateway would use of each engine: the first HTTP worker's room, else all the engine has."""
    for worker in config.workers:
        if isinstance(worker, configuration.VllmWorkerConfig):
            return Room(
                min(worker.max_sequences or flags.max_num_seqs, flags.max_num_seqs),
                worker.kv_tokens or flags.kv_tokens,
                worker.prefill_tokens,
            )
    return Room(flags.max_num_seqs, flags.kv_tokens, None)


def _play(world: World, runs: Sequence[Run], name: str) -> None:
    """With a bar that moves in virtual time: arrivals are what is known of it beforehand."""
    last = max((run.at for run in runs), default=0.0)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[clock]} virtual"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=max(last, 1e-9), clock="0 s")
        world.play(runs, watch=lambda now: progress.update(task, completed=min(now, last), clock=f"{now:,.0f} s"))


def _table(reports: Sequence[Report]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, justify in (
        ("arm", "left"),
        ("lane", "left"),
        ("kept %", "right"),
        ("ttft p50", "right"),
        ("ttft p95", "right"),
        ("gap p95", "right"),
        ("step p95", "right"),
        ("all done", "right"),
        ("output/s", "right"),
        ("busy", "right"),
    ):
        # The arm's name is the one thing that may take several lines.
        width = 14 if heading == "arm" else None
        table.add_column(heading, justify="left" if justify == "left" else "right", no_wrap=not width, width=width)
    for one in reports:
        for number, (name, lane) in enumerate(one.lanes.items()):
            shared = (f"{one.wall_s:,.1f} s", f"{one.output_rate:,.0f}", f"{one.utilisation:.0%}")
            table.add_row(
                one.arm if not number else "",
                name,
                f"{100 * lane.attainment:.1f}",
                _seconds(lane.ttft_p50),
                _seconds(lane.ttft_p95),
                _seconds(lane.gap_p95),
                _seconds(lane.step_p95),
                *(shared if not number else ("", "", "")),
                end_section=number == len(one.lanes) - 1,
            )
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _need_matplotlib() -> None:
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ModuleNotFoundError:
        _fail("a .png needs matplotlib: pip install 'inferry[plots]'; an .html report needs nothing")


def _draw_png(path: Path, title: str, reports: Sequence[Report], rows: dict[str, Sequence[CallRow]]) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    lanes = [lane for lane in Lane if any(lane.name in one.lanes for one in reports)]
    figure = Figure(figsize=(5 * len(lanes), 4), layout="constrained")
    figure.suptitle(title)
    for number, lane in enumerate(lanes, 1):
        axes = figure.add_subplot(1, len(lanes), number)
        for one in reports:
            values = sorted(row.ttft_s for row in rows[one.arm] if row.lane is lane and row.ttft_s is not None)
            axes.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=one.arm)
        axes.set_xscale("log")
        axes.set_xlabel(f"{lane.name}: seconds to the first token")
        axes.legend(fontsize="small")
    figure.savefig(path)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"inferry: {message}", style="bold red", markup=False, highlight=False)
    raise typer.Exit(2)
