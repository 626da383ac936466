"""Codex itself, as `codex exec`, against the gateway and a scripted model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coding_task import PROMPT, SOLVED, CodingGateway, write_files
from support.delegation import DELEGATE, DELEGATED, delegate
from support.node_clients import LIMIT_S, ClientProcess, installed

CONFIG = """\
model = "m"
model_provider = "inferry"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.inferry]
name = "Inferry"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "INFERRY_API_KEY"
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[CodingGateway]:
    (tmp_path / "home" / ".codex").mkdir(parents=True)
    write_files(tmp_path / "home")
    with CodingGateway(tmp_path, delegate) as gateway:
        (tmp_path / "home" / ".codex" / "config.toml").write_text(CONFIG.format(url=gateway.url))
        yield gateway


def codex(gateway: CodingGateway, key: str, home: Path, prompt: str = PROMPT) -> ClientProcess:
    # The script's commands need no sandbox, and not every machine permits Codex to make one.
    flags = ["--skip-git-repo-check", "--json", "--sandbox", "danger-full-access"]
    command = [installed(".bin/codex"), "exec", *flags, prompt]
    return ClientProcess(gateway, command, home, {"INFERRY_API_KEY": key})


def said(events: list[dict[str, Any]]) -> list[str]:
    return [one["item"]["text"] for one in events if one.get("item", {}).get("type") == "agent_message"]


def test_codex_repairs_a_program_with_tool_calls_and_its_session_is_a_run(
    gateway: CodingGateway, tmp_path: Path
) -> None:
    key = gateway.key("coders")
    with codex(gateway, key, tmp_path / "home") as client:
        events = [json.loads(line) for line in client.output().splitlines()]
    assert said(events)[-1] == SOLVED
    assert "a + b" in (tmp_path / "home" / "calc.py").read_text()
    thread = next(one["thread_id"] for one in events if one["type"] == "thread.started")
    [run] = gateway.ended_runs(key)
    assert run["id"] == f"codex:{thread}"
    assert run["jobs"]["done"] == run["jobs"]["ended"] == len(gateway.upstream.bodies) == 4
    assert events[-1]["type"] == "turn.completed"
    usage, tokens = events[-1]["usage"], run["tokens"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (tokens["prompt"], tokens["output"])


def test_a_sub_agent_of_codex_is_a_sub_run(gateway: CodingGateway, tmp_path: Path) -> None:
    key = gateway.key("coders")
    with codex(gateway, key, tmp_path / "home", DELEGATE) as client:
        events = [json.loads(line) for line in client.output().splitlines()]
    assert said(events)[-1] == DELEGATED
    assert "a + b" in (tmp_path / "home" / "calc.py").read_text()
    below, run = sorted(gateway.ended_runs(key), key=lambda one: one["parent_run_id"] is None)
    assert (run["parent_run_id"], below["parent_run_id"]) == (None, run["id"])
    # A slow sub-agent is waited for in several calls.
    assert run["jobs"]["done"] >= 3
    assert below["jobs"]["done"] == 4


def test_an_interrupt_of_codex_cancels_its_call_at_the_engine(gateway: CodingGateway, tmp_path: Path) -> None:
    key = gateway.key("coders")
    gateway.stalls = True
    with codex(gateway, key, tmp_path / "home") as client:
        assert gateway.stalled.wait(LIMIT_S)
        client.interrupt()
        assert gateway.left.wait(LIMIT_S)
        client.wait()
    [run] = gateway.ended_runs(key)
    assert run["jobs"]["cancelled"] == run["jobs"]["ended"] == 1
    assert run["latest_steps"][0]["error"] == "client_closed"
    assert not gateway.upstream.running
