"""`inferry plan`: fleet sizing by simulation (`fleet`, see `plan_fleet`) or by queueing formulas for a steady load."""

import os
from math import inf
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from inferry.cli.plan_fleet import fleet
from inferry.prediction import queueing_theory

plan_app = typer.Typer(help="Size a fleet: by simulation, or by queueing formulas.", no_args_is_help=True)
plan_app.command()(fleet)

MAX_CV = 1000

Rate = Annotated[float, typer.Option("--rate", metavar="N", help="Arrivals per second.")]
ServiceMs = Annotated[float, typer.Option("--service-ms", metavar="MS", help="Service time of a job.")]
Workers = Annotated[
    int, typer.Option("--workers", min=1, max=queueing_theory.MAX_WORKERS, help="Number of workers or slots.")
]
ArrivalCv = Annotated[
    float,
    typer.Option(
        "--arrival-cv", help="Coefficient of variation of interarrival times: 1 is Poisson, fan-out is 2 to 4."
    ),
]
ServiceCv = Annotated[float, typer.Option("--service-cv", help="Coefficient of variation of service times.")]
Percentile = Annotated[float, typer.Option("--percentile", help="Percentile of waits that must meet the target.")]
FixedMs = Annotated[float, typer.Option("--fixed-ms", metavar="MS", help="Fixed time of a pass.")]
EachMs = Annotated[float, typer.Option("--each-ms", metavar="MS", help="Time per job in a pass.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@plan_app.command()
def wait(
    rate: Rate,
    service_ms: ServiceMs,
    workers: Workers = 1,
    arrival_cv: ArrivalCv = 1.0,
    service_cv: ServiceCv = 1.0,
    as_json: Json = False,
) -> None:
    """Predicted waiting time."""
    _positive(rate=rate, service_ms=service_ms)
    _variation(arrival_cv=arrival_cv, service_cv=service_cv)
    service_s = service_ms / 1000
    used = queueing_theory.utilisation(rate, service_s, workers)
    _must_keep_up(used)
    shape = (rate, service_s, workers, arrival_cv, service_cv)
    _show(
        {
            "utilisation": used,
            "must_wait": queueing_theory.erlang_c(workers, rate * service_s),
            "mean_wait_ms": queueing_theory.ggc_wait(*shape) * 1000,
            "p50_wait_ms": queueing_theory.wait_quantile(0.5, *shape) * 1000,
            "p90_wait_ms": queueing_theory.wait_quantile(0.9, *shape) * 1000,
            "p99_wait_ms": queueing_theory.wait_quantile(0.99, *shape) * 1000,
        },
        as_json,
    )


@plan_app.command("batch")
def batch_(
    rate: Rate,
    fixed_ms: FixedMs,
    each_ms: EachMs,
    target_ms: Annotated[
        float | None,
        typer.Option("--target-ms", metavar="MS", help="Find the largest batch that completes within this time."),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, max=65_536, help="Maximum batch size.")] = 1024,
    as_json: Json = False,
) -> None:
    """Batch size and hold time: the lowest mean latency, or the largest batch within a target."""
    _positive(rate=rate, fixed_ms=fixed_ms)
    _not_negative(each_ms=each_ms)
    fixed_s, each_s = fixed_ms / 1000, each_ms / 1000
    if target_ms is None:
        choice = queueing_theory.best_batch(rate, fixed_s, each_s, max_size=max_batch)
        if choice is None:
            _fail(f"no batch of up to {max_batch} keeps up with {rate:g} jobs per second")
    else:
        _positive(target_ms=target_ms)
        choice = queueing_theory.largest_batch(rate, fixed_s, each_s, target_ms / 1000, max_size=max_batch)
        if choice is None:
            _fail(f"no batch of up to {max_batch} keeps up with {rate:g} jobs per second within {target_ms:g} ms")
    _show(
        {
            "batch": choice.size,
            "hold_ms": choice.fill_s * 1000,
            "queue_ms": choice.queue_s * 1000,
            "pass_ms": choice.pass_s * 1000,
            "utilisation": choice.utilisation,
            "mean_latency_ms": choice.mean_s * 1000,
            "worst_latency_ms": choice.worst_s * 1000,
        },
        as_json,
    )


@plan_app.command()
def utilisation(
    workers: Workers = 1,
    wait_per_service: Annotated[
        float | None, typer.Option("--wait-per-service", help="Target mean wait, as a multiple of the service time.")
    ] = None,
    arrival_cv: ArrivalCv = 1.0,
    service_cv: ServiceCv = 1.0,
    as_json: Json = False,
) -> None:
    """Wait at each utilisation, or the highest utilisation for a wait."""
    _variation(arrival_cv=arrival_cv, service_cv=service_cv)
    if wait_per_service is not None:
        _positive(wait_per_service=wait_per_service)
        highest = queueing_theory.utilisation_for_wait(wait_per_service, workers, arrival_cv, service_cv)
        _show({"utilisation": highest}, as_json)
        return
    waits = {
        percent: queueing_theory.ggc_wait(percent / 100 * workers, 1.0, workers, arrival_cv, service_cv)
        for percent in (50, 60, 70, 75, 80, 85, 90, 95)
    }
    if as_json:
        typer.echo(msgspec.json.encode({f"{percent}": wait for percent, wait in waits.items()}).decode())
        return
    table = _table("utilisation", "mean wait / service")
    for percent, multiple in waits.items():
        table.add_row(f"{percent} %", f"{multiple:.2f}", style="bold" if 70 <= percent <= 80 else None)
    _console().print(table)


@plan_app.command()
def workers(
    rate: Rate,
    service_ms: ServiceMs,
    target_ms: Annotated[float, typer.Option("--target-ms", metavar="MS", help="Target for the wait.")],
    percentile: Percentile = 90.0,
    arrival_cv: ArrivalCv = 1.0,
    service_cv: ServiceCv = 1.0,
    max_utilisation: Annotated[float, typer.Option("--max-utilisation", help="Maximum utilisation (percent).")] = 80.0,
    as_json: Json = False,
) -> None:
    """Number of workers or slots for an arrival rate and a target wait."""
    _positive(rate=rate, service_ms=service_ms)
    _not_negative(target_ms=target_ms)
    _variation(arrival_cv=arrival_cv, service_cv=service_cv)
    for name, percent in (("percentile", percentile), ("max-utilisation", max_utilisation)):
        if not 0 < percent < 100:
            _fail(f"--{name} must be between 0 and 100, got {percent:g}")
    service_s, level = service_ms / 1000, percentile / 100
    if rate * service_s > queueing_theory.MAX_WORKERS / 2:
        _fail(f"{rate * service_s:g} concurrent jobs exceed what the formulas cover")
    count = queueing_theory.workers_needed(
        rate,
        service_s,
        target_ms / 1000,
        level=level,
        arrival_cv=arrival_cv,
        service_cv=service_cv,
        max_utilisation=max_utilisation / 100,
    )
    shape = (rate, service_s, count, arrival_cv, service_cv)
    _show(
        {
            "workers": count,
            "utilisation": queueing_theory.utilisation(rate, service_s, count),
            "mean_wait_ms": queueing_theory.ggc_wait(*shape) * 1000,
            f"p{percentile:g}_wait_ms": queueing_theory.wait_quantile(level, *shape) * 1000,
        },
        as_json,
    )


# -- output ------------------------------------------------------------------------------------------------------------


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(values).decode())
        return
    table = _table("", "")
    table.show_header = False
    for name, value in values.items():
        if name.endswith("_ms"):
            table.add_row(name.removesuffix("_ms").replace("_", " "), f"{value:,.1f} ms")
        elif isinstance(value, float):
            table.add_row(name.replace("_", " "), f"{value:.1%}")
        else:
            table.add_row(name, f"{value:,}")
    _console().print(table)


def _table(name: str, number: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(name, no_wrap=True)
    table.add_column(number, justify="right", no_wrap=True)
    return table


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=100)
    return console


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < inf:
            _fail(f"--{name.replace('_', '-')} must be above 0, got {value:g}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < inf:
            _fail(f"--{name.replace('_', '-')} must be 0 or above, got {value:g}")


def _variation(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= MAX_CV:
            _fail(f"--{name.replace('_', '-')} must be between 0 and {MAX_CV}, got {value:g}")


def _must_keep_up(used: float) -> None:
    if used >= 1:
        _fail(f"utilisation would be {used:.0%}: the queue grows without bound")


def _fail(message: str) -> NoReturn:
    typer.echo(f"inferry plan: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    plan_app()
