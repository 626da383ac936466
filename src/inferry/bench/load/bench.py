"""One bench from end to end: find the server, play the runs, make the result. The shell around it shows and writes."""

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
from inferry.adapters.workers.http1 import Client
from inferry.bench.load import figures
from inferry.bench.load.player import Limits, Player
from inferry.bench.load.requests import Prompts, RequestMaker, Telling
from inferry.bench.load.result import Result
from inferry.bench.load.rows import call_rows, run_rows
from inferry.bench.load.stream import Counters
from inferry.bench.load.target import CONNECT_TIMEOUT_S, Target, find_target
from inferry.bench.load.terms import Price, terms_of
from inferry.bench.load.traffic import Traffic, runs_of, within
from inferry.bench.target import shown
from inferry.domain.lanes import Lane
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel
from inferry.sim_setup import Promise

BEAT_S = 0.25
_PACKAGES = ("httptools", "msgspec")


class Bench(Struct, frozen=True, kw_only=True):
    """Everything that was asked for. `salt` None: one of its own, so that no cache knows the prompts."""

    url: str
    model: str | None
    traffic: Traffic
    promises: Mapping[Lane, Promise]
    telling: Telling = Telling()
    limits: Limits = Limits()
    price: Price = Price()
    engine: EngineModel | None = None
    prompts: Prompts | None = None
    max_context: int | None = None
    warmup_s: float = 0.0
    salt: str | None = None
    label: str = ""
    command: str = ""


class Progress(Struct):
    """What the shell may show while the bench runs, and how it stops it."""

    counters: Counters
    elapsed_s: float
    seconds: float
    calls: int


Watch = Callable[[Progress], None]
StopBy = Callable[[Callable[[], None]], None]


async def run_bench(bench: Bench, key: str | None, watch: Watch, stop_by: StopBy) -> Result:
    """Raises ProbeError where there is nobody to bench, and NoLoad where there is nothing to send.

    `stop_by` is given what ends the bench early; the result is then partial.
    """
    runs = runs_of(bench.traffic)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    client = Client(bench.url.rstrip("/").removesuffix("/v1"), headers, CONNECT_TIMEOUT_S)
    try:
        target = await find_target(bench.url, bench.model, key, client, bench.telling, bench.prompts)
        limits = [one for one in (bench.max_context, target.context_tokens) if one is not None]
        runs, shortened = within(runs, min(limits, default=None))
        salt = bench.salt or uuid4().hex
        requests = RequestMaker(client, target.model, target.form, bench.telling, salt)
        player = Player(client, requests, bench.limits, bench.traffic.seed)
        circumstances = await _play(player, runs, watch, stop_by)
        return _result(bench, _Sent(target, salt, runs[-1].at, shortened), player, circumstances)
    finally:
        client.close()


class _Sent(Struct, frozen=True):
    """What was sent to whom."""

    target: Target
    salt: str
    seconds: float
    shortened: int


class _Circumstances(Struct, frozen=True):
    """How the playing went."""

    started: str
    is_partial: bool
    cpu: float


async def _play(player: Player, runs: list[Run], watch: Watch, stop_by: StopBy) -> _Circumstances:
    is_partial = False

    def stop() -> None:
        nonlocal is_partial
        is_partial = True
        player.stop()

    stop_by(stop)
    seconds, calls = runs[-1].at, sum(len(run.steps) for run in runs)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def beat() -> None:
        while True:
            watch(Progress(player.counters, time.perf_counter() - player.began, seconds, calls))
            await asyncio.sleep(BEAT_S)

    gc.collect()
    gc.freeze()  # a pause for what never goes away would count as time of the server
    cpu = time.process_time()
    beating = asyncio.get_running_loop().create_task(beat())
    try:
        await player.play(runs)
    finally:
        beating.cancel()
        gc.unfreeze()
    took_s = max(time.perf_counter() - player.began, 1e-3)
    return _Circumstances(started, is_partial, (time.process_time() - cpu) / took_s)


def _result(bench: Bench, sent: _Sent, player: Player, circumstances: _Circumstances) -> Result:
    began, warmup_s = player.began, bench.warmup_s
    rows, runs = call_rows(player.calls, began, dict(bench.promises)), run_rows(player.played, began)
    span_s = max([warmup_s, *(row.ended_s for row in rows)]) - warmup_s
    gaps = figures.gaps_by_lane(player.calls, began, warmup_s, bench.promises)
    lanes = {
        lane.name: figures.lane_figures(
            [row for row in rows if row.lane == lane.name],
            [run for run in runs if run.lane == lane.name],
            bench.promises[lane],
            gaps.get(lane.name),
            warmup_s,
            span_s,
        )
        for lane in Lane
        if any(run.lane == lane.name for run in runs)
    }
    details: dict[str, str] = {}
    for call in player.calls:
        if call.detail and call.outcome not in ("done", "cancelled"):
            details.setdefault(call.outcome, call.detail)
    return Result(
        label=bench.label,
        workload=bench.traffic.name,
        command=bench.command,
        at=circumstances.started,
        partial=circumstances.is_partial,
        url=shown(bench.url),
        server=sent.target.server,
        model=sent.target.model,
        versions={
            "inferry": __version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
        settings=_settings(bench, sent),
        promises={lane.name: promise for lane, promise in bench.promises.items()},
        price=bench.price,
        engine_model=None if bench.engine is None else bench.engine.name,
        seconds=sent.seconds,
        warmup_s=warmup_s,
        wall_s=span_s + warmup_s,
        shortened=sent.shortened,
        cached_tokens="assumed" if any(call.cached is None for call in player.calls) else "reported",
        generator=figures.generator_figures(rows, circumstances.cpu),
        terms=terms_of(rows, runs, warmup_s, bench.price, bench.engine),
        lanes=lanes,
        failures=details,
        gaps=gaps,
        tokens_by_second=figures.tokens_by_second(player.calls, began),
        runs=tuple(runs),
        calls=tuple(rows),
    )


def _settings(bench: Bench, sent: _Sent) -> dict[str, Any]:
    """As plain data. Values of headers may be secrets and stay out."""
    traffic = {name: getattr(bench.traffic, name) for name in Traffic.__struct_fields__}
    traffic["trace"] = None if bench.traffic.trace is None else bench.traffic.trace.name
    traffic["lanes"] = {lane.name: part for lane, part in bench.traffic.lanes.items()}
    settings = {
        "traffic": {name: value for name, value in traffic.items() if value is not None},
        "form": sent.target.form,
        "context_tokens": sent.target.context_tokens,
        "max_context": bench.max_context,
        "limits": bench.limits,
        "lane_by": bench.telling.lane_by,
        "tenant_header": bench.telling.tenant_header,
        "run_ids": bench.telling.run_ids,
        "headers": sorted(bench.telling.headers),
        "salt": sent.salt,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain
