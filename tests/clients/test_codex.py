"""Codex itself, as `codex exec`, against the gateway and a scripted model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.coding_task import PROMPT, SOLVED, CodingGateway, write_files
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
    with CodingGateway(tmp_path) as gateway:
        (tmp_path / "home" / ".codex" / "config.toml").write_text(CONFIG.format(url=gateway.url))
        yield gateway


def codex(gateway: CodingGateway, key: str, home: Path) -> ClientProcess:
    # The script's commands need no sandbox, and not every machine permits Codex to make one.
    flags = ["--skip-git-repo-check", "--json", "--sandbox", "danger-full-access"]
    command = [installed(".bin/codex"), "exec", *flags, PROMPT]
    return ClientProcess(gateway, command, home, {"INFERRY_API_KEY": key})


def test_codex_repairs_a_program_with_tool_calls_and_its_session_is_a_run(
    gateway: CodingGateway, tmp_path: Path
) -> None:
    key = gateway.key("coders")
    with codex(gateway, key, tmp_path / "home") as client:
        events = [json.loads(line) for line in client.output().splitlines()]
    said = [one["item"]["text"] for one in events if one.get("item", {}).get("type") == "agent_message"]
    assert said[-1] == SOLVED
    assert "a + b" in (tmp_path / "home" / "calc.py").read_text()
    thread = next(one["thread_id"] for one in events if one["type"] == "thread.started")
    run = gateway.ended_run(key)
    assert run["id"] == f"codex:{thread}"
    assert run["jobs"]["done"] == run["jobs"]["ended"] == len(gateway.upstream.bodies) == 4
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["output_tokens"] == run["tokens"]["output"] > 0


def test_an_interrupt_of_codex_cancels_its_call_at_the_engine(gateway: CodingGateway, tmp_path: Path) -> None:
    key = gateway.key("coders")
    gateway.stalls = True
    with codex(gateway, key, tmp_path / "home") as client:
        assert gateway.stalled.wait(LIMIT_S)
        client.interrupt()
        assert gateway.left.wait(LIMIT_S)
        client.wait()
    run = gateway.ended_run(key)
    assert run["jobs"]["cancelled"] == run["jobs"]["ended"] == 1
    assert run["latest_steps"][0]["error"] == "client_closed"
    assert not gateway.upstream.running
