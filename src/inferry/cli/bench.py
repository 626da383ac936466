"""`inferry bench`: open-loop load test of a server, or a sweep over concurrency."""

import os
import shlex
import sys
from collections.abc import Awaitable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from inferry.cli.bench_options import MeasurementOptions, ResultOptions, ServerOptions, WorkloadOptions
from inferry.cli.bench_output import (
    ProgressBar,
    SweepProgressBar,
    comparison_warnings,
    note,
    rich_table,
    show_result,
    show_sweep,
    warn,
)
from inferry.cli.bench_run import INTERRUPTED, NO_CALL_COMPLETED, run_to_end
from inferry.cli.formats import parse_sizes
from inferry.cli.option_groups import grouped
from inferry.cli.terminal import check_key, console, fail, write_file
from inferry.domain.lanes import DEFAULT_LANES, Lane

if TYPE_CHECKING:
    from inferry.loadgen.costs import Price
    from inferry.loadgen.load_test import LoadTest, StopHook
    from inferry.loadgen.result import Result
    from inferry.loadgen.sweep_result import SweepResult
    from inferry.loadgen.traffic import TrafficOptions
    from inferry.sim.costs import EngineModel
    from inferry.sim.workload import SloTarget

_SECRET_OPTIONS = ("--api-key", "--header")


@grouped
def bench(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results files, for --compare or --before-after.", metavar="RESULT.json"),
    ] = None,
    *,
    server: ServerOptions,
    workload: WorkloadOptions,
    measurement: MeasurementOptions,
    output: ResultOptions,
) -> None:
    """Load-test any OpenAI-compatible server, open loop, or closed loop over concurrency with --sweep, and measure what
    clients see."""
    from inferry.loadgen.result import Result
    from inferry.loadgen.traffic import EmptyLoad

    for path in (output.out, output.page, output.csv):
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"no such directory: {path.absolute().parent}")
    if output.compare or output.before_after:
        if server.url is not None:
            fail("--url cannot be combined with --compare or --before-after")
        _compare(results or [], measurement, output)
        return
    if results:
        fail("results files need --compare or --before-after")
    if output.csv is not None and workload.sweep is None:
        fail("--csv needs --sweep")
    try:
        load_test, key = _load_test(server, workload, measurement, output.label), _api_key(server)
        result = _run(load_test, key) if workload.sweep is None else _run_sweep(load_test, key, workload)
    except EmptyLoad as error:
        fail(str(error))
    _write_result(result, output)
    show_result(result) if isinstance(result, Result) else show_sweep(result)
    for path in (output.out, output.page, output.csv):
        if path is not None:
            note(f"written to {path}")
    if result.partial:
        raise typer.Exit(INTERRUPTED)
    if not result.done:
        fail("no call was answered", NO_CALL_COMPLETED)


# -- options -----------------------------------------------------------------------------------------------------------


def _load_test(
    server: ServerOptions, workload: WorkloadOptions, measurement: MeasurementOptions, label: str
) -> "LoadTest":
    from inferry.loadgen.load_generator import ClientLimits
    from inferry.loadgen.load_test import LoadTest
    from inferry.loadgen.requests import RequestMetadata

    url, lane_by, prompts = server.url, server.lane_by, server.prompts
    if url is None or not url.startswith(("http://", "https://")):
        fail(f"--url must be of the form http://HOST:PORT; got {url or 'none'}")
    if lane_by not in ("header", "priority", "none"):
        fail(f"--lane-by must be header, priority or none; got {lane_by!r}")
    if prompts not in (None, "ids", "text", "chat"):
        fail(f"--prompts must be ids, text or chat; got {prompts!r}")
    return LoadTest(
        url=url,
        model=server.model,
        traffic=_traffic(workload),
        slo_targets=_slo_targets(
            measurement.ttft_ms or [], measurement.itl_ms or [], measurement.ttft_ms_per_1k_tokens or []
        ),
        request_metadata=RequestMetadata(
            lane_by=lane_by,  # type: ignore[arg-type]
            tenant_header=server.tenant_header or None,
            run_ids=server.run_ids,
            headers=dict(map(_header, server.header or [])),
        ),
        limits=ClientLimits(
            retries=workload.retries,
            concurrency_cap=workload.concurrency_cap,
            pods=workload.pods,
            call_timeout_s=workload.call_timeout_s,
        ),
        price=_price(measurement),
        engine=_load_engine_model(measurement.model_costs),
        prompts=prompts,  # type: ignore[arg-type]
        max_context=workload.max_context,
        warmup_s=measurement.warmup,
        salt=workload.salt,
        label=label,
        command=_redacted_command(),
    )


