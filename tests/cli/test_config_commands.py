"""`inferry config` against a running gateway and its ledger."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from inferry.cli.main import app
from inferry.domain.ledger import LedgerEntry, Outcome
from support.scripted_gateway import ScriptedGateway

STABLE = {"P1": {"ttft_ms": 1000, "itl_ms": 1000}}
HELD = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 3000, "max_wait_ms": 3000}}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path, {"lanes": STABLE}) as serving:
        yield serving


def write(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


def record_traffic(gateway: ScriptedGateway, calls: int) -> None:
    """Calls of the last minutes, as the ledger has them."""
    now, recorder = gateway.service.gateway.wall(), gateway.service.gateway._recorder
    for number in range(calls):
        recorder.record(
            LedgerEntry(
                job_id=f"j{number}",
                attempt=1,
                tenant="t",
                run_id=f"r{number}",
                step_id="s",
                model="m",
                lane="P1",
                outcome=Outcome.DONE,
                ended_at=now - number,
                prompt_tokens=50,
                output_tokens=5,
                queue_ms=1.0,
                first_token_ms=50.0,
                total_ms=100.0,
                attained=True,
                engine_batch=1.0,
            )
        )
    assert recorder.flush(60)


def test_settings_are_compared_applied_listed_and_rolled_back(gateway: ScriptedGateway, tmp_path: Path) -> None:
    new = write(tmp_path / "new.yaml", {"lanes": {"P1": {**STABLE["P1"], "max_batch": 5}}, "prices": {}})
    at = ("--url", gateway.url)
    assert run("diff", new, *at).stdout == "lanes.P1.max_batch: 64 -> 5\n"
    applied = run("apply", new, "--no-try", "--note", "smaller batches", *at)
    assert applied.stdout == "version 2 is active\n", applied.output
    assert "prices" in applied.stderr
    assert run("diff", new, *at).stdout == "no difference\n"
    listed = run("history", *at).stdout
    assert "smaller batches" in listed
    assert json.loads(run("history", "--json", *at).stdout)["active"] == 2
    assert run("rollback", *at).stdout == "version 1 is active\n"
    latest = run("history", *at).stdout.splitlines()[1]
    assert "rollback" in latest
    assert "configuration file" not in latest, "the note of the version is not the reason of the rollback"
    refused = run("rollback", *at)
    assert (refused.exit_code, "version 2 was rolled back" in refused.output.replace("\n", " ")) == (1, True)
    tried = run("apply", "--version", 2, "--share", 0.5, *at)
    assert tried.stdout == "version 1 is active; version 2 for 50% of the runs\n", tried.output
    compared = run("compare", *at).stdout
    assert compared == "version 2 against 1: too few ended runs yet; a measure needs two of each version\n"


def test_a_change_says_which_trial_it_has_ended(gateway: ScriptedGateway, tmp_path: Path) -> None:
    at = ("--url", gateway.url)
    files = [
        write(tmp_path / f"{size}.yaml", {"lanes": {"P1": {**STABLE["P1"], "max_batch": size}}}) for size in (5, 6)
    ]
    first, second = (run("apply", one, "--no-try", "--share", 0.5, *at) for one in files)
    assert first.stdout == "version 1 is active; version 2 for 50% of the runs\n", first.output
    shown = "version 1 is active; version 3 for 50% of the runs; the trial of version 2 has ended\n"
    assert second.stdout == shown, second.output
    assert run("apply", "--version", 3, *at).stdout == "version 3 is active; the trial of version 3 has ended\n"
    assert run("apply", "--version", 2, *at).stdout == "version 2 is active\n"


def test_try_predicts_from_the_ledger_and_apply_stops_at_a_worse_prediction(
    gateway: ScriptedGateway, tmp_path: Path
) -> None:
    record_traffic(gateway, 100)
    new = write(tmp_path / "new.yaml", {"lanes": HELD})
    where = ("--ledger", gateway.config.ledger)
    predicted = json.loads(run("try", new, "--json", *where).stdout)
    assert predicted["calls"] == 100
    assert predicted["current"]["P1"]["attainment"] == 1.0
    assert predicted["new"]["P1"]["attainment"] < 0.9
    assert predicted["measured"]["P1"]["ttft_p50"] == 0.05
    shown = run("try", new, *where).stdout
    assert "points" in shown
    assert ("measured" in shown, "warning" in shown) == (True, False)
    stopped = run("apply", new, *where, "--url", gateway.url)
    assert (stopped.exit_code, "attainment of P1 would fall" in stopped.output.replace("\n", " ")) == (1, True)
    assert json.loads(run("history", "--json", "--url", gateway.url).stdout)["active"] == 1


def test_mistakes_are_named(gateway: ScriptedGateway, tmp_path: Path) -> None:
    at = ("--url", gateway.url)
    assert "FILE or a --version" in run("apply", *at).output
    assert "none of the sections" in run("diff", write(tmp_path / "a.yaml", {"prices": {}}), *at).output
    assert "P9" in run("diff", write(tmp_path / "b.yaml", {"lanes": {"P9": {}}}), *at).output
    assert "cannot read" in run("diff", tmp_path / "missing.yaml", *at).output
    assert run("compare", *at).exit_code == 1


def test_mistakes_in_the_file_are_named_as_by_check_config_and_before_the_gateway_is_asked(tmp_path: Path) -> None:
    at = ("--url", "http://127.0.0.1:9")
    wrong = write(tmp_path / "wrong.yaml", {"lanes": {"P1": {"tft_ms": 1}}})
    assert "unknown key `lanes.P1.tft_ms`; did you mean `ttft_ms`?" in run("diff", wrong, *at).output
    assert "missing.yaml" in run("diff", tmp_path / "missing.yaml", *at).output
