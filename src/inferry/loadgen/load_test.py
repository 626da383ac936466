"""One load test: find the server, play the runs, make the result. The CLI shows and writes it."""

import asyncio
import gc
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct

from inferry._version import __version__
from inferry.domain.lanes import Lane
from inferry.loadgen import figures
from inferry.loadgen.costs import Price, compute_costs
from inferry.loadgen.load_generator import ClientLimits, LoadGenerator
from inferry.loadgen.requests import Prompts, RequestMaker, RequestMetadata
from inferry.loadgen.result import Result
from inferry.loadgen.rows import call_rows, run_rows
from inferry.loadgen.server import redacted_url
from inferry.loadgen.stream import Counters
from inferry.loadgen.target import Target, open_target
from inferry.loadgen.traffic import TrafficOptions, fit_to_context, make_runs
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel
from inferry.sim.workload import SloTarget

PROGRESS_INTERVAL_S = 0.25
_PACKAGES = ("httptools", "msgspec")


class LoadTest(Struct, frozen=True, kw_only=True):
    """The options of a load test. `salt` None: a random one, so that no cache contains the prompts."""

    url: str
    model: str | None
    traffic: TrafficOptions
    slo_targets: Mapping[Lane, SloTarget]
    request_metadata: RequestMetadata = RequestMetadata()
    limits: ClientLimits = ClientLimits()
    price: Price = Price()
    engine: EngineModel | None = None
    prompts: Prompts | None = None
    max_context: int | None = None
    warmup_s: float = 0.0
    salt: str | None = None
    label: str = ""
    command: str = ""


class Progress(Struct):
    """Progress of a running load test."""

    counters: Counters
    elapsed_s: float
    seconds: float
    calls: int


OnProgress = Callable[[Progress], None]
StopHook = Callable[[Callable[[], None]], None]


async def run_load_test(bench: LoadTest, key: str | None, on_progress: OnProgress, install_stop: StopHook) -> Result:
    """Raises ProbeError if the server cannot be used, and EmptyLoad if there is no call to send.

    `install_stop` gets the function that stops the load test early; the result is then partial.
    """
    runs = make_runs(bench.traffic)
    async with open_target(bench.url, bench.model, key, bench.request_metadata, bench.prompts) as (client, target):
        runs, shortened = fit_to_context(runs, context_limit(bench, target))
        salt = bench.salt or uuid4().hex
        requests = RequestMaker(client, target.model, target.form, bench.request_metadata, salt)
        load_generator = LoadGenerator(client, requests, bench.limits, bench.traffic.seed)
        conditions = await _play(load_generator, runs, on_progress, install_stop)
        return _result(bench, _SentLoad(target, salt, runs[-1].at, shortened), load_generator, conditions)


def context_limit(bench: LoadTest, target: Target) -> int | None:
    """Most tokens of a call, by the option and by the model. None: not known."""
    return min((one for one in (bench.max_context, target.context_tokens) if one is not None), default=None)


class _SentLoad(Struct, frozen=True):
    """The target and the load that was sent."""

    target: Target
    salt: str
    seconds: float
    shortened: int


class _RunConditions(Struct, frozen=True):
    """Conditions of the run on the client."""

    started: str
    is_partial: bool
    cpu: float


async def _play(
    load_generator: LoadGenerator, runs: list[Run], on_progress: OnProgress, install_stop: StopHook
) -> _RunConditions:
    is_partial = False

    def stop() -> None:
        nonlocal is_partial
        is_partial = True
        load_generator.stop()

    install_stop(stop)
    seconds, calls = runs[-1].at, sum(len(run.steps) for run in runs)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def report_progress() -> None:
        while True:
            on_progress(Progress(load_generator.counters, time.perf_counter() - load_generator.began, seconds, calls))
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    gc.collect()
    gc.freeze()  # a garbage collection of long-lived objects would count as server time
    cpu = time.process_time()
    progress_timer = asyncio.get_running_loop().create_task(report_progress())
    try:
        await load_generator.play(runs)
    finally:
        progress_timer.cancel()
        gc.unfreeze()
    duration_s = max(time.perf_counter() - load_generator.began, 1e-3)
    return _RunConditions(started, is_partial, (time.process_time() - cpu) / duration_s)


def _result(bench: LoadTest, sent: _SentLoad, load_generator: LoadGenerator, conditions: _RunConditions) -> Result:
    began, warmup_s = load_generator.began, bench.warmup_s
    rows, runs = (
        call_rows(load_generator.calls, began, dict(bench.slo_targets)),
        run_rows(load_generator.run_records, began),
    )
    span_s = max([warmup_s, *(row.ended_s for row in rows)]) - warmup_s
    itls = figures.itls_by_lane(load_generator.calls, began, warmup_s, bench.slo_targets)
    lanes = {
        lane.name: figures.lane_figures(
            [row for row in rows if row.lane == lane.name],
            [run for run in runs if run.lane == lane.name],
            bench.slo_targets[lane],
            itls.get(lane.name),
            warmup_s,
            span_s,
        )
        for lane in Lane
        if any(run.lane == lane.name for run in runs)
    }
    details: dict[str, str] = {}
    for call in load_generator.calls:
        if call.detail and call.outcome not in ("done", "cancelled"):
            details.setdefault(call.outcome, call.detail)
    return Result(
        label=bench.label,
        workload=bench.traffic.name,
        command=bench.command,
        at=conditions.started,
        partial=conditions.is_partial,
        url=redacted_url(bench.url),
        server=sent.target.server,
        model=sent.target.model,
        versions=client_versions(),
        settings=plain_settings(bench, sent.target, sent.salt),
        slo_targets={lane.name: slo_target for lane, slo_target in bench.slo_targets.items()},
        price=bench.price,
        engine_model=None if bench.engine is None else bench.engine.name,
        seconds=sent.seconds,
        warmup_s=warmup_s,
        wall_s=span_s + warmup_s,
        shortened=sent.shortened,
        cached_tokens="assumed" if any(call.cached is None for call in load_generator.calls) else "reported",
        generator=figures.generator_figures(rows, conditions.cpu),
        cost_figures=compute_costs(rows, runs, warmup_s, bench.price, bench.engine),
        lanes=lanes,
        failures=details,
        itls=itls,
        tokens_by_second=figures.tokens_by_second(load_generator.calls, began),
        runs=tuple(runs),
        calls=tuple(rows),
    )


def client_versions() -> dict[str, str | None]:
    return {
        "inferry": __version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def plain_settings(bench: LoadTest, target: Target, salt: str) -> dict[str, Any]:
    """The options as plain data, without header values, which may be secrets."""
    traffic = {name: getattr(bench.traffic, name) for name in TrafficOptions.__struct_fields__}
    traffic["trace"] = None if bench.traffic.trace is None else bench.traffic.trace.name
    traffic["lanes"] = {lane.name: part for lane, part in bench.traffic.lanes.items()}
    settings = {
        "traffic": {name: value for name, value in traffic.items() if value is not None},
        "form": target.form,
        "context_tokens": target.context_tokens,
        "max_context": bench.max_context,
        "limits": bench.limits,
        "lane_by": bench.request_metadata.lane_by,
        "tenant_header": bench.request_metadata.tenant_header,
        "run_ids": bench.request_metadata.run_ids,
        "headers": sorted(bench.request_metadata.headers),
        "salt": salt,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain
