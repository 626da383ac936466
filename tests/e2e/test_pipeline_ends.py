"""A pipeline that is cancelled or fails in any of its stages leaves nothing behind."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support import pipeline_functions
from support.pooling import pools
from support.pooling_gateway import PoolingGateway
from support.tenant_gateway import bearer
from support.upstream import Upstream, well_behaved
from support.waiting import until

CALLED = ["query", "passages", "best", "notes", "answer"]
STAGES = [*CALLED, "work"]


def _say(stage: str) -> str:
    return f"{{{{ input.command }}}}@{stage} "


PIPELINE: dict[str, Any] = {
    "inputs": {"command": {}, "texts": {"type": "list[text]", "default": ["a", "b", "c"]}},
    "stages": {
        "query": {"kind": "embed", "model": "m", "input": _say("query")},
        "passages": {
            "kind": "map",
            "over": "{{ input.texts }}",
            "stages": {"one": {"kind": "embed", "model": "m", "input": _say("passages") + "{{ item }}"}},
        },
        "nearest": {"kind": "rank", "query": "{{ query }}", "vectors": "{{ passages }}"},
        "best": {"kind": "rank", "model": "m", "query": _say("best"), "documents": "{{ input.texts }}"},
        "notes": {
            "kind": "map",
            "over": "{{ best.text }}",
            "stages": {
                "note": {
                    "kind": "generate",
                    "model": "m",
                    "messages": [{"content": _say("notes") + "{{ item }} {{ nearest.0.index }}"}],
                }
            },
        },
        "work": {
            "kind": "function",
            "function": "support.pipeline_functions:check",
            "arguments": {"text": _say("work") + "{{ notes.0 }}"},
            "returns": "text",
        },
        "answer": {"kind": "generate", "model": "m", "messages": [{"content": _say("answer") + "{{ work }}"}]},
    },
    "chat_input": "command",
}
# The second stage has a longer prompt than the budget of a run has tokens.
COSTLY: dict[str, Any] = {
    "inputs": {"text": {}, "texts": {"type": "list[text]", "default": ["a", "b"]}},
    "stages": {
        "best": {"kind": "rank", "model": "m", "query": "short", "documents": "{{ input.texts }}"},
        "answer": {"kind": "generate", "model": "m", "messages": [{"content": "{{ best.0.text }} {{ input.text }}"}]},
    },
}
RUN_CEILING = 400


async def _obey(script: Any, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    text = json.dumps(body)
    found = next((stage for stage in CALLED if f"hold-{stage}@{stage} " in text), None)
    if found is not None:
        up.held.append(found)  # type: ignore[attr-defined]
        await asyncio.Event().wait()
    if any(f"fail-{stage}@{stage} " in text for stage in CALLED):
        return web.json_response({"error": {"message": "refused", "type": "BadRequestError"}}, status=400)
    return await script(up, request, body)  # type: ignore[no-any-return]


class PipelineGateway(PoolingGateway):
    def __init__(self, directory: Path) -> None:
        async def pooled(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await _obey(pools, up, request, body)

        async def generated(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await _obey(well_behaved, up, request, body)

        super().__init__(
            directory,
            script=pooled,
            config={
                "pipelines": {"p": PIPELINE, "costly": COSTLY},
                "tenants": {"poor": {"run_token_ceiling": RUN_CEILING}},
            },
        )
        self.upstream.script = generated
        self.held: list[str] = []
        self.upstream.held = self.held  # type: ignore[attr-defined]

    def ask(self, key: str, stage: str, run: str, command: str = "hold") -> http.client.HTTPConnection:
        """Send a call and do not wait for its answer. One stage is told to hold, or to fail."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"input": {"command": f"{command}-{stage}"}}
        connection.request("POST", "/v1/pipelines/p", json.dumps(body), {**bearer(key), "x-inferry-run-id": run})
        return connection

    def is_idle(self) -> bool:
        gateway = self.service.gateway
        return (
            gateway.in_flight == 0
            and not any(gateway.queue_depths().values())
            and not self.upstream.running
            and not pipeline_functions.running
            and self.run(self._pipeline_tasks()) == 0
            and gateway._queue_limiter.queued_bytes == 0
            and not gateway._run_watchers
        )

    async def _pipeline_tasks(self) -> int:
        names = [repr(task.get_coro()) for task in asyncio.all_tasks()]
        return sum("PipelineRun" in name or "ComposedCalls" in name for name in names)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelineGateway]:
    with PipelineGateway(tmp_path_factory.mktemp("ends")) as served:
        yield served