def _traffic(workload: WorkloadOptions) -> "TrafficOptions":
    from inferry.loadgen.traffic import TrafficOptions, parse_agents, parse_bursts, parse_lane_shares, parse_range

    return TrafficOptions(
        poisson_per_s=workload.poisson,
        bursts=None if workload.bursts is None else parse_bursts(workload.bursts),
        agents=None if workload.agents is None else parse_agents(workload.agents),
        scenario=workload.scenario,
        trace=workload.trace,
        seconds=workload.duration,
        seed=workload.seed,
        scale=workload.scale,
        digests=workload.digests,
        lanes=parse_lane_shares(workload.lane),
        prompt_tokens=parse_range("--prompt-tokens", workload.prompt_tokens),
        output_tokens=parse_range("--output-tokens", workload.output_tokens),
        tenants=tuple(filter(None, workload.tenants.split(","))) or ("bench",),
        session_gap_s=workload.session_gap_s,
    )


def _price(measurement: MeasurementOptions) -> "Price":
    from inferry.loadgen.costs import Price

    return Price(gpu_per_hour=measurement.gpu_cost_per_hour, gpus=measurement.gpus, run_budget=measurement.run_budget)


def _api_key(server: ServerOptions) -> str | None:
    found = {"--api-key": server.api_key} | {
        name: os.environ.get(name) for name in ("INFERRY_API_KEY", "OPENAI_API_KEY")
    }
    return next((check_key(key, source) for source, key in found.items() if key), None)


def _load_engine_model(path: Path | None) -> "EngineModel | None":
    from inferry.cli.simulate_setup import load_model
    from inferry.sim.costs import MODELS
    from inferry.sim.workload import SimulationSetupError

    if path is None:
        return None
    shipped = MODELS / f"{path}.json"
    try:
        return load_model(shipped if not path.exists() and shipped.is_file() else path)
    except SimulationSetupError as error:
        fail(str(error))


def _slo_targets(
    ttft_ms: Sequence[str], itl_ms: Sequence[str], ttft_ms_per_1k_tokens: Sequence[str]
) -> "dict[Lane, SloTarget]":
    """The SLO targets of the lanes, with those of the options."""
    from inferry.sim.workload import SloTarget, slo_targets_for

    ttfts, itls = _parse_by_lane("--ttft-ms", ttft_ms), _parse_by_lane("--itl-ms", itl_ms)
    per_1k_tokens = _parse_by_lane("--ttft-ms-per-1k-tokens", ttft_ms_per_1k_tokens)
    return {
        lane: SloTarget(
            ttfts.get(lane, one.ttft_s),
            itls.get(lane, one.itl_s),
            per_1k_tokens.get(lane, one.ttft_s_per_1k_tokens),
        )
        for lane, one in slo_targets_for(DEFAULT_LANES).items()
    }


