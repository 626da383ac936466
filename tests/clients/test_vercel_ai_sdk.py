"""The Vercel AI SDK with its providers for chat completions, responses and messages, in vercel.mjs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coding_task import CodingGateway
from support.node_clients import FOLDER, LIMIT_S, ClientProcess, installed
from support.scripted_model import ScriptedModelGateway
from support.tenant_gateway import TenantGateway

APIS = ("chat", "responses", "messages", "compatible")
HELLO = "Hello! I have read 1 words. What can I do for you today?"
WEATHER = "The tool says: 18 degrees in Oslo"
THOUGHT = "Let me think about this step by step."


def sdk(gateway: TenantGateway, home: Path, api: str, *tasks: str, key: str | None = None) -> ClientProcess:
    installed("ai/package.json")
    variables = {"GATEWAY_URL": gateway.url, "GATEWAY_KEY": key or gateway.key("coders")}
    return ClientProcess(gateway, ["node", str(FOLDER / "vercel.mjs"), api, *tasks], home, variables)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedModelGateway]:
    with ScriptedModelGateway(tmp_path_factory.mktemp("vercel")) as gateway:
        yield gateway


@pytest.fixture(scope="module", params=APIS)
def found(gateway: ScriptedModelGateway, request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all tasks with one API, and its name."""
    tasks = ("whole", "stream", "tools", "streamedTools", "object", "reasoning", "refused")
    with sdk(gateway, tmp_path_factory.mktemp("home"), request.param, *tasks) as client:
        results: dict[str, Any] = json.loads(client.output())
    return {**results, "api": request.param}


@pytest.mark.parametrize("task", ["whole", "stream"])
def test_a_text_arrives_with_its_end_and_its_usage(found: dict[str, Any], task: str) -> None:
    answer = found[task]
    assert (answer["text"], answer["finishReason"]) == (HELLO, "stop")
    assert answer["usage"]["outputTokens"] == 14
    assert answer["usage"]["inputTokens"] == (3 if task == "whole" else 1)


def test_a_streamed_text_arrives_in_parts_without_an_error(found: dict[str, Any]) -> None:
    stream = found["stream"]
    assert stream["joined"] == HELLO
    assert stream["types"] == ["start", "start-step", "text-start", "text-delta", "text-end", "finish-step", "finish"]
    assert stream["errors"] == found["streamedTools"]["errors"] == []


@pytest.mark.parametrize("task", ["tools", "streamedTools"])
def test_a_tool_is_called_and_its_result_is_read(found: dict[str, Any], task: str) -> None:
    first, second = found[task]["steps"]
    assert first["calls"] == [{"toolName": "weather", "input": {"city": "Oslo"}}]
    assert first["results"] == ["18 degrees in Oslo"]
    assert second["text"] == found[task]["text"] == WEATHER
    assert found[task]["finishReason"] == "stop"


def test_an_object_has_the_shape_of_its_schema(found: dict[str, Any]) -> None:
    assert found["object"] == {"name": "Ada", "age": 36}


def test_reasoning_is_no_part_of_the_text(found: dict[str, Any]) -> None:
    assert found["reasoning"]["text"].startswith("Hello!")
    # Of OpenAI's own APIs the SDK reads summaries of reasoning only, which engines do not write.
    if found["api"] in ("messages", "compatible"):
        assert found["reasoning"]["whole"] == found["reasoning"]["streamed"] == THOUGHT


def test_a_refusal_is_an_error_of_the_sdk_with_the_gateways_message(found: dict[str, Any]) -> None:
    assert (found["refused"]["name"], found["refused"]["status"]) == ("AI_APICallError", 400)
    assert found["refused"]["message"] == "`x-inferry-lane` must be P0, P1 or P2"


@pytest.mark.parametrize("api", APIS)
def test_an_abort_signal_cancels_the_call_at_the_engine(api: str, tmp_path: Path) -> None:
    with CodingGateway(tmp_path) as gateway:
        gateway.stalls = True
        key = gateway.key("coders")
        with sdk(gateway, tmp_path, api, "aborted", key=key) as client:
            assert gateway.left.wait(LIMIT_S)
            assert json.loads(client.output()) == {"aborted": {"last": "abort"}}
        [run] = gateway.ended_runs(key)
    assert run["id"] == f"vercel-{api}"
    assert run["jobs"]["cancelled"] == run["jobs"]["ended"] == 1
