"""`inferry simulate`: compare configurations on a workload, in virtual time."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.console import Console

from inferry.cli.option_groups import grouped
from inferry.cli.simulate_options import TargetOptions, WorkloadOptions
from inferry.cli.simulate_output import Play, comparison_table, progress, slo_line
from inferry.cli.simulate_plots import can_draw, draw_pngs
from inferry.cli.simulate_setup import Arm, build_arms, drop_oversized, load_config, load_model
from inferry.cli.terminal import console, fail
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel
from inferry.sim.length_predictor import LengthSource
from inferry.sim.report import Comparison, compare, report
from inferry.sim.report_page import html_page
from inferry.sim.simulation import Simulation
from inferry.sim.workload import (
    SimulationSetupError,
    SloTarget,
    Workload,
    parse_kills,
    runs_by_seed,
    slo_targets_for,
)


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


class ArmOptions(Struct, frozen=True, kw_only=True):
    """What is compared."""

    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of engines; default: the workers of the configuration.")
    ] = None
    config_files: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="Configuration to simulate; repeat to compare.", metavar="FILE"),
    ] = None
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Play this many runs at a time, each followed by the next; their times are not used."),
    ] = None
    kills: Annotated[
        list[str] | None,
        typer.Option(
            "--kill", help="An engine is lost at this time, its number from 1; repeatable.", metavar="ENGINE@SECONDS"
        ),
    ] = None
    lengths: Annotated[
        LengthSource,
        typer.Option(help="Output lengths that the gateway expects: true up to 256 tokens, true, or predicted."),
    ] = "capped"
    direct: Annotated[
        bool, typer.Option("--direct", help="Add two arms without a gateway: FCFS and engine priorities.")
    ] = False


class OutputOptions(Struct, frozen=True, kw_only=True):
    """What is printed and written."""

    as_json: Annotated[bool, typer.Option("--json", help="Print all values as JSON.")] = False
    plots: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML report and PNG files there (needs the `plots` extra).", metavar="DIR"),
    ] = None
    page: Annotated[Path | None, typer.Option("--html", help="Also write an HTML report.", metavar="FILE")] = None


@grouped
def simulate(
    *,
    workload: WorkloadOptions,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed; give several for medians and ranges.  [default: 7]")
    ] = None,
    targets: TargetOptions,
    arms: ArmOptions,
    output: OutputOptions,
) -> None:
    """Play a workload against an engine model with the real scheduler, and compare configurations."""
    if output.plots is not None and not can_draw():
        fail("PNG plots need matplotlib: pip install 'inferry[plots]'; --html FILE writes a report without it")
    try:
        played = workload.workload()
        model = load_model(targets.model_file)
        compared = build_arms(arms.config_files or [], model, arms.workers, arms.direct, arms.lengths)
        slo_targets = _slo_targets(arms, targets)
        kills = parse_kills(arms.kills or (), min(len(arm.flags) for arm in compared))
        runs = runs_by_seed(played, tuple(dict.fromkeys(seeds or [7])))
    except SimulationSetupError as error:
        fail(str(error))
    result, rows = _simulate(played, model, compared, runs, slo_targets, kills, arms.sessions)
    _print(result, slo_targets, output.as_json)
    _draw(result, rows, slo_targets, output)


def _slo_targets(arms: ArmOptions, targets: TargetOptions) -> dict[Lane, SloTarget]:
    """Arms are comparable only against the same SLO targets: those of the first configuration."""
    policies = load_config(arms.config_files[0]).lane_policies() if arms.config_files else DEFAULT_LANES
    return slo_targets_for(policies, targets.slo or ())


def _simulate(
    workload: Workload,
    model: EngineModel,
    arms: Sequence[Arm],
    runs: dict[int, list[Run]],
    slo_targets: dict[Lane, SloTarget],
    kills: Mapping[int, float],
    sessions: int | None,
) -> tuple[SimulationResult, dict[str, Sequence[CallRow]]]:
    """Every arm with every seed, and the calls of each arm with the first seed."""
    fitting = {seed: drop_oversized(seed_runs, arms) for seed, seed_runs in runs.items()}
    first = next(iter(fitting))
    if not fitting[first]:
        fail("no run fits the KV of every engine")
    rows: dict[str, Sequence[CallRow]] = {}
    with progress(len(arms) * len(fitting), "simulation", sessions) as play:
        compared = tuple([_compare(arm, model, fitting, slo_targets, kills, play, rows) for arm in arms])
    result = SimulationResult(
        workload=workload.name,
        model=model.name,
        seeds=tuple(fitting),
        scale=workload.scale,
        runs=len(fitting[first]),
        left_out=len(runs[first]) - len(fitting[first]),
        slo_targets={lane.name: one for lane, one in slo_targets.items()},
        arms=compared,
    )
    return result, rows


def _compare(
    arm: Arm,
    model: EngineModel,
    runs: dict[int, list[Run]],
    slo_targets: dict[Lane, SloTarget],
    kills: Mapping[int, float],
    play: Play,
    rows: dict[str, Sequence[CallRow]],
) -> Comparison:
    """One arm with every seed. The calls of the first seed are kept for the plots."""
    reports = []
    itl_s = {lane: one.itl_s for lane, one in slo_targets.items()}
    ttft_s = {lane: one.ttft_s for lane, one in slo_targets.items()}
    ttft_s_per_1k_tokens = {lane: one.ttft_s_per_1k_tokens for lane, one in slo_targets.items()}
    for seed, seed_runs in runs.items():
        simulation = Simulation(
            arm.frontend(), model.costs, arm.flags, itl_s=itl_s, ttft_s_per_1k_tokens=ttft_s_per_1k_tokens
        )
        for engine, at in kills.items():
            simulation.kill(engine, at)
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
    output: OutputOptions,
) -> None:
    plots, page = output.plots, output.page
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
