"""`calibrate` as people and scripts meet it. What it measures, it measures in virtual time."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner

from inferry.cli.main import app
from inferry.loadgen.probes import PaceEstimate, Probe, ProbeLimits, schedule, warm_up
from inferry.loadgen.server import read_metrics, redacted_url
from inferry.sim.costs import MODELS, CostModel, EngineFlags, load_model
from inferry.sim.observations import CallTiming, from_lines
from inferry.sim.replay import replay
from support.children import environment
from support.serving import closed_port_url
from support.simulated_engine_server import CONTEXT, EngineServer, RealTimeEngine, Script, VirtualEngineServer
from support.upstream import DONE, begin, chunk, usage

COSTS = CostModel(
    base_s=0.008,
    prefill_step_s=0.004,
    prefill_token_s=100e-6,
    sequence_s=0.0008,
    kv_token_s=1e-6,
    request_s=0.003,
    token_s=20e-6,
    reply_s=0.002,
)
FLAGS = EngineFlags(max_num_seqs=16, max_num_batched_tokens=256)
GIVEN = ["--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
SECONDS = "6"

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="2000"} 1.0
vllm:request_prefill_time_seconds_bucket{le="0.3"} 7.0
vllm:request_prefill_time_seconds_sum 1.5
vllm:request_prefill_time_seconds_created 1.79e+09
process_cpu_seconds_total 13.42
"""

Calibrate = Callable[..., Any]


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibrate:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["calibrate", *arguments])


def an_engine() -> VirtualEngineServer:
    return VirtualEngineServer(RealTimeEngine(COSTS, FLAGS))


# -- the whole of it ---------------------------------------------------------------------------------------------------


def _is_right(costs: CostModel) -> bool:
    parts = {"base_s": 0.1, "prefill_token_s": 0.1, "sequence_s": 0.25, "kv_token_s": 0.1}
    return all(getattr(costs, name) == pytest.approx(getattr(COSTS, name), rel=part) for name, part in parts.items())


def test_an_engine_is_measured_and_its_model_can_be_simulated(calibrate: Calibrate, tmp_path: Path) -> None:
    with an_engine() as server:
        url = server.url.replace("http://", "http://me:secret@")
        done = calibrate("--url", url, "--seconds", SECONDS, "--raw", "raw.jsonl", "--name", "Old Faithful", *GIVEN)
    assert done.exit_code == 0, done.output
    model = load_model(tmp_path / "engine-model.json")
    assert model.name == "Old Faithful"
    assert _is_right(model.costs)
    assert (model.flags.max_num_seqs, model.flags.max_num_batched_tokens) == (16, 256)
    assert model.flags.prefix_caching
    written = msgspec.json.decode((tmp_path / "engine-model.json").read_bytes())
    assert written["flag_sources"]["max_num_seqs"] == "given"
    assert written["flag_sources"]["kv_tokens"] == "assumed"
    assert written["conditions"]["max_model_len"] == CONTEXT
    assert "secret" not in (tmp_path / "engine-model.json").read_text() + (tmp_path / "raw.jsonl").read_text()
    # Every prompt is its own, but for those that are to hit the cache.
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) <= len(set(prompts)) + 2 * 3 * 2
    assert all(body["stream"] and body["ignore_eos"] for body in server.bodies)

    again = calibrate("--from-raw", "raw.jsonl", "--out", "again.json", "--name", "Old Faithful")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "engine-model.json").read_bytes()
    simulated = CliRunner().invoke(
        app, ["simulate", "--engine", "again.json", "--scenario", "harbor", "--seconds", "3", "--digests", "2"]
    )
    assert simulated.exit_code == 0, simulated.output


def test_the_raw_file_can_be_fitted_with_other_flags(calibrate: Calibrate, tmp_path: Path) -> None:
    with an_engine() as server:
        done = calibrate("--url", server.url, "--seconds", "3", "--raw", "raw.jsonl", *GIVEN, "--json")
    assert done.exit_code == 0, done.output
    assert msgspec.json.decode(done.stdout)["flags"]["max_num_batched_tokens"] == 256
    again = calibrate("--from-raw", "raw.jsonl", "--out", "b.json", "--kv-tokens", "99999", "--json")
    assert again.exit_code == 0, again.output
    assert msgspec.json.decode(again.stdout)["flags"]["kv_tokens"] == 99_999
    conditions, observations = from_lines((tmp_path / "raw.jsonl").read_bytes())
    assert conditions.seconds <= 3.5
    assert conditions.flags["kv_tokens"].source == "assumed"
    assert all(call.sent_s <= call.heard_s[0] <= call.ended_s for one in observations for call in one.calls)