@pytest.fixture(scope="module")
def key(gateway: PipelineGateway) -> str:
    return gateway.key("acme")


def _answer(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


def _until_held(gateway: PipelineGateway, stage: str, count: int) -> None:
    until(lambda: pipeline_functions.running if stage == "work" else gateway.held.count(stage) > count)


def test_a_run_without_commands_succeeds(gateway: PipelineGateway, key: str) -> None:
    status, body = _answer(gateway.ask(key, "none", "fine", "do"))
    assert status == 200, body
    until(gateway.is_idle)


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_disconnects_frees_every_stage(gateway: PipelineGateway, key: str, stage: str) -> None:
    count = gateway.held.count(stage)
    connection = gateway.ask(key, stage, f"gone-{stage}")
    _until_held(gateway, stage, count)
    connection.close()
    until(gateway.is_idle)


@pytest.mark.parametrize("stage", STAGES)
def test_cancelling_the_run_frees_every_stage(gateway: PipelineGateway, key: str, stage: str) -> None:
    count = gateway.held.count(stage)
    connection = gateway.ask(key, stage, f"cancelled-{stage}")
    _until_held(gateway, stage, count)
    gateway.call("DELETE", f"/v1/runs/cancelled-{stage}", None, bearer(key))
    status, body = _answer(connection)
    assert (status, body["error"]["code"]) == (409, "run_cancelled")
    until(gateway.is_idle)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_is_named_and_ends_the_others(gateway: PipelineGateway, key: str, stage: str) -> None:
    status, body = _answer(gateway.ask(key, stage, f"failed-{stage}", "fail"))
    error = body["error"]
    named = "notes.note-" if stage == "notes" else stage
    assert error["param"].startswith(f"stages.{named}")
    expected = (500, "function_failed") if stage == "work" else (400, "invalid_request")
    assert (status, error["code"]) == expected
    assert "secret" not in error["message"]
    until(gateway.is_idle)


def test_a_chat_call_of_a_failing_pipeline_names_the_stage(gateway: PipelineGateway, key: str) -> None:
    for stage in ("query", "answer"):
        body = {"model": "p", "messages": [{"role": "user", "content": f"fail-{stage}"}]}
        answer = gateway.call("POST", "/v1/chat/completions", body, bearer(key))
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] == f"stages.{stage}"
    until(gateway.is_idle)


def test_a_deadline_ends_the_stage_that_runs(gateway: PipelineGateway, key: str) -> None:
    for stage in ("notes", "work"):
        body = {"input": {"command": f"hold-{stage}"}}
        headers = {**bearer(key), "x-inferry-deadline-ms": "400"}
        answer = gateway.call("POST", "/v1/pipelines/p", body, headers)
        assert answer.status in (408, 504)
        assert json.loads(answer.body)["error"]["param"].startswith("stages.")
        until(gateway.is_idle)


def test_a_run_budget_that_lasts_for_the_first_stage_only_ends_the_run_at_the_last(gateway: PipelineGateway) -> None:
    headers = bearer(gateway.key("poor"), **{"x-inferry-run-id": "dear"})
    body = {"input": {"text": "many words " * RUN_CEILING}}
    answer = gateway.call("POST", "/v1/pipelines/costly", body, headers)
    assert (answer.status, answer.code) == (402, "run_budget_exhausted")
    assert json.loads(answer.body)["error"]["param"] == "stages.answer"
    until(gateway.is_idle)
    budget = gateway.call("GET", "/v1/runs/dear", None, headers).json["budget"]
    assert 0 < budget["spent_tokens"] < RUN_CEILING, "the first stage is charged"
    assert budget["leased_tokens"] == 0
    cheap = gateway.call("POST", "/v1/pipelines/costly", {"input": {"text": "few"}}, headers)
    assert cheap.status == 200, "what is left of the budget is not lost"
    until(gateway.is_idle)


def test_a_key_needs_the_pipeline_and_not_its_models(gateway: PipelineGateway) -> None:
    allowed, other = gateway.key("acme", limits={"models": ["p"]}), gateway.key("acme", limits={"models": ["m"]})
    body = {"input": {"command": "do-none"}}
    assert gateway.call("POST", "/v1/pipelines/p", body, bearer(allowed)).status == 200
    answer = gateway.call("POST", "/v1/pipelines/p", body, bearer(other))
    assert (answer.status, answer.code) == (403, "model_not_allowed")
    assert json.loads(gateway.call("GET", "/v1/pipelines", None, bearer(other)).body)["data"] == []
