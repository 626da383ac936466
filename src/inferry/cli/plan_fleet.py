"""`inferry plan fleet`: the smallest fleet that meets the SLO targets for a workload, by simulation."""

import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.table import Table

from inferry.cli.config.schema import Config
from inferry.cli.option_groups import grouped
from inferry.cli.simulate_options import TargetOptions, WorkloadOptions
from inferry.cli.simulate_output import progress, slo_line
from inferry.cli.simulate_setup import Arm, drop_oversized, gateway_arm, load_config, load_model, simulated_workers
from inferry.cli.terminal import console, fail
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.report.formatting import NONE
from inferry.sim.arrivals import busiest_window
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel
from inferry.sim.formatting import show
from inferry.sim.report import Report, report
from inferry.sim.simulation import Simulation
from inferry.sim.sizing import NoFeasibleFleet, Probe, Sizing, smallest_fleet
from inferry.sim.workload import (
    SimulationSetupError,
    SloTarget,
    Workload,
    runs_by_seed,
    slo_targets_for,
)

HOURS_A_MONTH = 730
_SEEDS = (7, 8, 9)


class Slice(Struct, frozen=True):
    """The part of the workload that every probe plays."""

    calls: int
    of_calls: int
    seconds: float
    left_out: int


class Cost(Struct, frozen=True):
    """In the currency of the price."""

    per_hour: float
    per_month: float
    per_million_output_tokens: float | None


class FleetPlan(Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    workload: str
    model: str
    slo_targets: dict[str, SloTarget]
    slice: Slice
    sizing: Sizing
    cost: Cost | None = None


class SizingOptions(Struct, frozen=True, kw_only=True):
    """What is tried, and when it is enough."""

    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Configuration; its workers are repeated up to the number tried.", metavar="FILE"
        ),
    ] = None
    target: Annotated[float, typer.Option("--target", help="SLO attainment to reach in every lane, in percent.")] = 99.0
    max_workers: Annotated[int, typer.Option("--max-workers", min=1, help="Maximum number of workers to try.")] = 256
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Seeds that confirm the result.  [default: 7, 8, 9; one for a plain trace]"),
    ] = None
    calls: Annotated[int, typer.Option("--calls", min=1, help="Play only the busiest window of this many calls.")] = (
        20_000
    )
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", help="Price of a worker-hour, to print the cost.")
    ] = None


class _Problem(Struct, frozen=True, kw_only=True):
    """What is to be sized: the options, read and checked. `every` are all runs by seed."""

    workload: Workload
    config: Config | None
    policies: Mapping[Lane, LanePolicy]
    slo_targets: dict[Lane, SloTarget]
    model: EngineModel
    every: dict[int, list[Run]]

    def arm(self, name: str, workers: int | None = None) -> Arm:
        sessions = None if self.config is None else self.config.sessions.limits()
        return gateway_arm(name, self.policies, simulated_workers(self.config, self.model, workers), sessions)