def _parse_by_lane(option: str, texts: Sequence[str]) -> dict[Lane, float]:
    values: dict[Lane, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            seconds = float(number) / 1000
            lanes = [Lane[name]] if name else list(Lane)
        except (KeyError, ValueError):
            fail(f"{option} must be of the form 500 or P0=500 (milliseconds); got {text!r}")
        if not 0 < seconds < inf:
            fail(f"{option} must be above 0; got {text!r}")
        values |= dict.fromkeys(lanes, seconds)
    return values


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or "\n" in text or "\r" in text:
        fail("--header must be of the form NAME=VALUE")
    return name, value


def _redacted_command() -> str:
    """The command line without keys and header values."""
    words = ["inferry", *sys.argv[1:]]
    for number, word in enumerate(words):
        option, separator, _ = word.partition("=")
        if option in _SECRET_OPTIONS and separator:
            words[number] = f"{option}=…"
        elif word in _SECRET_OPTIONS and number + 1 < len(words):
            words[number + 1] = "…"
    return shlex.join(words)


# -- running -----------------------------------------------------------------------------------------------------------


def _run(load_test: "LoadTest", key: str | None) -> "Result":
    from inferry.loadgen.load_test import run_load_test

    def measure(bar: Progress, task: TaskID, stop_by: "StopHook") -> Awaitable["Result"]:
        return run_load_test(load_test, key, ProgressBar(bar, task), stop_by)

    return run_to_end(load_test.traffic.name, measure)


def _run_sweep(load_test: "LoadTest", key: str | None, workload: WorkloadOptions) -> "SweepResult":
    from inferry.loadgen.sweep import Sweep, run_sweep

    if workload.pods is not None or workload.concurrency_cap is not None:
        fail("--sweep cannot be combined with --pods or --concurrency-cap")
    traffic = load_test.traffic
    if any((traffic.poisson_per_s, traffic.bursts, traffic.agents, traffic.scenario, traffic.trace)):
        fail("--sweep cannot be combined with --poisson, --bursts, --agents, --scenario or --trace")
    if traffic.seconds is not None and not 0 < traffic.seconds < inf:
        fail("--duration must be above 0")
    sweep = Sweep(test=load_test, levels=parse_sizes(workload.sweep or ""), min_calls=workload.level_calls)

    def measure(bar: Progress, task: TaskID, stop_by: "StopHook") -> Awaitable["SweepResult"]:
        return run_sweep(sweep, key, SweepProgressBar(bar, task), stop_by)

    return run_to_end("sweep", measure)


# -- results ----------------------------------------------------------------------------------------------------------


def _write_result(result: "Result | SweepResult", output: ResultOptions) -> None:
    from inferry.loadgen import report_page, sweep_page, sweep_result
    from inferry.loadgen.result import Result, to_json

    if isinstance(result, Result):
        files = [(output.out, to_json(result)), (output.page, report_page.html_page([result]).encode())]
    else:
        files = [
            (output.out, sweep_result.to_json(result)),
            (output.page, sweep_page.html_page(result).encode()),
            (output.csv, sweep_result.to_csv(result)),
        ]
    for path, data in files:
        if path is not None:
            write_file(path, data)


def _compare(paths: Sequence[Path], measurement: MeasurementOptions, output: ResultOptions) -> None:
    from inferry.loadgen.report_page import html_page
    from inferry.loadgen.result import InvalidResult, priced, read_results
    from inferry.loadgen.tables import cost_table, lane_table, tail_table

    costs_only = output.before_after
    price, engine = _price(measurement), _load_engine_model(measurement.model_costs)
    if len(paths) < 2 or (costs_only and len(paths) != 2):
        fail(f"{'exactly two' if costs_only else 'at least two'} results files are needed")
    try:
        results = [priced(one, price, engine) for one in read_results(paths)]
    except OSError as error:
        fail(f"cannot read {error.filename}: {error.strerror}")
    except InvalidResult as error:
        fail(str(error))
    out = console(160)
    if not costs_only:
        for table in (lane_table(results), tail_table(results)):
            out.print(rich_table(table))
            out.print()
    out.print(rich_table(cost_table(results)))
    for warning in comparison_warnings(results):
        warn(warning)
    if output.page is not None:
        write_file(output.page, html_page(results).encode())
        note(f"written to {output.page}")


if __name__ == "__main__":
    typer.run(bench)
