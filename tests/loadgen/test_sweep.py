"""`inferry bench --sweep`: closed loop over concurrency, in virtual time."""

import asyncio
import csv
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from inferry.cli.formats import parse_sizes
from inferry.cli.main import app
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.loadgen import gpu_utilisation
from inferry.loadgen.gpu_utilisation import GpuSource, GpuWatch, find_source, mean_utilisation
from inferry.loadgen.load_test import LoadTest
from inferry.loadgen.server import Server
from inferry.loadgen.sweep import Sweep, SweepProgress, run_sweep
from inferry.loadgen.sweep_page import findings, html_page
from inferry.loadgen.sweep_result import (
    LevelFigures,
    SweepResult,
    level_figures,
    percentiles,
    saturated_at,
    to_csv,
    ttft_missed_at,
)
from inferry.loadgen.traffic import TrafficOptions
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.workload import SloTarget
from loadgen.load_test_server import PROMISES, Script, answer, calls_of, is_trial
from support.children import environment
from support.simulated_engine_server import EngineServer, RealTimeEngine, VirtualEngineServer
from support.upstream import Upstream
from support.virtual_net import run_virtual_net

SHORT = TrafficOptions(seconds=4.0, prompt_tokens=(20, 40), output_tokens=(4, 4))
TOKEN_S = 0.1
METRICS = f"# TYPE {gpu_utilisation.METRIC} gauge\n{gpu_utilisation.METRIC}"


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferry.loadgen.gpu_utilisation.shutil.which", lambda _: None)