@grouped
def fleet(
    *,
    workload: WorkloadOptions,
    sizing: SizingOptions,
    targets: TargetOptions,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Find the smallest fleet that meets the SLO targets for a trace or scenario, by simulation."""
    if not 0 < sizing.target <= 100:
        fail(f"--target must be above 0 and at most 100, got {sizing.target:g}")
    if sizing.price_per_hour is not None and not 0 < sizing.price_per_hour < inf:
        fail(f"--price-per-hour must be above 0, got {sizing.price_per_hour:g}")
    problem = _problem(workload, sizing, targets)
    one = [problem.arm("")]
    fitting = {seed: drop_oversized(runs, one) for seed, runs in problem.every.items()}
    played = {seed: busiest_window(runs, sizing.calls) for seed, runs in fitting.items()}
    first = next(iter(played))
    if not played[first]:
        fail("no run fits the KV of every engine")
    found = _size(problem, played, sizing, as_json)
    plan = FleetPlan(
        workload=problem.workload.name,
        model=problem.model.name,
        slo_targets={lane.name: one for lane, one in problem.slo_targets.items()},
        slice=_slice(problem.every[first], played[first], fitting[first]),
        sizing=found,
        cost=None if sizing.price_per_hour is None else _cost(found, sizing.price_per_hour),
    )
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")
    else:
        _print(plan, problem.slo_targets)


def _problem(workload: WorkloadOptions, sizing: SizingOptions, targets: TargetOptions) -> _Problem:
    try:
        played = workload.workload()
        config = None if sizing.config_file is None else load_config(sizing.config_file)
        policies = DEFAULT_LANES if config is None else config.lane_policies()
        tried = tuple(dict.fromkeys(sizing.seeds or (_SEEDS if played.has_seeds else _SEEDS[:1])))
        return _Problem(
            workload=played,
            config=config,
            policies=policies,
            slo_targets=slo_targets_for(policies, targets.slo or ()),
            model=load_model(targets.model_file),
            every=runs_by_seed(played, tried),
        )
    except SimulationSetupError as error:
        fail(str(error))


def _size(problem: _Problem, played: dict[int, list[Run]], sizing: SizingOptions, as_json: bool) -> Sizing:
    """Simulate fleets until the smallest one that attains the target is found."""
    itl_s = {lane: one.itl_s for lane, one in problem.slo_targets.items()}
    ttft_s = {lane: one.ttft_s for lane, one in problem.slo_targets.items()}
    with progress(0, "probe") as play:

        def simulate(workers: int, seed: int) -> Report:
            name = f"{workers} worker{'' if workers == 1 else 's'}"
            arm = problem.arm(name, workers)
            simulation = Simulation(arm.frontend(), problem.model.costs, arm.flags, itl_s=itl_s)
            play(simulation, played[seed], f"{name}, seed {seed}")
            return report(simulation, name, ttft_s, seed=seed)

        try:
            return smallest_fleet(simulate, tuple(played), sizing.target / 100, sizing.max_workers)
        except NoFeasibleFleet as nothing:
            if not as_json:
                console().print(_table(nothing.probes))
            fail(
                f"{sizing.max_workers} workers do not attain {sizing.target:g} % of the SLO targets in every lane. If "
                "more workers do not help a lane, relax its targets or use an engine with shorter steps"
            )


def _slice(every: Sequence[Run], played: Sequence[Run], fitting: Sequence[Run]) -> Slice:
    return Slice(
        calls=sum(len(run.steps) for run in played),
        of_calls=sum(len(run.steps) for run in every),
        seconds=max(run.at for run in played),
        left_out=len(every) - len(fitting),
    )


def _cost(sizing: Sizing, price_per_hour: float) -> Cost:
    per_hour = sizing.workers * price_per_hour
    tokens_an_hour = sizing.chosen.output_rate * 3600
    return Cost(per_hour, per_hour * HOURS_A_MONTH, per_hour / tokens_an_hour * 1e6 if tokens_an_hour else None)


def _print(plan: FleetPlan, slo_targets: dict[Lane, SloTarget]) -> None:
    out = console(100)
    sizing, part = plan.sizing, plan.slice
    out.print(_table(sizing.probes, sizing.workers))
    lane_label = "1 worker attains" if sizing.workers == 1 else f"{sizing.workers} workers attain"
    out.print(
        f"{lane_label} at least {sizing.target * 100:g} % of the SLO targets in every lane",
        style="bold",
        soft_wrap=True,
    )
    whole = part.calls == part.of_calls
    which = f"all {part.calls:,} calls" if whole else f"the busiest {part.calls:,} of {part.of_calls:,} calls"
    out.print(f"sized for {which} of {plan.workload}, in {part.seconds:,.0f} s, on {plan.model}", soft_wrap=True)
    out.print(slo_line(slo_targets, list(sizing.chosen.attainment)), soft_wrap=True)
    if part.left_out:
        out.print(f"{part.left_out:,} runs were left out: their calls exceed the KV capacity of an engine")
    if plan.cost is not None:
        cost = plan.cost
        tokens = (
            ""
            if cost.per_million_output_tokens is None
            else (f", {cost.per_million_output_tokens:,.2f} per million output tokens at this load")
        )
        out.print(f"cost: {cost.per_hour:,.2f} an hour, {cost.per_month:,.0f} a month{tokens}", soft_wrap=True)


def _table(probes: Sequence[Probe], chosen: int | None = None) -> Table:
    lanes = sorted({name for one in probes for name in one.attainment})
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("workers", "seeds", *[f"{lane} SLO" for lane in lanes], *[f"{lane} p95" for lane in lanes]):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    table.add_column("enough", no_wrap=True)
    for one in probes:
        ttfts = [one.ttft_p95.get(lane) for lane in lanes]
        table.add_row(
            f"{one.workers}",
            f"{len(one.seeds)}",
            *[f"{one.attainment[lane]:.2%}" if lane in one.attainment else NONE for lane in lanes],
            *[NONE if value is None else show("ttft_p95", value) for value in ttfts],
            f"{one.utilisation:.0%}",
            "yes" if one.meets else "no",
            style="bold" if one.workers == chosen else None,
        )
    return table
