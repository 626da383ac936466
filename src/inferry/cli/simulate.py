"""`inferry simulate`: compare configurations on a workload, in virtual time."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.console import Console

from inferry.cli.simulate_output import Play, comparison_table, console, fail, progress, slo_line
from inferry.cli.simulate_plots import can_draw, draw_pngs
from inferry.cli.simulate_setup import Arm, build_arms, drop_oversized, load_config, load_model
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel
from inferry.sim.html_report import html_page
from inferry.sim.report import Comparison, compare, report
from inferry.sim.simulation import Simulation
from inferry.sim.workload import (
    SimulationSetupError,
    SloTarget,
    Workload,
    check,
    parse_lanes,
    runs_by_seed,
    slo_targets_for,
)

TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Recorded trace, CSV or JSON lines, gzipped or not.", metavar="FILE")
]
Scenario = Annotated[str | None, typer.Option("--scenario", help="harbor or simple-harbor.")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", help="Seconds in which runs start; default: 60 for a scenario, the length of a trace."),
]
Scale = Annotated[float, typer.Option("--scale", help="Factor on the load: more runs of a scenario, a faster trace.")]
Digests = Annotated[int, typer.Option("--digests", min=0, help="Batch jobs at the start of the scenario.")]
LaneParts = Annotated[
    str, typer.Option("--lane", help="Lane of a trace's runs, or fractions drawn by seed: P0=0.2,P1=0.5,P2=0.3.")
]
SessionGap = Annotated[
    float, typer.Option("--session-gap-s", min=0.0, help="Seconds between sessions of a trace without times.")
]
ModelFile = Annotated[
    Path | None,
    typer.Option("--model", "--engine", help="Engine model; default: 8B on an H200.", metavar="MODEL.json"),
]
SloOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--slo", help="SLO targets of a lane in ms, instead of the configuration's: P0=500,30.", metavar="LANE=TTFT,ITL"
    ),
]


class SimulationResult(Struct, frozen=True, kw_only=True):
    """Output of `--json`. `left_out` is the number of runs with calls that exceed the KV capacity of an engine."""

    workload: str
    model: str
    seeds: tuple[int, ...]
    scale: float
    runs: int
    left_out: int
    slo_targets: dict[str, SloTarget]
    arms: tuple[Comparison, ...]


def simulate(
    trace: TraceFile = None,
    scenario: Scenario = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed; give several for medians and ranges.  [default: 7]")
    ] = None,
    seconds: Seconds = None,
    scale: Scale = 1.0,
    digests: Digests = 300,
    lane: LaneParts = "P1",
    session_gap_s: SessionGap = 1.0,
    model_file: ModelFile = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of engines; default: the workers of the configuration.")
    ] = None,
    config_files: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="Configuration to simulate; repeat to compare.", metavar="FILE"),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Add two arms without a gateway: FCFS and engine priorities.")
    ] = False,
    slo: SloOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all values as JSON.")] = False,
    plots: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML report and PNG files there (needs 'inferry[plots]').", metavar="DIR"),
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also write an HTML report.", metavar="FILE")] = None,
) -> None:
    """Play a workload against an engine model with the real scheduler, and compare configurations."""
    if plots is not None and not can_draw():
        fail("PNG plots need matplotlib: pip install 'inferry[plots]'; --html FILE writes a report without it")
    try:
        workload = check(
            Workload(
                trace=trace,
                scenario=scenario,
                seconds=seconds,
                scale=scale,
                digests=digests,
                lanes=parse_lanes(lane),
                session_gap_s=session_gap_s,
            )
        )
        model = load_model(model_file)
        arms = build_arms(config_files or [], model, workers, direct)
        # Arms are comparable only against the same SLO targets: those of the first configuration.
        slo_targets = slo_targets_for(
            load_config(config_files[0]).lane_policies() if config_files else DEFAULT_LANES, slo or ()
        )
        played = runs_by_seed(workload, tuple(dict.fromkeys(seeds or [7])))
    except SimulationSetupError as error:
        fail(str(error))
    fitting = {seed: drop_oversized(runs, arms) for seed, runs in played.items()}
    first = next(iter(fitting))
    if not fitting[first]:
        fail("no run fits the KV of every engine")
    rows: dict[str, Sequence[CallRow]] = {}
    compared = []
    with progress(len(arms) * len(fitting), "simulation") as play:
        for arm in arms:
            compared.append(_compare(arm, model, fitting, slo_targets, play, rows))
    result = SimulationResult(
        workload=workload.name,
        model=model.name,
        seeds=tuple(fitting),
        scale=scale,
        runs=len(fitting[first]),
        left_out=len(played[first]) - len(fitting[first]),
        slo_targets={lane.name: one for lane, one in slo_targets.items()},
        arms=tuple(compared),
    )
    _print(result, slo_targets, as_json)
    _draw(result, rows, slo_targets, plots, page)


def _compare(
    arm: Arm,
    model: EngineModel,
    runs: dict[int, list[Run]],
    slo_targets: dict[Lane, SloTarget],
    play: Play,
    rows: dict[str, Sequence[CallRow]],
) -> Comparison:
    """One arm with every seed. The calls of the first seed are kept for the plots."""
    reports = []
    itl_s = {lane: one.itl_s for lane, one in slo_targets.items()}
    ttft_s = {lane: one.ttft_s for lane, one in slo_targets.items()}
    for seed, seed_runs in runs.items():
        simulation = Simulation(arm.frontend(), model.costs, arm.flags, itl_s=itl_s)
        play(simulation, seed_runs, arm.name)
        reports.append(report(simulation, arm.name, ttft_s, seed=seed))
        rows.setdefault(arm.name, simulation.rows)
    return compare(reports)


def _print(result: SimulationResult, slo_targets: dict[Lane, SloTarget], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
        return
    out = console()
    out.print(comparison_table(result.arms))
    for note in _notes(result, slo_targets):
        out.print(note, soft_wrap=True)


def _notes(result: SimulationResult, slo_targets: dict[Lane, SloTarget]) -> list[str]:
    lanes = sorted({name for arm in result.arms for name in arm.lanes})
    seeds = f", seeds {', '.join(map(str, result.seeds))}" if len(result.seeds) > 1 else ""
    workers = sorted({one.workers for arm in result.arms for one in arm.reports})
    engines = " and ".join(f"{count}" for count in workers)
    notes = [
        f"{result.workload}: {result.runs:,} runs{seeds} on {engines} x {result.model}",
        slo_line(slo_targets, lanes),
    ]
    if result.left_out:
        notes.append(f"{result.left_out:,} runs were left out: their calls exceed the KV capacity of an engine")
    return notes


def _draw(
    result: SimulationResult,
    rows: dict[str, Sequence[CallRow]],
    slo_targets: dict[Lane, SloTarget],
    plots: Path | None,
    page: Path | None,
) -> None:
    seed = (
        f", seed {result.seeds[0]}" if len(result.seeds) == 1 and result.workload in ("harbor", "simple-harbor") else ""
    )
    title = f"{result.workload}{seed}"
    ttft_target_s = {lane: one.ttft_s for lane, one in slo_targets.items()}
    written = []
    try:
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            written += draw_pngs(plots, title, result.arms, rows, ttft_target_s)
        for path in (page, None if plots is None else plots / "index.html"):
            if path is not None:
                path.write_text(html_page(title, result.arms, rows, ttft_target_s, _notes(result, slo_targets)))
                written.append(path)
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")
    if written:
        Console(stderr=True, soft_wrap=True).print(f"written to {', '.join(map(str, written))}", highlight=False)