class Slots:
    """A server that answers this many calls at once, four tokens each; `most` were in progress at once."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._open = 0
        self.most: list[int] = []

    async def __call__(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self._open += 1
        self.most.append(self._open)
        try:
            async with self._free:
                return await answer(request, body, TOKEN_S)
        finally:
            self._open -= 1


def swept(
    script: Script,
    levels: tuple[int, ...],
    *,
    progress: Callable[[SweepProgress], None] = lambda _: None,
    metrics: str | None = None,
    min_calls: int = 4,
    traffic: TrafficOptions = SHORT,
    **more: Any,
) -> tuple[SweepResult, Upstream]:
    async def main() -> tuple[SweepResult, Upstream]:
        async with Upstream(script) as upstream:
            upstream.metrics_page = metrics
            test = LoadTest(url=upstream.url, model="m", traffic=traffic, **{"slo_targets": PROMISES, **more})
            sweep = Sweep(test=test, levels=levels, min_calls=min_calls)
            return await run_sweep(sweep, None, progress, lambda _: None), upstream

    return run_virtual_net(main())


# -- levels ------------------------------------------------------------------------------------------------------------


def test_levels_are_listed_or_doubled() -> None:
    assert parse_sizes("1,2,5") == (1, 2, 5)
    assert parse_sizes("1..128") == (1, 2, 4, 8, 16, 32, 64, 128)
    assert parse_sizes("3..10") == (3, 6, 10)
    assert parse_sizes("8") == parse_sizes("8..8") == (8,)


@pytest.mark.parametrize("text", ["", "x", "1,,2", "0,1", "4,2", "2,2", "8..1", "0..8", "1..x", "1..100000"])
def test_other_levels_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="sizes"):
        parse_sizes(text)


# -- what is sent and measured -----------------------------------------------------------------------------------------


def test_each_level_has_exactly_its_concurrency_and_its_own_figures() -> None:
    script = Slots(100)
    result, upstream = swept(script, (1, 4))
    assert [level.concurrency for level in result.levels] == [1, 4]
    assert max(script.most) == 4
    one, four = result.levels
    assert one.output_tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.02)
    assert four.output_tokens_per_s == pytest.approx(4 / TOKEN_S, rel=0.02)
    assert four.calls_per_s == pytest.approx(1 / TOKEN_S, rel=0.02)
    assert one.e2e is not None
    assert one.e2e.p50 == one.e2e.max == pytest.approx(4 * TOKEN_S)
    assert one.itl is not None
    assert one.itl.p999 == pytest.approx(TOKEN_S)
    prompts = [json.dumps(body["prompt"]) for body, _ in calls_of(upstream)]
    assert len(set(prompts)) == len(prompts)


def test_the_first_calls_of_a_level_and_its_warm_up_do_not_count() -> None:
    first: dict[str, bool] = {}

    async def slow_start(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        level = request.headers["x-inferry-run-id"].split("-")[-2]
        if not is_trial(request) and not first.get(level):
            first[level] = True
            await asyncio.sleep(3.0)
        return await answer(request, body, TOKEN_S)

    result, _ = swept(slow_start, (1, 2))
    assert [level.ttft and level.ttft.max < 1.0 for level in result.levels] == [True, True]
    warm, _ = swept(Slots(9), (1,), warmup_s=2.0)
    cold, _ = swept(Slots(9), (1,))
    assert warm.levels[0].seconds == cold.levels[0].seconds == pytest.approx(4.0, abs=0.1)


def test_a_level_lasts_until_enough_calls_have_ended() -> None:
    result, _ = swept(Slots(9), (2,), min_calls=30)
    level = result.levels[0]
    assert level.calls >= 30
    assert level.seconds == pytest.approx(30 / 2 * 4 * TOKEN_S, abs=4 * TOKEN_S)


def test_a_saturated_server_shows_its_knee_and_the_missed_target() -> None:
    targets = dict.fromkeys(Lane, SloTarget(0.5, 10.0))
    result, _ = swept(Slots(2), (1, 2, 4, 8), slo_targets=targets)
    assert (result.saturated_at, result.ttft_missed_at) == (2, 8)
    said = " ".join(findings(result))
    assert "Knee: concurrency 2" in said
    assert "first missed at p95 at concurrency 8" in said
    growing, _ = swept(Slots(100), (1, 2, 4), slo_targets=targets)
    assert (growing.saturated_at, growing.ttft_missed_at) == (None, None)
    assert "the knee is beyond the sweep" in " ".join(findings(growing))


def test_a_sweep_measures_one_lane_and_cuts_prompts_to_the_context() -> None:
    result, upstream = swept(Slots(9), (1,), traffic=replace(SHORT, lanes={Lane.P0: 1.0}), max_context=24)
    assert result.lane == "P0"
    sent = calls_of(upstream)
    assert {headers["x-inferry-lane"] for _, headers in sent} == {"P0"}
    assert max(len(body["prompt"]) for body, _ in sent) == 20
    with pytest.raises(BaseException, match="one lane"):
        swept(Slots(9), (1,), traffic=replace(SHORT, lanes={Lane.P0: 0.5, Lane.P1: 0.5}))


def test_a_level_without_an_answer_ends_the_sweep_and_is_not_flooded() -> None:
    async def refuses(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_trial(request):
            return await answer(request, body)
        return web.json_response({"error": {"message": "the model is asleep"}}, status=404)

    result, upstream = swept(refuses, (1, 2, 4))
    assert [level.concurrency for level in result.levels] == [1]
    assert (result.levels[0].done, result.done, result.levels[0].ttft) == (0, 0, None)
    assert list(result.failures.values()) == ["the model is asleep"]
    assert len(upstream.bodies) < 20
    assert "the model is asleep" in html_page(result)


def test_a_stopped_sweep_keeps_what_was_measured() -> None:
    async def main() -> SweepResult:
        async with Upstream(Slots(100)) as upstream:
            stops: list[Callable[[], None]] = []

            def stop_in_second_level(now: SweepProgress) -> None:
                if now.number == 2 and now.progress.elapsed_s > 2:
                    stops[0]()

            test = LoadTest(url=upstream.url, model="m", traffic=SHORT, slo_targets=PROMISES)
            sweep = Sweep(test=test, levels=(1, 2, 4), min_calls=4)
            return await run_sweep(sweep, None, stop_in_second_level, stops.append)

    result = run_virtual_net(main())
    assert result.partial
    assert [(level.concurrency, level.partial) for level in result.levels] == [(1, False), (2, True)]
    assert result.levels[1].failed == 0
    assert result.levels[1].output_tokens_per_s == pytest.approx(2 / TOKEN_S, rel=0.1)


# -- GPU utilisation ---------------------------------------------------------------------------------------------------


def test_gpu_utilisation_is_read_from_the_gateways_metrics() -> None:
    page = f'{METRICS}{{worker="a"}} 0.5\n{gpu_utilisation.METRIC}{{worker="b"}} 1.0\nother 7\n'
    result, _ = swept(Slots(9), (1,), metrics=page, traffic=replace(SHORT, seconds=8.0))
    assert result.levels[0].gpu_utilisation == 0.75
    assert result.gpu_source == f"metric {gpu_utilisation.METRIC}"
    assert "75%" in html_page(result)


def test_gpu_utilisation_that_is_not_measured_is_said() -> None:
    result, _ = swept(Slots(9), (1,), metrics="other 1\n")
    assert result.levels[0].gpu_utilisation is None
    assert "GPU utilisation: not measured." in findings(result)
    assert ">not measured<" in html_page(result)
    assert mean_utilisation(METRICS.splitlines()[0]) is None


def test_nvidia_smi_is_read_for_a_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '20\\n60\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr("inferry.loadgen.gpu_utilisation.shutil.which", lambda _: str(program))

    async def main() -> tuple[float | None, GpuSource | None]:
        async with Upstream(Slots(1)) as upstream:
            upstream.metrics_page = ""
            server = Server(upstream.url)
            source = await find_source(upstream.url, server)
            elsewhere = await find_source("http://gpu.example:8000", server)
            server.close()
        assert source is not None
        assert source.name == "nvidia-smi"
        return await source.read(), elsewhere

    assert asyncio.run(main()) == (0.4, None)


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [(4.5, 0.3), (2.5, 0.1), (1.5, None)],
    ids=["two readings inside", "half of the last one inside", "all older"],
)
def test_readings_that_cover_the_time_before_a_level_do_not_count(seconds: float, mean: float | None) -> None:
    values = iter([0.0, 0.1, 0.2, 0.4])

    async def read() -> float | None:
        return next(values)

    async def main() -> GpuWatch:
        watch = GpuWatch(GpuSource("scripted", read, 3.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.run(), seconds)
        return watch

    assert run_virtual_net(main()).mean == (None if mean is None else pytest.approx(mean))
    assert GpuWatch(None).mean is None


# -- figures -----------------------------------------------------------------------------------------------------------


def a_level(concurrency: int, rate: float, ttft_s: float = 0.1) -> LevelFigures:
    empty = level_figures(concurrency, (), (0.0, 1.0), gpu_utilisation=None, client_cpu=0.0, partial=False)
    return replace(empty, output_tokens_per_s=rate, ttft=percentiles([ttft_s]))


def test_the_knee_is_the_lowest_level_near_the_highest_throughput() -> None:
    levels = [a_level(1, 10), a_level(2, 19), a_level(4, 19.5), a_level(8, 20), a_level(16, 12)]
    assert saturated_at(levels) == 2
    assert saturated_at(levels[:2]) is None
    assert saturated_at([]) is None
    assert saturated_at([a_level(1, 0.0)]) is None
    assert ttft_missed_at([a_level(1, 1, 0.1), a_level(2, 1, 0.3), a_level(4, 1, 0.2)], 0.2) == 2


def test_percentiles_reach_from_the_median_to_the_maximum() -> None:
    found = percentiles([float(number) for number in range(1000)])
    assert found is not None
    assert [found.p50, found.p90, found.p95, found.p99, found.p999, found.max] == [500, 900, 950, 990, 999, 999]
    assert percentiles([]) is None


# -- the command -------------------------------------------------------------------------------------------------------

COSTS = CostModel(base_s=0.004, prefill_token_s=20e-6, sequence_s=0.0002, kv_token_s=0.0)
FLAGS = EngineFlags(max_num_seqs=16, max_num_batched_tokens=256)
LEVELS = ["--sweep", "1..4", "--duration", "1", "--prompt-tokens", "20-60", "--output-tokens", "5-10"]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})


def test_the_command_prints_and_writes_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with VirtualEngineServer(RealTimeEngine(COSTS, FLAGS)) as server:
        done = invoke("--url", server.url, *LEVELS, "--out", "s.json", "--csv", "s.csv", "--html", "s.html")
    assert done.exit_code == 0, done.output
    for word in ("time to first token", "p99.9", "not measured", "concurrency 4:", "Highest throughput"):
        assert word in done.output
    kept = json.loads(Path("s.json").read_text())
    assert kept["format"] == "inferry-bench-sweep/1"
    assert [level["concurrency"] for level in kept["levels"]] == [1, 2, 4]
    rows = list(csv.DictReader(Path("s.csv").read_text().splitlines()))
    assert [row["concurrency"] for row in rows] == ["1", "2", "4"]
    assert float(rows[0]["ttft_p999_s"]) == kept["levels"][0]["ttft"]["p999"]
    assert rows[0]["gpu_utilisation"] == ""
    assert Path("s.html").read_text().count("<polyline") == 2 + 3 * 6


def test_an_interrupt_keeps_the_levels_measured_so_far(tmp_path: Path) -> None:
    last_level = threading.Event()

    async def never_at_four(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "sweep-4-" in request.headers["x-inferry-run-id"]:
            last_level.set()
            await asyncio.Event().wait()
        return await answer(request, body)

    with EngineServer(never_at_four) as server:
        command = [sys.executable, "-m", "inferry", "bench", "--url", server.url, "--sweep", "1,2,4", "--out", "s.json"]
        command += ["--prompt-tokens", "20", "--output-tokens", "5", "--duration", "0.2", "--level-calls", "3"]
        process = subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(COLUMNS="200")
        )
        has_begun = last_level.wait(120)
        process.send_signal(signal.SIGINT)
        _, error_message = process.communicate(timeout=120)
    assert has_begun
    assert process.returncode == 130
    assert b"interrupted" in error_message
    kept = json.loads((tmp_path / "s.json").read_text())
    assert kept["partial"]
    assert [level["concurrency"] for level in kept["levels"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sweep", "x"], "such as 1,2,4"),
        (["--sweep", "1,2", "--poisson", "1"], "cannot be combined"),
        (["--sweep", "1,2", "--pods", "1"], "cannot be combined"),
        (["--sweep", "1,2", "--duration", "0"], "--duration"),
        (["--sweep", "1,2", "--lane", "P0=0.5,P1=0.5"], "one lane"),
        (["--poisson", "1", "--csv", "x.csv"], "--csv needs --sweep"),
        (["--sweep", "1,2", "--csv", "no/where.csv"], "no such directory"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(words: list[str], complaint: str) -> None:
    done = invoke("--url", "http://127.0.0.1:1", *words)
    assert done.exit_code == 2
    assert complaint in done.output


def test_an_empty_sweep_has_a_header_row() -> None:
    result, _ = swept(Slots(9), (1,))
    empty = replace(result, levels=())
    assert to_csv(empty).decode().startswith("concurrency,seconds,calls")
    assert findings(empty) == ["No level was measured."]
