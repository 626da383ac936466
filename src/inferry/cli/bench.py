"""`inferry bench`: open-loop load test of a server."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferry.cli.bench_output import (
    USAGE_ERROR,
    ProgressBar,
    comparison_warnings,
    fail,
    make_progress_bar,
    note,
    rich_table,
    show_result,
    warn,
    write,
)
from inferry.cli.simulate_output import console
from inferry.domain.lanes import DEFAULT_LANES, Lane

if TYPE_CHECKING:
    from inferry.loadgen.costs import Price
    from inferry.loadgen.load_test import LoadTest
    from inferry.loadgen.result import Result
    from inferry.sim.costs import EngineModel
    from inferry.sim.workload import SloTarget

SERVER_UNREACHABLE, NO_CALL_COMPLETED, INTERRUPTED = 3, 4, 130
_SECRET_OPTIONS = ("--api-key", "--header")

ARRIVALS, SERVER, MEASURE, AFTER = "Workload", "Server", "Measurement", "Results"


def bench(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results files, for --compare or --before-after.", metavar="RESULT.json"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of the server, such as http://host:8000.", rich_help_panel=SERVER)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model name; default: the only model of the server.", metavar="NAME", rich_help_panel=SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key; default: INFERRY_API_KEY or OPENAI_API_KEY.",
            metavar="KEY",
            rich_help_panel=SERVER,
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Additional request header; may be repeated.", metavar="NAME=VALUE", rich_help_panel=SERVER),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="ids, text or chat; default: token ids if the server accepts them, else text.", rich_help_panel=SERVER
        ),
    ] = None,
    lane_by: Annotated[
        str,
        typer.Option(
            help="How the lane is sent: header (x-inferry-lane), priority (vLLM's field) or none.",
            rich_help_panel=SERVER,
        ),
    ] = "header",
    tenant_header: Annotated[
        str, typer.Option(help="Header for the tenant; empty: none.", rich_help_panel=SERVER)
    ] = "x-inferry-tenant",
    run_ids: Annotated[
        bool,
        typer.Option(
            "--run-ids/--no-run-ids",
            help="Send x-inferry-run-id and x-inferry-step-id.",
            rich_help_panel=SERVER,
        ),
    ] = True,
    poisson: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals, RATE calls per second.", metavar="RATE", rich_help_panel=ARRIVALS),
    ] = None,
    bursts: Annotated[
        str | None,
        typer.Option(
            help="CALLS per burst, PERIOD between bursts, DURATION of a burst (seconds): 40,10,1.",
            metavar="CALLS,PERIOD,DURATION",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    agents: Annotated[
        str | None,
        typer.Option(
            help="COUNT runs of STEPS sequential calls with tool time between them (seconds): 20,6,0.1-2.",
            metavar="COUNT,STEPS[,TOOL_S]",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="harbor or simple-harbor, as in `inferry simulate`.", rich_help_panel=ARRIVALS)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded trace, CSV or JSON lines.", metavar="FILE", rich_help_panel=ARRIVALS),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which runs start; default: 60, or the length of the trace. All runs then complete.",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor on the load.", rich_help_panel=ARRIVALS)] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same calls.", rich_help_panel=ARRIVALS)] = 7,
    digests: Annotated[
        int, typer.Option(min=0, help="Batch jobs at the start of the scenario.", rich_help_panel=ARRIVALS)
    ] = 300,
    lane: Annotated[
        str,
        typer.Option(
            help="Lane of runs without one, or fractions drawn by seed: P0=0.2,P1=0.5,P2=0.3.",
            rich_help_panel=ARRIVALS,
        ),
    ] = "P1",
    tenants: Annotated[str, typer.Option(help="Tenants, drawn by seed: a,b,c.", rich_help_panel=ARRIVALS)] = "bench",
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Prompt tokens per call, if the workload has none.", metavar="FROM-TO", rich_help_panel=ARRIVALS
        ),
    ] = "200-2000",
    output_tokens: Annotated[
        str,
        typer.Option(
            help="Output tokens per call, if the workload has none.", metavar="FROM-TO", rich_help_panel=ARRIVALS
        ),
    ] = "20-200",
    session_gap_s: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between sessions of a trace without times.", rich_help_panel=ARRIVALS),
    ] = 1.0,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=16, help="Cut prompts to this context length; default: the model's.", rich_help_panel=ARRIVALS
        ),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Salt of the prompts; default: a random one, so that no cache contains them.", rich_help_panel=ARRIVALS
        ),
    ] = None,
    pods: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Closed loop: runs are divided among PODS pods, and a pod sends one call at a time.",
            metavar="PODS",
            rich_help_panel=ARRIVALS,
        ),
    ] = None,
    concurrency_cap: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum calls in flight; default: no limit.", rich_help_panel=ARRIVALS),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            help="Retries after 408, 409, 429, 5xx or a reset before the first byte, as in the official SDKs.",
            rich_help_panel=ARRIVALS,
        ),
    ] = 2,
    call_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a call counts as failed.", rich_help_panel=ARRIVALS)
    ] = 300.0,
    warmup: Annotated[
        float, typer.Option(min=0.0, help="Seconds at the start whose calls do not count.", rich_help_panel=MEASURE)
    ] = 0.0,
    ttft_ms: Annotated[
        list[str] | None,
        typer.Option(
            help="TTFT target of one lane (P0=500) or all; default: the lanes' targets.",
            metavar="[LANE=]MS",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    itl_ms: Annotated[
        list[str] | None,
        typer.Option(help="ITL target, in the same form.", metavar="[LANE=]MS", rich_help_panel=MEASURE),
    ] = None,
    gpu_cost_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Price of a GPU-hour, for the cost per run.", rich_help_panel=MEASURE)
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.", rich_help_panel=MEASURE)] = 1,
    run_budget: Annotated[float | None, typer.Option(min=0.0, help="Budget of a run.", rich_help_panel=MEASURE)] = None,
    model_costs: Annotated[
        Path | None,
        typer.Option(
            help="Engine model for utilisation and work: a file of `inferry calibrate`, or a shipped name.",
            metavar="MODEL.json",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="Name of this result in comparisons.", rich_help_panel=AFTER)] = "",
    out: Annotated[
        Path | None, typer.Option(help="Write the result to this file.", metavar="RESULT.json", rich_help_panel=AFTER)
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write an HTML report with plots.", metavar="FILE", rich_help_panel=AFTER),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare results files; sends nothing.", rich_help_panel=AFTER)
    ] = False,
    before_after: Annotated[
        bool,
        typer.Option(
            "--before-after",
            help="Compare two results files by utilisation, step latency, cost and budget; sends nothing.",
            rich_help_panel=AFTER,
        ),
    ] = False,
) -> None:
    """Load-test any OpenAI-compatible server, open loop, and measure what clients see."""
    from inferry.loadgen.costs import Price
    from inferry.loadgen.load_generator import ClientLimits
    from inferry.loadgen.load_test import LoadTest
    from inferry.loadgen.requests import RequestMetadata
    from inferry.loadgen.traffic import (
        EmptyLoad,
        TrafficOptions,
        parse_agents,
        parse_bursts,
        parse_lane_shares,
        parse_range,
    )

    for path in (out, page):
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"no such directory: {path.absolute().parent}", USAGE_ERROR)
    price = Price(gpu_per_hour=gpu_cost_per_hour, gpus=gpus, run_budget=run_budget)
    engine = _load_engine_model(model_costs)
    if compare or before_after:
        if url is not None:
            fail("--url cannot be combined with --compare or --before-after", USAGE_ERROR)
        _compare(results or [], price, engine, page, costs_only=before_after)
        return
    if results:
        fail("results files need --compare or --before-after", USAGE_ERROR)
    if url is None or not url.startswith(("http://", "https://")):
        fail(f"--url must be of the form http://HOST:PORT; got {url or 'none'}", USAGE_ERROR)
    if lane_by not in ("header", "priority", "none"):
        fail(f"--lane-by must be header, priority or none; got {lane_by!r}", USAGE_ERROR)
    if prompts not in (None, "ids", "text", "chat"):
        fail(f"--prompts must be ids, text or chat; got {prompts!r}", USAGE_ERROR)
    try:
        load_test = LoadTest(
            url=url,
            model=model,
            traffic=TrafficOptions(
                poisson_per_s=poisson,
                bursts=None if bursts is None else parse_bursts(bursts),
                agents=None if agents is None else parse_agents(agents),
                scenario=scenario,
                trace=trace,
                seconds=duration,
                seed=seed,
                scale=scale,
                digests=digests,
                lanes=parse_lane_shares(lane),
                prompt_tokens=parse_range("--prompt-tokens", prompt_tokens),
                output_tokens=parse_range("--output-tokens", output_tokens),
                tenants=tuple(filter(None, tenants.split(","))) or ("bench",),
                session_gap_s=session_gap_s,
            ),
            slo_targets=_slo_targets(ttft_ms or [], itl_ms or []),
            request_metadata=RequestMetadata(
                lane_by=lane_by,  # type: ignore[arg-type]
                tenant_header=tenant_header or None,
                run_ids=run_ids,
                headers=dict(map(_header, header or [])),
            ),
            limits=ClientLimits(
                retries=retries, concurrency_cap=concurrency_cap, pods=pods, call_timeout_s=call_timeout_s
            ),
            price=price,
            engine=engine,
            prompts=prompts,  # type: ignore[arg-type]
            max_context=max_context,
            warmup_s=warmup,
            salt=salt,
            label=label,
            command=_redacted_command(),
        )
        key = api_key or os.environ.get("INFERRY_API_KEY") or os.environ.get("OPENAI_API_KEY")
        result = _run(load_test, key)
    except EmptyLoad as error:
        fail(str(error), USAGE_ERROR)
    _write_result(result, out, page)
    show_result(result)
    for path in (out, page):
        if path is not None:
            note(f"written to {path}")
    if result.partial:
        raise typer.Exit(INTERRUPTED)
    if not result.done:
        fail("no call was answered", NO_CALL_COMPLETED)


# -- options -----------------------------------------------------------------------------------------------------------


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
        fail(str(error), USAGE_ERROR)


def _slo_targets(ttft_ms: Sequence[str], itl_ms: Sequence[str]) -> "dict[Lane, SloTarget]":
    """The SLO targets of the lanes, with those of the options."""
    from inferry.sim.workload import SloTarget, slo_targets_for

    ttfts, itls = _parse_by_lane("--ttft-ms", ttft_ms), _parse_by_lane("--itl-ms", itl_ms)
    return {
        lane: SloTarget(ttfts.get(lane, one.ttft_s), itls.get(lane, one.itl_s))
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
            fail(f"{option} must be of the form 500 or P0=500 (milliseconds); got {text!r}", USAGE_ERROR)
        if not 0 < seconds < inf:
            fail(f"{option} must be above 0; got {text!r}", USAGE_ERROR)
        values |= dict.fromkeys(lanes, seconds)
    return values


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or "\n" in text or "\r" in text:
        fail("--header must be of the form NAME=VALUE", USAGE_ERROR)
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
    from inferry.ingress.http.lifecycle import raise_file_limit
    from inferry.loadgen.load_test import run_load_test
    from inferry.loadgen.server import ProbeError

    raise_file_limit()
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not available on Windows
        import uvloop

        new_loop = uvloop.new_event_loop
    with make_progress_bar() as bar:
        task = bar.add_task(load_test.traffic.name, total=None, said="querying the server")
        bar.refresh()
        progress = ProgressBar(bar, task)

        async def main() -> "Result":
            loop = asyncio.get_running_loop()

            def stop_by(stop: Callable[[], None]) -> None:
                for number in (signal.SIGINT, signal.SIGTERM):
                    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not the main thread
                        loop.add_signal_handler(number, stop)

            return await run_load_test(load_test, key, progress, stop_by)

        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(main())
        except ProbeError as error:
            bar.stop()
            fail(str(error), SERVER_UNREACHABLE)
        except KeyboardInterrupt:
            bar.stop()
            fail("interrupted before the first call", INTERRUPTED)


# -- results ----------------------------------------------------------------------------------------------------------


def _write_result(result: "Result", out: Path | None, page: Path | None) -> None:
    from inferry.loadgen.html_report import html_page
    from inferry.loadgen.result import to_json

    if out is not None:
        write(out, to_json(result))
    if page is not None:
        write(page, html_page([result]).encode())


def _compare(
    paths: Sequence[Path], price: "Price", engine: "EngineModel | None", page: Path | None, *, costs_only: bool
) -> None:
    from inferry.loadgen.html_report import html_page
    from inferry.loadgen.result import InvalidResult, priced, read_results
    from inferry.loadgen.tables import cost_table, lane_table

    if len(paths) < 2 or (costs_only and len(paths) != 2):
        fail(f"{'exactly two' if costs_only else 'at least two'} results files are needed", USAGE_ERROR)
    try:
        results = [priced(one, price, engine) for one in read_results(paths)]
    except OSError as error:
        fail(f"cannot read {error.filename}: {error.strerror}", USAGE_ERROR)
    except InvalidResult as error:
        fail(str(error), USAGE_ERROR)
    out = console(160)
    if not costs_only:
        out.print(rich_table(lane_table(results)))
        out.print()
    out.print(rich_table(cost_table(results)))
    for warning in comparison_warnings(results):
        warn(warning)
    if page is not None:
        write(page, html_page(results).encode())
        note(f"written to {page}")


if __name__ == "__main__":
    typer.run(bench)
