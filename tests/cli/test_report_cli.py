"""`inferry ledger report` as people and scripts use it."""

import csv
import io
import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.ledger import ledger_app
from inferry.domain.reports import REPORTS, RunBudget
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry

Command = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    url = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("INFERRY_LEDGER", url)
    now = time.time()
    with closing(AttemptStore(url)) as ledger:
        for number in range(6):
            ledger.append(
                [
                    an_entry(
                        number,
                        run_id=f"\x1b[31mrun-{number}[bold]",
                        ended_at=now - 3600 * (number + 1),
                        total_ms=2000,
                        queue_ms=100.0,
                        prompt_tokens=1000,
                        output_tokens=100,
                        cost_nanos=50_000_000 * number,
                    )
                ]
            )
    app = ledger_app(basis_of=lambda _: ({"acme": RunBudget(money=0.2)}, {}))
    return lambda *arguments: CliRunner().invoke(app, ["report", *arguments])


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_prints_a_table_json_and_csv(run: Command, name: str) -> None:
    shown = run(name)
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output
    found = json.loads(run(name, "--json").output)
    assert found["report"] == name
    table = list(csv.reader(io.StringIO(run(name, "--csv").output)))
    assert table[0] == [column["name"] for column in found["columns"]]
    assert len(table) == len(found["rows"]) + 1


def test_runs_are_shown_against_their_budget(run: Command) -> None:
    lines = run("runs").output.splitlines()
    assert "budget used" in lines[0]
    assert "·[31mrun-5[bold]" in "".join(lines)
    assert "125%" in lines[-1]


def test_the_period_and_the_rows_are_bounded(run: Command) -> None:
    assert len(json.loads(run("runs", "--json", "--since", "150m").output)["rows"]) == 2
    assert len(json.loads(run("runs", "--json", "--until", "150m").output)["rows"]) == 4
    limited = run("runs", "--limit", "1")
    assert "There are more rows" in limited.output
    assert run("runs", "--since", "1h", "--until", "2h").exit_code == 2
    assert run("runs", "--since", "200w").exit_code == 2


def test_a_given_budget_replaces_those_of_the_tenants(run: Command) -> None:
    weeks = json.loads(run("breaches", "--json", "--budget", "0.1").output)["rows"]
    assert sum(week["over_budget"] for week in weeks) == 3
    weeks = json.loads(run("breaches", "--json").output)["rows"]
    assert sum(week["over_budget"] for week in weeks) == 1


def test_an_unknown_report_is_named_with_the_known_ones(run: Command) -> None:
    result = run("everything")
    assert result.exit_code == 2
    assert "breaches" in result.output


@pytest.mark.parametrize(
    "options",
    [
        ("breaches", "--budget", "inf"),
        ("breaches", "--since", "1000000w", "--until", "999999w"),
        ("compare", "--before-since", "999999999w"),
        ("compare", "--before-since", "1d", "--before-until", "2d"),
    ],
)
def test_what_no_report_can_be_of_is_refused(run: Command, options: tuple[str, ...]) -> None:
    found = run(*options)
    assert found.exit_code == 2, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
