"""`inferry bench`: results, comparison, interruption and its error messages."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from inferry.cli.bench_output import warnings
from inferry.cli.main import app
from inferry.domain.values import replace
from inferry.loadgen.load_test import LoadTest, run_load_test
from inferry.loadgen.requests import RequestMetadata
from inferry.loadgen.result import from_json, to_json
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.workload import SloTarget
from loadgen.load_test_server import CROWD, PROMISES, answer, bench, obliging
from support.children import environment
from support.serving import closed_port_url
from support.simulated_engine_server import EngineServer, RealTimeEngine, VirtualEngineServer
from support.upstream import Upstream
from support.virtual_net import run_virtual_net

# -- the command -------------------------------------------------------------------------------------------------------


COSTS = CostModel(base_s=0.004, prefill_token_s=20e-6, sequence_s=0.0002, kv_token_s=0.0)


FLAGS = EngineFlags(max_num_seqs=16, max_num_batched_tokens=256)


SMALL = ["--poisson", "50", "--duration", "0.5", "--prompt-tokens", "20-60", "--output-tokens", "5-10"]


Invoke = Callable[..., Any]


@pytest.fixture
def inferry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERRY_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return lambda *words, env=None: CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200", **(env or {})})


def an_engine(**more: Any) -> VirtualEngineServer:
    return VirtualEngineServer(RealTimeEngine(COSTS, FLAGS), **more)


def test_two_arms_are_measured_saved_and_compared(inferry: Invoke, tmp_path: Path) -> None:
    priced = ["--gpu-cost-per-hour", "4", "--run-budget", "0.0001", "--model-costs", "h200-vllm-8b"]
    with an_engine(version="9.8.7", key="secret") as server:
        common = ["--url", server.url, *SMALL, "--lane", "P0=0.5,P2=0.5", *priced]
        alone = inferry(*common, "--pods", "1", "--out", "before.json", env={"INFERRY_API_KEY": "secret"})
        done = inferry(*common, "--api-key", "secret", "--label", "open", "--out", "after.json", "--html", "after.html")
    assert (alone.exit_code, done.exit_code) == (0, 0), alone.output + done.output
    assert "promise" not in done.stdout
    assert re.search(r"^P0 +\d+ +100.0%", done.stdout, re.MULTILINE)
    assert re.search(r"^lane +ttft p99 +p99.9 +max +itl p99 +p99.9 +max +e2e p99 +p99.9 +max", done.stdout, re.M)
    before, after = (from_json((tmp_path / name).read_bytes()) for name in ("before.json", "after.json"))
    assert (after.server, after.model, after.partial, after.label) == ("9.8.7", "m", False, "open")
    assert [row.due_s for row in before.calls] == pytest.approx([row.due_s for row in after.calls])
    assert before.cost_figures.utilisation is not None
    assert after.cost_figures.utilisation is not None
    assert before.cost_figures.utilisation < after.cost_figures.utilisation
    assert b"secret" not in (tmp_path / "after.json").read_bytes()

    compared = inferry("--compare", "before.json", "after.json", "--html", "both.html")
    table = inferry("--before-after", "before.json", "after.json", "--run-budget", "9", "--model-costs", "h200-vllm-8b")
    assert (compared.exit_code, table.exit_code) == (0, 0), compared.output + table.output
    for word in ("before", "open", "P0", "P2", "GPU utilisation"):
        assert word in compared.stdout
    assert re.search(r"runs over budget +0.0% +0.0%", table.stdout)
    assert "ttft" not in table.stdout
    for name, curves in (("after.html", 2 * 3 + 2 * 2), ("both.html", 2 * 3 * 2 + 2 * 2)):
        page = (tmp_path / name).read_text()
        assert page.count("<polyline") == curves
        assert not re.search(r"(?:src|href)=|@import|url\(", page)


def test_a_result_can_be_read_again() -> None:
    result = bench()
    assert from_json(to_json(result)) == result
    assert json.loads(to_json(result))["format"] == "inferry-bench/1"


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    with EngineServer(RealTimeEngine(COSTS, FLAGS)) as server:
        command = [sys.executable, "-m", "inferry", "bench", "--url", server.url, "--agents", "5,400,0"]
        command += ["--prompt-tokens", "20", "--output-tokens", "20", "--duration", "1", "--out", "kept.json"]
        process = subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(COLUMNS="200")
        )
        # An agent sends its next call when it has read the answer to its last.
        while len(server.bodies) < 20:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error_message = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"interrupted" in error_message
    result = from_json((tmp_path / "kept.json").read_bytes())
    assert result.partial
    assert 0 < result.done < 2000
    assert result.failed == 0
    assert f"--url {server.url} --agents 5,400,0" in result.command


def test_a_late_load_generator_warns() -> None:
    result = bench()
    slow = replace(result, generator=replace(result.generator, lag_p99_ms=21.0, cpu=0.9))
    assert len(warnings(slow)) == 2
    assert warnings(replace(result, generator=replace(result.generator, lag_p99_ms=1.0, cpu=0.1))) == []


def test_an_unreachable_server(inferry: Invoke) -> None:
    with closed_port_url() as url:
        done = inferry("--url", url, *SMALL)
    assert done.exit_code == 3
    assert "cannot reach" in done.stderr


def test_models_and_keys_that_are_not_there(inferry: Invoke) -> None:
    with an_engine(models=("a", "b"), key="k") as server:
        keyless = inferry("--url", server.url, *SMALL)
        unknown = inferry("--url", server.url, "--model", "c", "--api-key", "k", *SMALL)
        unnamed = inferry("--url", server.url, "--api-key", "k", *SMALL)
    assert [one.exit_code for one in (keyless, unknown, unnamed)] == [3, 3, 3]
    assert "--api-key" in keyless.stderr
    assert "it serves a, b" in unknown.stderr
    assert "name one with --model: a, b" in unnamed.stderr


def test_a_server_that_refuses_priorities_is_detected_before_the_load_starts() -> None:
    async def main() -> None:
        async with Upstream(obliging) as upstream:
            upstream.accepts_priorities = False
            wanted = LoadTest(
                url=upstream.url,
                model="m",
                traffic=CROWD,
                slo_targets=PROMISES,
                request_metadata=RequestMetadata(lane_by="priority"),
            )
            with pytest.raises(Exception, match="priority scheduling is not enabled"):
                await run_load_test(wanted, None, lambda _: None, lambda _: None)

    run_virtual_net(main())


def test_an_engine_that_answers_nothing_is_an_error(inferry: Invoke) -> None:
    tried = 0

    async def once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal tried
        tried += 1
        if tried == 1:
            return await answer(request, body)
        return web.json_response({"error": {"message": "the model is asleep"}}, status=404)

    with VirtualEngineServer(once) as server:
        done = inferry("--url", server.url, *SMALL)
    assert done.exit_code == 4
    assert "the model is asleep" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--url"),
        (["--url", "h:8000"], "--url"),
        (["--url", "http://h"], "one kind of arrivals"),
        (["--url", "http://h", "--poisson", "1", "--agents", "1,1"], "one kind of arrivals"),
        (["--url", "http://h", "--bursts", "x"], "--bursts must be of the form"),
        (["--url", "http://h", "--poisson", "1", "--ttft-ms", "P9=3"], "--ttft-ms"),
        (["--url", "http://h", "--poisson", "1", "--itl-ms", "-3"], "--itl-ms"),
        (["--url", "http://h", "--poisson", "1", "--header", "x"], "NAME=VALUE"),
        (["--url", "http://h", "--poisson", "1", "--api-key", "ключ"], "--api-key has characters"),
        (["--url", "http://h", "--poisson", "1", "--api-key", "k\r\nx: y"], "--api-key has characters"),
        (["--url", "http://h", "--poisson", "1", "--lane-by", "x"], "--lane-by"),
        (["--url", "http://h", "--poisson", "1", "--prompts", "x"], "--prompts"),
        (["--url", "http://h", "--poisson", "1", "--out", "no/where.json"], "no such directory"),
        (["--url", "http://h", "--poisson", "1", "--model-costs", "absent"], "absent"),
        (["a.json"], "--compare"),
        (["--compare", "a.json"], "at least two"),
        (["--before-after", "a.json", "b.json", "c.json"], "two results"),
        (["--compare", "absent.json", "absent.json"], "cannot read absent.json"),
        (["--compare", __file__, __file__], "is no result"),
        (["--compare", "--url", "http://h", "a.json", "b.json"], "cannot be combined"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_sent(inferry: Invoke, words: list[str], complaint: str) -> None:
    done = inferry(*words)
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.stderr.split())


def test_slo_targets_can_be_given_by_lane(inferry: Invoke, tmp_path: Path) -> None:
    with an_engine() as server:
        done = inferry(
            *("--url", server.url, *SMALL, "--ttft-ms", "700", "--ttft-ms", "P0=100", "--itl-ms", "40"),
            *("--ttft-ms-per-1k-tokens", "P1=20", "--out", "r.json"),
        )
    assert done.exit_code == 0, done.output
    slo_targets = from_json((tmp_path / "r.json").read_bytes()).slo_targets
    assert slo_targets == {
        "P0": SloTarget(0.1, 0.04),
        "P1": SloTarget(0.7, 0.04, 0.02),
        "P2": SloTarget(0.7, 0.04),
    }
