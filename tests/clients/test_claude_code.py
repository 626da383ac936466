"""Claude Code itself, as `claude -p`, against the gateway and a scripted model."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.coding_task import PROMPT, SOLVED, CodingGateway, write_files
from support.delegation import DELEGATE, DELEGATED, delegate
from support.node_clients import LIMIT_S, ClientProcess, installed

SESSION = str(uuid.UUID(int=15))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[CodingGateway]:
    (tmp_path / "home").mkdir()
    write_files(tmp_path / "home")
    with CodingGateway(tmp_path, delegate) as gateway:
        yield gateway


def claude(gateway: CodingGateway, key: str, home: Path, prompt: str = PROMPT) -> ClientProcess:
    program = installed("@anthropic-ai/claude-code-*/claude")
    flags = ["--model", "m", "--allowedTools", "Bash", "--output-format", "json", "--session-id", SESSION]
    variables = {
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return ClientProcess(gateway, [program, "-p", prompt, *flags], home, variables)


def test_claude_code_repairs_a_program_with_tool_calls_and_its_session_is_a_run(
    gateway: CodingGateway, tmp_path: Path
) -> None:
    key = gateway.key("coders")
    with claude(gateway, key, tmp_path / "home") as client:
        result = json.loads(client.output())
    assert (result["result"], result["is_error"], result["session_id"]) == (SOLVED, False, SESSION)
    assert "a + b" in (tmp_path / "home" / "calc.py").read_text()
    [run] = gateway.ended_runs(key)
    assert run["id"] == f"claude-code:{SESSION}"
    assert run["jobs"]["done"] == run["jobs"]["ended"] == len(gateway.upstream.bodies) == 4
    usage, tokens = result["usage"], run["tokens"]
    assert usage["output_tokens"] == tokens["output"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens["prompt"]


def test_a_sub_agent_of_claude_code_is_a_sub_run(gateway: CodingGateway, tmp_path: Path) -> None:
    key = gateway.key("coders")
    with claude(gateway, key, tmp_path / "home", DELEGATE) as client:
        assert json.loads(client.output())["result"] == DELEGATED
    assert "a + b" in (tmp_path / "home" / "calc.py").read_text()
    run, below = sorted(gateway.ended_runs(key), key=lambda one: len(one["id"]))
    assert below["id"].startswith(f"{run['id']}/")
    assert (run["parent_run_id"], below["parent_run_id"]) == (None, run["id"])
    assert (run["jobs"]["done"], below["jobs"]["done"], run["tree"]["jobs"]) == (2, 4, 6)


def test_an_interrupt_of_claude_code_cancels_its_call_at_the_engine(gateway: CodingGateway, tmp_path: Path) -> None:
    key = gateway.key("coders")
    gateway.stalls = True
    with claude(gateway, key, tmp_path / "home") as client:
        assert gateway.stalled.wait(LIMIT_S)
        client.interrupt()
        assert gateway.left.wait(LIMIT_S)
        client.wait()
    [run] = gateway.ended_runs(key)
    assert run["jobs"]["cancelled"] == run["jobs"]["ended"] == 1
    assert run["latest_steps"][0]["error"] == "client_closed"
    assert not gateway.upstream.running
