"""`inferry callback-secrets`, on the database alone."""

import base64
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from inferry.cli.job_wiring import open_callback_secrets
from inferry.cli.main import app


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def run(ledger: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["callback-secrets", *arguments, "--ledger", ledger])


def test_a_secret_is_printed_once_alone_for_scripts_and_signs(ledger: str) -> None:
    result = run(ledger, "rotate", "acme", "--quiet")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    key = base64.b64decode(result.stdout.strip().removeprefix("whsec_"))
    with open_callback_secrets(ledger) as store:
        assert [one.key for one in store.valid("acme", 0.0)] == [key]
        assert "key" not in repr(store.valid("acme", 0.0))
    assert result.stdout.strip() not in run(ledger, "list", "--json").stdout


def test_a_rotation_names_the_earlier_secret_and_when_it_ends(ledger: str) -> None:
    first = json.loads(run(ledger, "rotate", "acme", "--json").stdout)
    assert (first["tenant"], first["status"], first["expires_at"]) == ("acme", "valid", None)
    second = run(ledger, "rotate", "acme", "--grace", "2h")
    assert f"The earlier secret, {first['id']}, ends at" in second.stderr
    third = run(ledger, "rotate", "acme", "--grace", "0s")
    assert "earlier" not in third.stderr
    run(ledger, "rotate", "globex", "--quiet")
    listed = json.loads(run(ledger, "list", "--tenant", "acme", "--json").stdout)
    assert [one["status"] for one in listed] == ["valid", "expired", "expired"]
    assert "globex" in run(ledger, "list").stdout


def test_a_grace_period_beyond_a_century_is_refused_and_nothing_is_stored(ledger: str) -> None:
    for _ in range(2):
        refused = run(ledger, "rotate", "acme", "--grace", "999999999999d")
        assert refused.exit_code == 2
        assert "is longer than 36500d" in " ".join(refused.stderr.split())
        run(ledger, "rotate", "acme", "--quiet")
    assert len(json.loads(run(ledger, "list", "--json").stdout)) == 2
    assert run(ledger, "list").exit_code == 0


def test_mistakes_end_the_command_with_a_message(ledger: str) -> None:
    assert "not a valid name" in run(ledger, "rotate", "a b").stderr
    assert run("sqlite:///:memory:", "list").exit_code == 2
    assert run("postgres://x", "list").exit_code == 2
