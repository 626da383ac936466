"""`inferry plan` as people and scripts use it, and the guide to it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.plan import plan_app

GUIDE = (Path(__file__).parents[2] / "docs" / "howto" / "size-a-fleet.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ inferry plan (.*?)\n(.*?)```", GUIDE, re.DOTALL)


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(plan_app, list(arguments), env={"COLUMNS": "100"})


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_guide_shows_what_the_command_prints(command: str, shown: str) -> None:
    done = plan(*shlex.split(command))
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def test_the_guide_has_an_example_of_every_command() -> None:
    assert {command.split()[0] for command, _ in EXAMPLES} == {"wait", "batch", "utilisation", "workers"}


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES])
def test_every_answer_can_be_had_as_json(command: str) -> None:
    done = plan(*shlex.split(command), "--json")
    assert done.exit_code == 0
    assert all(value >= 0 for value in json.loads(done.stdout).values())


def test_workers_names_the_percentile_it_was_asked_for() -> None:
    command = "workers --rate 5 --service-ms 1000 --target-ms 100 --percentile 99 --json"
    answer = json.loads(plan(*command.split()).stdout)
    assert answer["p99_wait_ms"] <= 100


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("wait --rate 12 --service-ms 2000", "2400%: the queue grows without bound"),
        ("wait --rate 0 --service-ms 2000", "--rate must be above 0, got 0"),
        ("wait --rate nan --service-ms 2000", "--rate must be above 0, got nan"),
        ("wait --rate 1 --service-ms 20 --arrival-cv -1", "--arrival-cv must be between 0 and 1000, got -1"),
        ("wait --rate 5 --service-ms 100 --arrival-cv 1e200", "--arrival-cv must be between 0 and 1000, got 1e+200"),
        ("wait --rate 5 --service-ms 100 --service-cv nan", "--service-cv must be between 0 and 1000, got nan"),
        (
            "workers --rate 5 --service-ms 9 --target-ms 10 --service-cv 1e200",
            "--service-cv must be between 0 and 1000",
        ),
        ("utilisation --arrival-cv 1e200", "--arrival-cv must be between 0 and 1000"),
        ("batch --rate 400 --fixed-ms 8 --each-ms 3", "no batch of up to 1024 keeps up with 400 jobs per second"),
        ("batch --rate 400 --fixed-ms 8 --each-ms 0.4 --target-ms 9", "within 9 ms"),
        ("workers --rate 4 --service-ms 8 --target-ms 9 --percentile 100", "--percentile must be between 0 and 100"),
        ("workers --rate 1e9 --service-ms 8 --target-ms 9", "exceed what the formulas cover"),
        ("utilisation --wait-per-service 0", "--wait-per-service must be above 0"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(command: str, says: str) -> None:
    done = plan(*command.split())
    assert done.exit_code == 2
    assert says in done.stderr
    assert not done.stdout
