"""`inferry dead-letters` shows what a running gateway has given up, and `inferry worker` says what it lacks."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from inferry.cli.main import app
from inferry.durable.dead_letters import DEAD_LETTER, DeadLetter
from support.scripted_gateway import ScriptedGateway

LETTER = DeadLetter(id="job_1", tenant="acme", model="m", reason="delivered 5 times", deliveries=5, at=1.0)


def test_dead_letters_are_listed_with_their_reason(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"auth": {"mode": "off"}}) as gateway:
        command = ["dead-letters", "--url", gateway.url]
        assert CliRunner().invoke(app, command).output == "no dead letters\n"
        documents = gateway.service.storage.documents
        gateway.run(documents.put("acme", DEAD_LETTER, "job_1", msgspec.json.encode(LETTER), ttl_s=None))
        shown = CliRunner().invoke(app, command).output
        assert "job_1" in shown
        assert "delivered 5 times" in shown
        found = msgspec.json.decode(CliRunner().invoke(app, [*command, "--json"]).output, type=list[DeadLetter])
        assert found == [LETTER]


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        (["--model", "m"], "k" * 16, "--redis and --gateway are required"),
        (["--redis", "redis://r", "--gateway", "http://g"], "short", "INFERRY_WORKER_KEY must have"),
        (["--redis", "redis://r", "--gateway", "http://g", "--model", "m"], "k" * 16, "give --upstream with --model"),
    ],
)
def test_a_worker_says_what_it_lacks(
    options: list[str], key: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERRY_WORKER_KEY", key)
    done = CliRunner().invoke(app, ["worker", *options])
    assert done.exit_code == 2
    assert problem in done.output
