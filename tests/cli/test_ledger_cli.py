"""`inferry ledger` as people and scripts use it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inferry.cli.formats import parse_duration
from inferry.cli.ledger import ledger_app
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry
from support.children import environment

Command = Callable[..., Any]  # typer does not always name its result type


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("INFERRY_LEDGER", url)
    return lambda *arguments: CliRunner().invoke(ledger_app(), arguments)


def kept(url: str, *entries: LedgerEntry) -> None:
    with closing(AttemptStore(url)) as ledger:
        ledger.append(entries)


def some_entries() -> list[LedgerEntry]:
    now = time.time()
    return [
        an_entry(
            f"0197a1b2c3d4{number:04}",
            tenant="acme-research" if number % 3 else "globex",
            run_id=f"nightly-triage-{number % 4}",
            step_id=f"step-{number}",
            lane=f"P{number % 3}",
            outcome=Outcome.FAILED if number == 7 else Outcome.DONE,
            error_code="worker_lost" if number == 7 else None,
            finish=None if number == 7 else "stop",
            ended_at=now - number * 400,
            prompt_tokens=812_345,
            cached_tokens=400_000,
            output_tokens=12_345,
            gpu_seconds=123.4,
            queue_ms=1234.5 * number,
            first_token_ms=45.6,
            total_ms=98_765.0,
            batch_size=16,
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("command", ["runs", "tenants", "jobs"])
def test_a_table_in_a_pipe_has_one_line_a_row_and_cuts_nothing_off(run: Command, url: str, command: str) -> None:
    entries = some_entries()
    kept(url, *entries)
    result = run(command)
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    names = {getattr(entry, {"runs": "run_id", "tenants": "tenant", "jobs": "job_id"}[command]) for entry in entries}
    assert all(any(name in line.split() for line in result.output.splitlines()) for name in names)


def test_the_table_of_runs_is_readable(run: Command, url: str) -> None:
    now = time.time()
    common = {"run_id": "triage", "prompt_tokens": 61_700, "cached_tokens": 20_000, "output_tokens": 450}
    waits = {"queue_ms": 8.25, "gpu_seconds": 0.75, "total_ms": 90_000.0, "cost_nanos": 12_500_000}
    kept(
        url,
        an_entry(1, ended_at=now - 600, **common, **waits),
        an_entry(2, ended_at=now - 590, step_id="step-2", outcome=Outcome.CANCELLED, **common),
    )
    head, line = run("runs").output.splitlines()
    assert " ".join(head.split()) == "tenant run lane steps tries in cached out GPU cost wait took model ended result"
    expected = "acme triage P1 2 2 123k 40.0k 900 750ms 0.0125 8.2ms 1m40 90% 9m ago 1 cancelled"
    assert " ".join(line.split()) == expected
    assert head.index(" in ") + 3 == line.index("123k") + 4, "numbers end where their heading ends"


def test_the_table_of_tenants_is_readable(run: Command, url: str) -> None:
    kept(url, an_entry(1, prompt_tokens=3_000_000, output_tokens=1_000_000, gpu_seconds=4000.0, batch_size=4))
    head, line = run("tenants").output.splitlines()
    assert " ".join(head.split()) == "tenant runs jobs in cached out GPU tokens/GPU-s wait batch failed cancelled"
    assert " ".join(line.split()) == "acme 1 1 3.0M 0 1.0M 1h06 1.0k – 4.0 0 0"  # noqa: RUF001


@pytest.mark.parametrize("command", ["runs", "tenants", "jobs"])
def test_json_is_one_array(run: Command, url: str, command: str) -> None:
    kept(url)
    assert json.loads(run(command, "--json").output) == []
    kept(url, *some_entries())
    rows = json.loads(run(command, "--json").output)
    assert {row["tenant"] for row in rows} == {"acme-research", "globex"}
    assert sum(row["prompt_tokens"] for row in rows) == 12 * 812_345


def test_filters_reach_the_ledger(run: Command, url: str) -> None:
    kept(url, *some_entries())
    assert len(json.loads(run("jobs", "--json", "--limit", "5").output)) == 5
    assert len(json.loads(run("jobs", "--json", "--since", "25m").output)) == 4
    assert len(json.loads(run("jobs", "--json", "--tenant", "globex").output)) == 4
    assert len(json.loads(run("runs", "--json", "--tenant", "globex", "--run", "nightly-triage-1").output)) == 1
    assert len(json.loads(run("tenants", "--json", "--tenant", "globex").output)) == 1


def test_a_ledger_that_does_not_exist_is_named_and_not_created(run: Command, tmp_path: Path) -> None:
    result = run("runs")
    assert result.exit_code == 2
    assert f"no ledger at {tmp_path}/ledger.db" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_empty_ledger_says_so(run: Command, url: str) -> None:
    kept(url)
    result = run("runs")
    assert (result.exit_code, result.output) == (0, "The ledger is empty.\n")
    assert run("jobs", "--tenant", "nobody").output == "No matching rows.\n"


def test_client_chosen_names_are_shown_without_markup_or_escapes(run: Command, url: str) -> None:
    kept(url, an_entry(1, tenant="[red]x[/nonsense]", run_id="a\x1b[2Jb\nc"))
    result = run("runs")
    assert result.exit_code == 0
    assert "[red]x[/nonsense]" in result.output
    assert "a·[2Jb·c" in result.output
    assert "\x1b" not in result.output


def test_the_caller_chooses_the_default_ledger(url: str, tmp_path: Path) -> None:
    kept(url, an_entry(1))
    asked: list[Path | None] = []

    def from_config(config: Path | None) -> str:
        asked.append(config)
        return url

    app = ledger_app(from_config)
    assert CliRunner().invoke(app, ["runs", "--config", "inferry.yaml"]).exit_code == 0
    assert CliRunner().invoke(app, ["runs"]).exit_code == 0
    assert CliRunner().invoke(app, ["runs", "--ledger", f"sqlite:///{tmp_path}/other.db"]).exit_code == 2
    assert asked == [Path("inferry.yaml"), None]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800), ("1.5H", 5400)]
)
def test_a_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "m", "-3m", "2 years", "1h30m"])
def test_an_invalid_duration_is_refused(text: str, run: Command) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)
    assert run("runs", f"--since={text}").exit_code == 2


def test_a_script_reads_while_a_gateway_writes(url: str) -> None:
    with closing(AttemptStore(url)) as gateway:
        gateway.append(some_entries())
        answer = subprocess.run(
            [sys.executable, "-W", "error", "-m", "inferry.cli.ledger", "runs", "--json"],
            env=environment(INFERRY_LEDGER=url),
            capture_output=True,
            check=True,
            timeout=120,
        )
        gateway.append([an_entry("afterwards")])
    assert answer.stderr == b""
    assert sum(run["jobs"] for run in json.loads(answer.stdout)) == 12