def test_settings_reported_by_the_engine_are_used_and_foreign_load_is_detected(calibrate: Calibrate) -> None:
    with VirtualEngineServer(RealTimeEngine(COSTS, FLAGS), metrics=METRICS, version="9.8.7", key="k") as server:
        done = CliRunner().invoke(
            app,
            ["calibrate", "--url", server.url, "--seconds", "3", *GIVEN, "--api-key-env", "KEY", "--json"],
            env={"KEY": "k"},
        )
    assert done.exit_code == 0, done.output
    model = msgspec.json.decode(done.stdout)
    assert model["flags"]["kv_tokens"] == 64_000
    assert model["flags"]["block_tokens"] == 32
    assert model["flag_sources"]["kv_tokens"] == "told by the engine"
    assert model["conditions"]["server"] == "vLLM 9.8.7"
    assert "busy with 4 requests of others" in " ".join(model["conditions"]["warnings"])


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_models_can_be_loaded_and_played(path: Path) -> None:
    model = load_model(path)
    (alone,) = replay([_a_call(prompt=500, output=20)], model.costs, model.flags)
    assert model.costs.base_s * 20 < alone.ended_s < 60
    assert alone.entered_s == pytest.approx(model.costs.request_cost_s(500))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def not_a_stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x" * 16, "finish_reason": "length"}]})


async def all_at_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    description = b"".join(chunk("x", chat=False) for _ in range(body["max_tokens"] - 1))
    await response.write(description + chunk("x", "length", chat=False) + DONE)
    return response


async def says_no(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the model is asleep"}}, status=404)


async def breaks_off(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(chunk("x", chat=False) + chunk("y", chat=False))
    await response.write_eof()
    return response


async def says_little(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """It ends its answers after three tokens, whatever it is told."""
    response = await begin(request)
    error_message = min(3, body["max_tokens"])
    for number in range(error_message):
        await asyncio.sleep(0.02)
        finish = None if number < error_message - 1 else "stop" if error_message == 3 else "length"
        await response.write(chunk("x", finish, chat=False))
    await response.write(usage(len(body["prompt"]), error_message) + DONE)
    return response


async def is_slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    for number in range(body["max_tokens"]):
        await asyncio.sleep(0.02 if body["max_tokens"] == 16 else 1.0)
        await response.write(chunk("x", "length" if number == body["max_tokens"] - 1 else None, chat=False))
    await response.write(DONE)
    return response


def picky(*unwanted: str, ids: bool = True) -> Script:
    """An engine that refuses fields it does not know, and token ids if so told."""
    engine = RealTimeEngine(COSTS, FLAGS)

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if any(name in body for name in unwanted) or (not ids and not isinstance(body["prompt"], str)):
            return web.json_response({"error": {"message": "what is that?"}}, status=400)
        if isinstance(body["prompt"], str):
            body["prompt"] = [hash(word) for word in body["prompt"].split() for _ in range(2)]
        return await engine(request, body)

    return script


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (not_a_stream, "did not answer with server-sent events"),
        (all_at_once, "sends all 16 tokens at once"),
        (says_no, "the model is asleep"),
        (breaks_off, "before the answer was complete"),
        (picky("stream"), "what is that?"),
    ],
)
def test_a_server_that_cannot_be_probed_is_named_with_the_reason(
    calibrate: Calibrate, tmp_path: Path, script: Script, complaint: str
) -> None:
    with VirtualEngineServer(script) as server:
        done = calibrate("--url", server.url, "--seconds", "2", "--raw", "raw.jsonl")
    assert (done.exit_code, list(tmp_path.iterdir())) == (3, [])
    assert complaint in " ".join(done.stderr.split())


def test_an_unreachable_server(calibrate: Calibrate) -> None:
    with closed_port_url() as url:
        done = calibrate("--url", url)
    assert done.exit_code == 3
    assert "cannot reach" in done.stderr


def test_a_missing_key_is_refused(calibrate: Calibrate) -> None:
    with EngineServer(not_a_stream, key="k") as server:
        done = calibrate("--url", server.url)
    assert done.exit_code == 3
    assert "--api-key-env" in done.stderr


def test_models_that_are_not_there_or_not_named(calibrate: Calibrate) -> None:
    with EngineServer(not_a_stream, models=("a", "b")) as server:
        unknown, unnamed = calibrate("--url", server.url, "--model", "c"), calibrate("--url", server.url)
    assert (unknown.exit_code, unnamed.exit_code) == (3, 3)
    assert "it serves a, b" in unknown.stderr
    assert "name one with --model: a, b" in unnamed.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "either --url or --from-raw"),
        (["--url", "http://h", "--from-raw", "f"], "either --url or --from-raw"),
        (["--url", "h:8000"], "must begin with http"),
        (["--url", "http://h", "--out", "no/where.json"], "no such directory"),
        (["--url", "http://h", "--api-key-env", "NOT_SET_ANYWHERE"], "is not set"),
        (["--from-raw", "absent.jsonl"], "cannot read"),
        (["--from-raw", __file__], "not written by --raw"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_sent(
    calibrate: Calibrate, arguments: list[str], complaint: str
) -> None:
    done = calibrate(*arguments)
    assert done.exit_code == 2
    assert complaint in " ".join(done.stderr.split())


def test_fields_the_server_refuses_are_left_out(calibrate: Calibrate) -> None:
    with VirtualEngineServer(picky("ignore_eos", "stream_options", ids=False)) as server:
        done = calibrate("--url", server.url, "--seconds", SECONDS, *GIVEN, "--json")
    assert done.exit_code == 0, done.output
    conditions = msgspec.json.decode(done.stdout)["conditions"]
    assert conditions["prompts"] == "text"
    assert conditions["request_fields"] == ["min_tokens"]


def test_a_server_that_ends_its_answers_early_tells_too_little(calibrate: Calibrate, tmp_path: Path) -> None:
    with VirtualEngineServer(says_little) as server:
        done = calibrate("--url", server.url, "--seconds", "2", *GIVEN)
    assert (done.exit_code, list(tmp_path.iterdir())) == (4, [])
    assert "ends them early" in " ".join(done.stderr.split())


def test_the_time_limit_holds_whatever_the_engine_does(calibrate: Calibrate) -> None:
    with VirtualEngineServer(is_slow) as server:
        done = calibrate("--url", server.url, "--seconds", "2")
    trial_s = 16 * 0.02
    assert server.took == [pytest.approx(trial_s + 2, abs=0.01)]
    assert done.exit_code == 3
    assert "give it more with --seconds" in " ".join(done.stderr.split())


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with EngineServer(RealTimeEngine(COSTS, FLAGS)) as server:
        command = [sys.executable, "-m", "inferry", "calibrate", "--url", server.url, "--raw", "raw.jsonl"]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env=environment(COLUMNS="200"))
        while len(server.bodies) < 10:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error_message = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"nothing was written" in error_message
    assert list(tmp_path.iterdir()) == []


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", [ProbeLimits(), ProbeLimits(prompt_tokens=200, sequences=3, kv_tokens=4096, context_tokens=256)]
)
def test_probes_stay_within_reach(limits: ProbeLimits) -> None:
    planned = [*warm_up(limits), *schedule(limits)]
    assert {"prefill", "decode", "inject", "hit", "burst"} <= {probe.kind for probe in planned}
    for probe in planned:
        assert max(probe.prompt_tokens, *probe.injected, 0) <= limits.prompt_tokens
        assert probe.sequences <= limits.sequences or probe.kind == "burst"
        assert limits.kv_tokens is None or probe.kv_tokens <= limits.kv_tokens or probe.kind == "burst"
        assert limits.context_tokens is None or probe.prompt_tokens + probe.output_tokens <= limits.context_tokens


