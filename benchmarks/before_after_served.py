"""Benchmarks of two commits through a running gateway. The clients are those of today, for both."""

import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import lanes, overload, path, runs, streams
from benchmarks.comparison import Figure, Tree
from benchmarks.serving import run_gateway
from benchmarks.tools import build_tools

Trees = tuple[Tree, Tree]
"""Before and after."""
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]
Found = dict[tuple[str, str], list[path.Run]]
Round = Callable[[int, int, int], Coroutine[Any, Any, dict[str, Any]]]
"""One round on the gateway with this port and process id."""
ARMS = ("before", "after")

PATH_SECONDS, PACED_SECONDS = 0.8, 3.0
CORES_FOR_TWO_GATEWAYS = 4


def path_figures(trees: Trees, rounds: int) -> list[Figure]:
    """The cost of a call, without limits and with all of them, and of an event. The third section has everything on in
    the later commit, beside the limits of the earlier one: what all that has been added costs an operator who uses it.
    """
    with tempfile.TemporaryDirectory() as name:
        tools = build_tools(Path(name))
        bodies = path.write_bodies(tools.directory)
        loads = {
            case: path.load_with(tools, bodies[body], connections, PATH_SECONDS)
            for case, (body, connections) in path.CASES.items()
        }
        figures = []
        with ExitStack() as stack:
            backend = stack.enter_context(path.run_backend(tools, 0))
            config = path.config_for_backend(backend)
            arms = _gateways(stack, trees, config)
            figures += _path_rows(path.alternate(arms, loads, rounds), loads, "")
            arms = [
                stack.enter_context(path.run_limited(name, config, tree.package))
                for name, tree in zip(ARMS, trees, strict=True)
            ]
            limited = {case: loads[case] for case in ("c32", "c32_stream")}
            figures += _path_rows(path.alternate(arms, limited, rounds), limited, ", key and every limit")
            arms[1] = stack.enter_context(path.run_with_everything(config, backend, ARMS[1], trees[1].package))
            whole = {case: loads[case] for case in ("c1", "c32", "c32_stream")}
            figures += _path_rows(path.alternate(arms, whole, rounds), whole, ", everything on, beside limits alone")
        with ExitStack() as stack:
            config = path.config_for_backend(stack.enter_context(path.run_backend(tools, path.ITL_US)))
            paced = path.load_with(tools, bodies["stream"], path.STREAMS, PACED_SECONDS)
            found = path.alternate(_gateways(stack, trees, config), {"paced": paced}, max(2, rounds // 3))
            before, after = (
                [1e6 * run["cpu_s"] / (run["events_per_s"] * run["wall_s"]) for run in found[arm, "paced"]]
                for arm in ARMS
            )
            figures.append(Figure(f"{path.STREAMS} streams: CPU us per event", before, after))
    return figures


def _gateways(stack: ExitStack, trees: Trees, config: dict[str, Any]) -> list[path.Arm]:
    return [
        path.Arm(name, *stack.enter_context(run_gateway(config, core=path.GATEWAY_CORE, package=tree.package)))
        for name, tree in zip(ARMS, trees, strict=True)
    ]


def _path_rows(found: Found, loads: Iterable[str], suffix: str) -> list[Figure]:
    def row(case: str, name: str, of: Callable[[path.Run], float], higher_is_better: bool = False) -> Figure:
        before, after = ([of(run) for run in found[arm, case]] for arm in ARMS)
        return Figure(f"{case}{suffix}: {name}", before, after, higher_is_better)

    errors = sum(run["errors"] + run["non200"] for measured in found.values() for run in measured)
    if errors:
        raise RuntimeError(f"{errors:.0f} calls failed")
    return [
        figure
        for case in loads
        for figure in (
            row(case, "requests per s", lambda run: run["rps"], higher_is_better=True),
            row(case, "CPU us per request", lambda run: 1e6 * run["cpu_s"] / max(1, run["n"])),
        )
    ]


def streams_figures(trees: Trees, rounds: int) -> list[Figure]:
    """5,000 open streams through a fresh gateway of either commit, at once where there are enough cores."""
    at_once = (os.cpu_count() or 1) >= CORES_FOR_TWO_GATEWAYS
    pairs: Pairs = []
    for number in range(rounds):
        # Either commit has either pair of cores in turn, or goes first in turn.
        order = trees if number % 2 == 0 else trees[::-1]
        with ThreadPoolExecutor(2 if at_once else 1) as threads:
            cores = ((0, 1), (2, 3)) if at_once else ((0, 1), (0, 1))
            found = list(threads.map(_streams_through, order, cores))
        pairs.append((found[0], found[1]) if number % 2 == 0 else (found[1], found[0]))
    if any(report["streams_lost"] for pair in pairs for report in pair):
        raise RuntimeError("streams were lost")
    return [
        _figure(pairs, "kB per stream", lambda one: (one["rss_open"] - one["rss_before"]) / streams.STREAMS / 1000),
        _figure(pairs, "CPU us per event", lambda one: 1000 * _window(one, "server_ran") / _window(one, "events")),
        _figure(pairs, "ITL p50 ms", lambda one: _window(one, "p50")),
        _figure(pairs, "ITL p99 ms", lambda one: _window(one, "p99")),
        _figure(pairs, "ITL p99 ms beside a slow reader", lambda one: _window(one, "p99", "slow_reader")),
    ]


def _streams_through(tree: Tree, cores: tuple[int, int]) -> dict[str, Any]:
    gateway_core, load_core = cores
    with ExitStack() as stack:
        source_port, _ = stack.enter_context(streams.run_source(load_core))
        config = streams.config_for_source(source_port)
        port, gateway = stack.enter_context(run_gateway(config, core=gateway_core, package=tree.package))
        streams.warm_up(port, gateway.pid, load_core)
        return streams.read(port, streams.STREAMS, gateway.pid, blocks=1, core=load_core)


def _window(report: dict[str, Any], name: str, kind: str = "alone") -> float:
    values: list[float] = [block[kind][name] for block in report["blocks"]]
    return statistics.median(values)


def lanes_figures(trees: Trees, rounds: int) -> list[Figure]:
    """First-token times of live calls, idle and beside a batch backlog. Both gateways run; one is in use at a time."""

    async def one_round(number: int, port: int, _pid: int) -> dict[str, Any]:
        async with _client(port) as http:
            idle, loaded, _ = await lanes.live_ttft_ms(http, random.Random(number))
        return {"idle": idle, "loaded": loaded}

    pairs = _in_turn(trees, lanes.CONFIG, one_round, rounds)
    return [
        _figure(pairs, f"TTFT {name} ms, {title}", partial(_of_times, kind, of))
        for kind, title in (("idle", "idle"), ("loaded", f"{lanes.QUEUED} batch jobs queued"))
        for name, of in (("p50", statistics.median), ("p95", lanes.p95))
    ]


def _of_times(kind: str, of: Callable[[list[float]], float], report: dict[str, Any]) -> float:
    return of(report[kind])


def runs_figures(trees: Trees, rounds: int) -> list[Figure]:
    """Time to cancel a run with 64 running and 1,000 queued steps."""

    async def one_round(number: int, port: int, pid: int) -> dict[str, Any]:
        async with runs.Canceller(port) as canceller, _client(port) as http:
            return await runs.cancel_run(http, canceller, pid, number, runs.RUNNING, runs.QUEUED)

    pairs = _in_turn(trees, {"workers": [runs.worker_for(runs.RUNNING)]}, one_round, rounds)
    for name in ("unconfirmed", "not_cancelled", "others_disturbed"):
        if any(report[name] for pair in pairs for report in pair):
            raise RuntimeError(f"{name}: {[(before[name], after[name]) for before, after in pairs]}")
    names = ("answer_ms", "took_ms", "gateway_worked_until_all_told_ms", "last_client_told_ms")
    return [_figure(pairs, name, itemgetter(name)) for name in names]


def overload_figures(trees: Trees, rounds: int) -> list[Figure]:
    """Three times the capacity for 30 s. Takes over two minutes of real time, so all seeds run at once."""
    before, after = trees
    packages = {"before": before.package, "after": after.package}
    with ThreadPoolExecutor(rounds) as threads:
        blocks = list(
            threads.map(lambda seed: overload.play(seed, {"before": {}, "after": {}}, packages), range(rounds))
        )
    pairs = [(block["before"], block["after"]) for block in blocks]
    share_names = ("goodput_in_pulse", "live_attainment_before", "live_attainment_in_pulse", "live_attainment_after")
    return [
        _figure(pairs, "calls without error", lambda one: 1 - one["errors"] / one["calls"], higher_is_better=True),
        _figure(pairs, "answers in time", lambda one: one["answers_in_time"] / one["calls"], higher_is_better=True),
        *(_figure(pairs, name, itemgetter(name), higher_is_better=True) for name in share_names),
        _figure(pairs, "attempts per answer", lambda one: one["attempts_per_answer"]),
        _figure(pairs, "gateway CPU s", lambda one: one["gateway_cpu_s"]),
    ]


def _in_turn(trees: Trees, config: dict[str, Any], one_round: Round, rounds: int) -> Pairs:
    """Both gateways with the embedded engine, measured in turn. The first round is warm-up."""
    pairs: Pairs = []
    with ExitStack() as stack:
        served = [stack.enter_context(run_gateway(config, package=tree.package)) for tree in trees]
        for number in range(rounds + 1):
            found: dict[int, dict[str, Any]] = {}
            for which in (0, 1) if number % 2 else (1, 0):
                port, process = served[which]
                found[which] = asyncio.run(one_round(number, port, process.pid))
            if number:
                pairs.append((found[0], found[1]))
    return pairs


@asynccontextmanager
async def _client(port: int) -> AsyncIterator[aiohttp.ClientSession]:
    url, connector = f"http://127.0.0.1:{port}", aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        yield http


def _figure(pairs: Pairs, name: str, of: Callable[[dict[str, Any]], float], higher_is_better: bool = False) -> Figure:
    return Figure(name, [of(before) for before, _ in pairs], [of(after) for _, after in pairs], higher_is_better)
