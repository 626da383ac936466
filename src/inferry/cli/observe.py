"""`inferry observe`: pass calls on untouched, record their metadata, and report what Inferry would have changed."""

import logging
import sys
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from inferry.cli.config.checks import check_host, check_url
from inferry.cli.config.schema import ConfigError
from inferry.cli.simulate_setup import drop_oversized, gateway_arm, load_config, load_model, simulated_workers
from inferry.cli.terminal import console, fail
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerUnusable
from inferry.report.formatting import NONE
from inferry.sim.arrivals import busiest_window
from inferry.sim.observed import (
    AFFINITY,
    COALESCING,
    DIRECT,
    LANES,
    Comparison,
    Need,
    ObserveReport,
    estimated_share,
    observed_attainment,
    observed_runs,
)
from inferry.sim.workload import SimulationSetupError, slo_targets_for

observe_app = typer.Typer(help="Pass calls on untouched, and report what Inferry would have changed.")

Database = Annotated[str, typer.Option("--database", help="Where metadata is recorded: `sqlite:///PATH`.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration with the lanes and their targets.", metavar="FILE")
]
DEFAULT_DATABASE = "sqlite:///observed.db"


@observe_app.callback(invoke_without_command=True)
def observe(
    context: typer.Context,
    upstream: Annotated[str | None, typer.Option(help="URL of the server that calls are passed on to.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 selects a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    database: Database = DEFAULT_DATABASE,
    config_file: ConfigOption = None,
    forward_admin: Annotated[
        bool, typer.Option("--forward-admin", help="Pass the endpoints for operators (`/admin/…`) on too.")
    ] = False,
) -> None:
    """Pass requests to the server at --upstream untouched, and record metadata of its calls, never prompts."""
    if context.invoked_subcommand is not None:
        return
    if upstream is None:
        fail("--upstream is missing: the URL of the server that calls are passed on to")
    if (problem := check_url(upstream)) is not None:
        fail(f"--upstream {problem}")
    if (problem := check_host(host)) is not None:
        fail(f"--host {problem}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    lanes = _lanes(config_file)
    try:
        from inferry.cli.observe_wiring import serve_proxy  # other commands do not need the server

        serve_proxy(upstream, host, port, database, lanes, forwards_admin=forward_admin)
    except (LedgerUnusable, ConfigError) as error:
        fail(str(error))


@observe_app.command("report")
def observe_report(
    database: Database = DEFAULT_DATABASE,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs that served the calls.")] = 1,
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", help="Price of a GPU-hour, to print the cost of a month.")
    ] = None,
    target: Annotated[
        float, typer.Option("--target", help="SLO attainment to reach in every lane, in percent.")
    ] = 99.0,
    calls: Annotated[int, typer.Option("--calls", min=1, help="Play only the busiest window of this many calls.")] = (
        20_000
    ),
    max_gpus: Annotated[int, typer.Option("--max-gpus", min=1, help="Maximum number of GPUs to try.")] = 256,
    model_file: Annotated[
        Path | None, typer.Option("--model-file", help="Engine model of `inferry calibrate`.", metavar="FILE")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="Targets of a lane in milliseconds, such as P0=500,30.")
    ] = None,
    config_file: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Say what lanes, coalescing and affinity would have changed for the recorded calls, by simulation."""
    if not 0 < target <= 100:
        fail(f"--target must be above 0 and at most 100, got {target:g}")
    if price_per_hour is not None and not 0 < price_per_hour < inf:
        fail(f"--price-per-hour must be above 0, got {price_per_hour:g}")
    try:
        found = compare(
            database,
            gpus=gpus,
            price_per_hour=price_per_hour,
            target=target / 100,
            calls=calls,
            max_gpus=max_gpus,
            model_file=model_file,
            slo=slo or [],
            lanes=_lanes(config_file),
        )
    except (LedgerUnusable, SimulationSetupError) as error:
        fail(str(error))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        _print(found)


def compare(
    database: str,
    *,
    gpus: int,
    target: float,
    calls: int,
    max_gpus: int,
    slo: list[str],
    lanes: dict[Lane, LanePolicy],
    price_per_hour: float | None = None,
    model_file: Path | None = None,
) -> ObserveReport:
    """The report about the calls of a database. Raises LedgerUnusable or SimulationSetupError."""
    from inferry.cli.observe_wiring import read_observed

    entries = read_observed(database)
    every = observed_runs(entries)
    model = load_model(model_file)
    fitting = drop_oversized(every, [gateway_arm("", lanes, simulated_workers(None, model))])
    played = busiest_window(fitting, calls)
    if not played:
        raise SimulationSetupError(f"{database} has no completed calls of `inferry observe`")
    comparison = Comparison(played, model, lanes, slo_targets_for(lanes, slo))
    return ObserveReport(
        calls=len(played),
        left_out=len(every) - len(fitting),
        seconds=max(run.at for run in played),
        gpus=gpus,
        target=target,
        price_per_hour=price_per_hour,
        model=model.name,
        observed_attainment=observed_attainment(entries),
        estimated_tokens=estimated_share(entries),
        arms=tuple(comparison.figures(arm, gpus) for arm in (DIRECT, LANES, COALESCING, AFFINITY)),
        before=comparison.need(DIRECT, target, max_gpus, price_per_hour),
        after=comparison.need(AFFINITY, target, max_gpus, price_per_hour),
    )


def _lanes(config_file: Path | None) -> dict[Lane, LanePolicy]:
    try:
        return dict(DEFAULT_LANES) if config_file is None else load_config(config_file).lane_policies()
    except SimulationSetupError as error:
        fail(str(error))


def _print(found: ObserveReport) -> None:
    out = console(100)
    lanes = [name for name in found.arms[0].attainment if name != "all"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in (f"{found.gpus} GPU{'s' if found.gpus > 1 else ''}", *lanes, "all", "GPU-seconds"):
        table.add_column(heading, justify="left" if heading.endswith(("GPU", "GPUs")) else "right", no_wrap=True)
    observed = [found.observed_attainment.get(lane) for lane in lanes]
    table.add_row("measured", *[NONE if part is None else f"{part:.2%}" for part in observed], NONE, NONE)
    for arm in found.arms:
        table.add_row(arm.name, *[f"{arm.attainment[lane]:.2%}" for lane in (*lanes, "all")], f"{arm.gpu_seconds:,.0f}")
    out.print(table)
    out.print(
        f"SLO attainment of {found.calls:,} calls in {found.seconds:,.0f} s: measured on the wire, and simulated",
        soft_wrap=True,
    )
    out.print(
        f"GPUs for {found.target * 100:g} %: {_need(found.before)} before, {_need(found.after)} after", style="bold"
    )
    out.print(f"simulated on the engine model {found.model}; --model-file names another one", soft_wrap=True)
    if found.estimated_tokens:
        out.print(f"tokens of {found.estimated_tokens:.0%} of the calls are estimates: the server reported no usage")
    if found.left_out:
        out.print(f"{found.left_out:,} calls were left out: they exceed the KV capacity of an engine")


def _need(need: Need) -> str:
    if need.gpus is None:
        return "more than tried"
    return f"{need.gpus}" if need.per_month is None else f"{need.gpus} ({need.per_month:,.0f} a month)"