def test_no_held_out_probe_is_also_fitted() -> None:
    for limits in (ProbeLimits(), ProbeLimits(sequences=16), ProbeLimits(prompt_tokens=100, sequences=2)):
        shapes = [(p.kind, p.sequences, p.prompt_tokens, p.injected) for p in schedule(limits)]
        assert len(shapes) == len(set(shapes))
        assert 3 <= sum(probe.held_out for probe in schedule(limits)) < len(shapes) / 2


def test_a_probe_that_would_take_too_long_is_known_beforehand() -> None:
    pace = PaceEstimate()
    assert pace.expected_s(Probe(kind="decode", sequences=64)) == 0
    pace.record_prompt(1000, 0.5)
    pace.record_itl(16, 0.02)
    assert pace.expected_s(Probe(kind="prefill", prompt_tokens=4000, output_tokens=1)) == pytest.approx(2.02)
    # Twice the crowd may take twice as long; a smaller one no longer than what was seen.
    assert pace.itl_s(32) == pytest.approx(0.04)
    assert pace.itl_s(4) == pytest.approx(0.02)


# -- what is read ------------------------------------------------------------------------------------------------------


def test_metrics_are_summed_over_labels() -> None:
    assert read_metrics(METRICS) == {
        "vllm:num_requests_running": 4.0,
        "vllm:cache_config_info/block_size": 32.0,
        "vllm:cache_config_info/num_gpu_blocks": 2000.0,
        "vllm:request_prefill_time_seconds_sum": 1.5,
    }


def test_a_url_is_shown_without_what_is_secret_in_it() -> None:
    assert redacted_url("https://user:word@host:8000/base/v1?key=1") == "https://host:8000/base/v1"
    assert redacted_url("http://host:8000/v1/") == "http://host:8000"


def _a_call(prompt: int, output: int) -> CallTiming:
    return CallTiming(sent_s=0.0, heard_s=(), ended_s=0.0, prompt_tokens=prompt, output_tokens=output)
