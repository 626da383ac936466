"""`inferry calibrate`: probe a live engine and write an engine model for `inferry simulate`."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferry.cli.option_groups import grouped
from inferry.cli.terminal import check_key, fail, write_file
from inferry.sim.costs import EngineModel
from inferry.sim.fit import EVALUATED_FIGURES, Fit, fit
from inferry.sim.observations import Conditions, Flag, Observation, ObservationFormatError, from_lines, to_lines
from inferry.sim.regression import COSTS, CannotFit

if TYPE_CHECKING:
    from inferry.loadgen.calibration import CalibrationOptions

QUICK_S = 15.0
PROBE_FAILED, FIT_FAILED, INTERRUPTED = 3, 4, 130
_FIGURES = {"first": "first token", "itl": "inter-token latency", "total": "batch total"}


class Probes(msgspec.Struct, frozen=True):
    """Number of probes by use."""

    fitted: int
    held_out: int
    left_out: int


class CalibratedModel(EngineModel, frozen=True, kw_only=True):
    """An engine model with the conditions of its calibration, which loading as an `EngineModel` ignores."""

    flag_sources: dict[str, str]
    probes: Probes
    conditions: Conditions


class FlagOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of the engine, where probes cannot find them or should not."""

    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of running sequences of the engine.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per step of the engine.")
    ] = None
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="Size of the engine's KV cache, in tokens.")] = None
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Size of a KV block, in tokens.")] = None


@grouped
def calibrate(
    *,
    url: Annotated[str | None, typer.Option(help="URL of the engine, such as http://host:8000.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the only model of the server.", metavar="NAME")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output file (engine-model.json).", metavar="MODEL.json")] = Path(
        "engine-model.json"
    ),
    seconds: Annotated[float, typer.Option(min=2, help="Duration of the probes, in seconds.")] = 60.0,
    quick: Annotated[bool, typer.Option("--quick", help=f"Probe for {QUICK_S:g} s: fewer and coarser probes.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the engine model.")] = None,
    flags: FlagOptions,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.", metavar="VAR")
    ] = None,
    raw: Annotated[
        Path | None, typer.Option(help="Also write the observations, as JSON lines.", metavar="FILE")
    ] = None,
    from_raw: Annotated[
        Path | None, typer.Option(help="Fit the observations of --raw again, without an engine.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the engine model instead of tables.")] = False,
) -> None:
    """Measure the step costs of a live engine for `inferry simulate --model`. The engine should be idle otherwise."""
    if (url is None) == (from_raw is None):
        fail("either --url or --from-raw is needed")
    for path in (out, raw):
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"no such directory: {path.absolute().parent}")
    given = msgspec.structs.asdict(flags)
    if from_raw is not None:
        conditions, observations = _load_observations(from_raw, given)
    else:
        assert url is not None
        if not url.startswith(("http://", "https://")):
            fail(f"--url must begin with http:// or https://, got {url}")
        conditions, observations = _collect_observations(
            url, model, QUICK_S if quick else seconds, given, _key(api_key_env)
        )
        if raw is not None:
            write_file(raw, to_lines(conditions, observations))
    try:
        fitted = fit(observations, conditions.flags)
    except CannotFit as error:
        fail(str(error), FIT_FAILED)
    calibrated = _model(name, fitted, conditions, observations)
    encoded = msgspec.json.format(msgspec.json.encode(calibrated), indent=2) + b"\n"
    write_file(out, encoded)
    if as_json:
        typer.echo(encoded.decode(), nl=False)
    else:
        _show(calibrated, fitted, out)


# -- observations ------------------------------------------------------------------------------------------------------


def _load_observations(path: Path, given: dict[str, int | None]) -> tuple[Conditions, list[Observation]]:
    try:
        conditions, observations = from_lines(path.read_bytes())
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except ObservationFormatError as error:
        fail(f"{path} was not written by --raw: {error}")
    if not observations:
        fail(f"{path} holds no observations", FIT_FAILED)
    overrides = {name: Flag(value, "given") for name, value in given.items() if value is not None}
    return msgspec.structs.replace(conditions, flags=conditions.flags | overrides), list(observations)


def _collect_observations(
    url: str, model: str | None, seconds: float, given: dict[str, int | None], key: str | None
) -> tuple[Conditions, list[Observation]]:
    from inferry.loadgen.calibration import CalibrationOptions
    from inferry.loadgen.server import ProbeError

    options = CalibrationOptions(model=model, seconds=seconds, **given)
    try:
        return _probe(url, options, key)
    except ProbeError as error:
        fail(str(error), PROBE_FAILED)
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", INTERRUPTED)


def _probe(url: str, options: "CalibrationOptions", key: str | None) -> tuple[Conditions, list[Observation]]:
    from inferry.loadgen.calibration import observe
    from inferry.loadgen.server import Server

    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not available on Windows
        import uvloop

        new_loop = uvloop.new_event_loop

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)

        async def main() -> tuple[Conditions, list[Observation]]:
            server = Server(url, key)
            try:
                return await observe(
                    server, options, lambda words, used: progress.update(task, description=words, completed=used)
                )
            finally:
                server.close()

        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(main())


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        fail(f"the environment variable {variable} is not set")
    return check_key(key, variable)


# -- output ------------------------------------------------------------------------------------------------------------


def _model(name: str | None, fitted: Fit, conditions: Conditions, observations: list[Observation]) -> CalibratedModel:
    return CalibratedModel(
        name=name or f"{conditions.model} on {conditions.server}",
        costs=fitted.costs,
        flags=fitted.flags,
        fitted_on=tuple(sorted({_probe_label(one) for one in observations if not one.held_out})),
        residuals=fitted.residuals,
        flag_sources={flag: known.source for flag, known in fitted.known_flags.items()},
        probes=Probes(fitted.fitted, fitted.evaluated, conditions.left_out),
        conditions=conditions,
    )


def _probe_label(one: Observation) -> str:
    """Kind of probe, number of calls, longest prompt."""
    longest = max(call.prompt_tokens for call in one.calls)
    return f"{one.kind} {len(one.calls)} x {longest}"


def _show(model: CalibratedModel, fitted: Fit, out: Path) -> None:
    console = Console(highlight=False)
    costs = _table("cost", "value")
    for name in COSTS:
        costs.add_row(name.removesuffix("_s").replace("_", " "), _format_duration(getattr(model.costs, name)))
    console.print(costs)
    flags = _table("flag", "value", "source")
    for name, flag in fitted.known_flags.items():
        flags.add_row(name, f"{flag.value:,}", flag.source)
    console.print(flags)
    errors = _table(f"error on {model.probes.held_out} held-out probes", "median", "p95")
    for name in EVALUATED_FIGURES:
        if name in model.residuals:
            found = model.residuals[name]
            errors.add_row(_FIGURES[name], f"{found['median']:.1%}", f"{found['p95']:.1%}")
    console.print(errors)
    for warning in model.conditions.warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    console.print(f"{model.probes.fitted} probes fitted; written to {out}", soft_wrap=True, markup=False)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (0, 2) and heading != "p95" else "right", no_wrap=True)
    return table


def _format_duration(seconds: float) -> str:
    size = abs(seconds)
    for unit, factor in (("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if size * factor >= 0.1:
            return f"{seconds * factor:,.2f} {unit}"
    return f"{seconds * 1e12:,.1f} ps" if seconds else "0"


if __name__ == "__main__":
    typer.run(calibrate)
