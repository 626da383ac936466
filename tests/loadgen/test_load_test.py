"""`inferry bench` as people meet it. Bytes go through sockets, in virtual time."""

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from inferry.cli.bench_output import warnings
from inferry.cli.main import app
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.loadgen.load_generator import ClientLimits, LoadGenerator
from inferry.loadgen.load_test import LoadTest, run_load_test
from inferry.loadgen.requests import RequestForm, RequestMaker, RequestMetadata
from inferry.loadgen.result import Result, from_json, to_json
from inferry.loadgen.traffic import Agents, Bursts, TrafficOptions
from inferry.sim.calls import Run, Step
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.workload import SloTarget
from inferry.workers.http_client import Client
from support.children import environment
from support.serving import closed_port_url
from support.simulated_engine_server import EngineServer, RealTimeEngine, VirtualEngineServer
from support.upstream import DONE, Upstream, begin, chunk, event, role, usage
from support.virtual_net import run_virtual_net

PROMISES = dict.fromkeys(Lane, SloTarget(30.0, 10.0))
CROWD = TrafficOptions(bursts=Bursts(12, 0.2, 0.1), seconds=0.15, prompt_tokens=(20, 40), output_tokens=(4, 4))
Script = Callable[[Upstream, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def is_trial(request: web.Request) -> bool:
    return request.headers.get("x-inferry-run-id", "").endswith("trial")


async def answer(
    request: web.Request, body: dict[str, Any], pause_s: float = 0.0, last: bytes = b""
) -> web.StreamResponse:
    """As many tokens as were asked for; `last` instead of a proper end."""
    chat = "messages" in body
    response = await begin(request)
    await response.write(role() if chat else b": soon\n\n")
    for number in range(body["max_tokens"]):
        is_end = number == body["max_tokens"] - 1
        if is_end and last:
            await response.write(last)
            return response
        await response.write(chunk("x", "length" if is_end else None, chat=chat))
        if pause_s:
            await asyncio.sleep(pause_s)
    await response.write(usage(len(body.get("prompt", "")), body["max_tokens"]) + DONE)
    return response


async def obliging(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await answer(request, body)


def bench(script: Script = obliging, traffic: TrafficOptions = CROWD, key: str | None = None, **more: Any) -> Result:
    """A bench against a scripted server, begun as far into the traffic as its first call."""
    return benched(script, traffic, key, **more)[0]


def benched(
    script: Script = obliging, traffic: TrafficOptions = CROWD, key: str | None = None, **more: Any
) -> tuple[Result, Upstream]:
    async def main() -> tuple[Result, Upstream]:
        async with Upstream(script) as upstream:
            wanted = LoadTest(url=upstream.url, model="m", traffic=traffic, slo_targets=PROMISES, **more)
            return await run_load_test(wanted, key, lambda _: None, lambda _: None), upstream

    return run_virtual_net(main())


def calls_of(upstream: Upstream) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Bodies and headers of what is no trial."""
    pairs = zip(upstream.bodies, upstream.headers, strict=True)
    return [(body, headers) for body, headers in pairs if not headers.get("x-inferry-run-id", "").endswith("trial")]


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_every_call_is_sent_answered_and_counted() -> None:
    result, upstream = benched()
    assert (result.done, result.failed, len(upstream.bodies)) == (12, 0, 12 + 1)
    lane = result.lanes["P1"]
    assert (lane.planned, lane.attainment, lane.output_tokens) == (12, 1.0, 48)
    assert {body["max_tokens"] for body, _ in calls_of(upstream)} == {4}
    assert sum(result.tokens_by_second["P1"]) == 48


def test_lanes_tenants_and_runs_are_sent_in_headers() -> None:
    traffic = replace(CROWD, tenants=("acme",), lanes={Lane.P0: 1.0})
    result, upstream = benched(traffic=traffic, key="k", request_metadata=RequestMetadata(headers={"x-more": "yes"}))
    body, headers = calls_of(upstream)[0]
    assert "priority" not in body
    assert headers["x-inferry-lane"] == "P0"
    assert headers["x-inferry-tenant"] == "acme"
    assert headers["x-inferry-run-id"].endswith("-burst-0")
    assert headers["x-inferry-step-id"] == "0-call"
    assert (headers["x-more"], headers["authorization"]) == ("yes", "Bearer k")
    kept = to_json(result)
    assert b"Bearer" not in kept
    assert b'"yes"' not in kept


def test_lanes_can_be_sent_as_priorities_or_not_at_all() -> None:
    traffic = replace(CROWD, lanes={Lane.P0: 1.0})
    quiet = RequestMetadata(lane_by="none", tenant_header=None, run_ids=False)
    _, told = benched(traffic=traffic, request_metadata=RequestMetadata(lane_by="priority"))
    _, silent = benched(traffic=traffic, request_metadata=quiet)
    assert {body["priority"] for body, _ in calls_of(told)} == {-10}
    assert not any("x-inferry-lane" in headers for _, headers in calls_of(told))
    for body, headers in calls_of(silent):
        assert "priority" not in body
        assert not [name for name in headers if name.startswith("x-inferry")]


def test_chat_is_spoken_where_asked() -> None:
    result, upstream = benched(prompts="chat")
    assert result.done == 12
    assert all(body["messages"][0]["content"] for body, _ in calls_of(upstream))


def test_a_server_that_takes_no_ids_gets_words_of_the_right_length() -> None:
    async def wordy(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return await answer(request, {**body, "prompt": [0] * (2 * len(body["prompt"].split()))})

    result, upstream = benched(wordy, replace(CROWD, prompt_tokens=(40, 40)))
    assert result.settings["form"] == {"prompts": "text", "usage": True, "end": "min_tokens", "words_per_token": 0.5}
    sent = [body for body, _ in calls_of(upstream)]
    assert {len(body["prompt"].split()) for body in sent} == {20}


def test_prompts_are_cut_to_the_context_the_server_names() -> None:
    result, upstream = benched(traffic=replace(CROWD, prompt_tokens=(5000, 5000)))
    assert result.shortened == 12
    assert max(len(body["prompt"]) for body, _ in calls_of(upstream)) == 4096 - 4
    assert any("were cut" in warning for warning in warnings(result))


# -- when it is sent ---------------------------------------------------------------------------------------------------


def watching(pause_s: float) -> tuple[Script, list[float], list[int]]:
    """A slow server, with when calls came and how many it had at once."""
    came: list[float] = []
    at_once = [0]
    now = 0

    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal now
        if is_trial(request):
            return await answer(request, body)
        came.append(time.perf_counter())
        now += 1
        at_once.append(now)
        try:
            return await answer(request, body, pause_s)
        finally:
            now -= 1

    return script, came, at_once


def test_a_call_is_sent_at_its_time_whatever_the_others_do() -> None:
    script, came, at_once = watching(0.25)
    result = bench(script)
    assert max(at_once) == 12
    due = [row.due_s for row in result.calls]
    # When it began is not told, so arrivals are compared among each other.
    assert [there - came[0] for there in came] == pytest.approx([wanted - due[0] for wanted in due], abs=1e-5)


@pytest.mark.parametrize("limits", [ClientLimits(pods=3), ClientLimits(concurrency_cap=3)])
def test_pods_send_one_call_at_a_time_and_their_waiting_counts(limits: ClientLimits) -> None:
    script, _, at_once = watching(0.02)
    result = bench(script, limits=limits)
    assert max(at_once) == 3
    assert result.done == 12
    waited = [row.sent_s for row in result.calls if row.sent_s is not None]
    assert max(waited) > 0.1
    assert all(row.ttft_s is not None and row.sent_s is not None and row.ttft_s >= row.sent_s for row in result.calls)


def test_steps_follow_one_another_when_their_tools_are_through() -> None:
    result = bench(traffic=replace(CROWD, bursts=None, agents=Agents(3, 3, (0.1, 0.1)), seconds=0.2))
    steps = [row for row in result.calls if row.run == "agent-1"]
    assert [row.step for row in steps] == ["step-0", "step-1", "step-2"]
    for before, after in itertools.pairwise(steps):
        assert after.due_s == pytest.approx(before.ended_s + 0.1, abs=1e-5)
    assert [run.ok for run in result.runs] == [True] * 3


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def failing_first(times: int, how: Script) -> Script:
    seen: dict[str, int] = {}

    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        run = request.headers["x-inferry-run-id"]
        seen[run] = seen.get(run, 0) + 1
        if is_trial(request) or seen[run] > times:
            return await answer(request, body)
        return await how(upstream, request, body)

    return script


async def hangs_up(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def says_later(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    error = {"error": {"message": "try again", "type": "overloaded", "code": "queue_full"}}
    return web.json_response(error, status=429, headers={"retry-after": "0.05"})


def test_resets_before_the_first_byte_are_tried_again_and_counted() -> None:
    traffic = replace(CROWD, bursts=Bursts(3, 0.2, 0.1))
    result = bench(failing_first(1, hangs_up), traffic)
    assert (result.done, result.lanes["P1"].resets) == (3, 3)
    assert all(0.375 <= row.end_s <= 0.5 for row in result.calls)  # they waited before they tried again
    given_up = bench(failing_first(1, hangs_up), traffic, limits=ClientLimits(retries=0))
    assert given_up.lanes["P1"].failures == {"reset": 3}
    assert given_up.lanes["P1"].attainment == 0.0


def test_refusals_are_retried_after_retry_after() -> None:
    result = bench(failing_first(2, says_later))
    assert (result.done, result.lanes["P1"].refused) == (12, 24)
    assert [row.end_s for row in result.calls] == pytest.approx([0.1] * 12)
    refused = bench(failing_first(9, says_later))
    assert refused.lanes["P1"].failures == {"http 429 queue_full": 12}
    assert refused.failures == {"http 429 queue_full": "try again"}


def ending(last: bytes) -> Script:
    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, body, last=b"" if is_trial(request) else last)

    return script


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (event({"error": {"message": "m", "code": "worker_lost"}}) + DONE, "in band: worker_lost"),
        (DONE, "broke off"),
        (chunk("x", "stop", chat=False) + usage(9, 3) + DONE, "stop too early"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_its_kind(last: bytes, kind: str) -> None:
    result = bench(ending(last))
    assert (result.done, result.lanes["P1"].failures) == (0, {kind: 12})


def test_an_unresponsive_server_times_out() -> None:
    async def silent(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_trial(request):
            return await answer(request, body)
        await asyncio.sleep(60)
        return web.Response()

    result, upstream = benched(silent, limits=ClientLimits(call_timeout_s=0.3))
    assert result.lanes["P1"].failures == {"timeout": 12}
    assert upstream.disconnects == 12


def test_an_agent_that_walks_away_takes_its_connection_with_it() -> None:
    step = Step("s", ((1, 0, 20),), 50)
    leaving = Run(run_id="leaving", tenant="a", lane=Lane.P0, at=0.0, steps=(step, step), cancel_after_s=0.3)
    staying = Run(run_id="staying", tenant="a", lane=Lane.P0, at=0.0, steps=(step,))

    async def main() -> None:
        script, _, _ = watching(0.02)
        async with Upstream(script) as upstream:
            client = Client(upstream.url, {}, 5.0)
            load_generator = LoadGenerator(
                client, RequestMaker(client, "m", RequestForm(), RequestMetadata(), "salt"), ClientLimits()
            )
            await load_generator.play([leaving, staying])
            await asyncio.wait_for(upstream.gone.wait(), 10)
            client.close()
            assert upstream.disconnects == 1
        assert {call.run.run_id: call.outcome for call in load_generator.calls} == {
            "leaving": "cancelled",
            "staying": "done",
        }
        left, stayed = sorted(load_generator.run_records, key=lambda one: one.run.run_id)
        assert (left.cancelled, left.ok, stayed.cancelled, stayed.ok) == (True, False, False, True)
        assert left.ended - left.began == pytest.approx(0.3)
        assert left.ended < stayed.ended

    run_virtual_net(main())


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
            "--url", server.url, *SMALL, "--ttft-ms", "700", "--ttft-ms", "P0=100", "--itl-ms", "40", "--out", "r.json"
        )
    assert done.exit_code == 0, done.output
    slo_targets = from_json((tmp_path / "r.json").read_bytes()).slo_targets
    assert slo_targets == {"P0": SloTarget(0.1, 0.04), "P1": SloTarget(0.7, 0.04), "P2": SloTarget(0.7, 0.04)}
