"""The guide to the simulator: its commands run, and print what it shows; figures may change a little."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferry.cli.main import app

GUIDE = (Path(__file__).parents[2] / "docs" / "howto" / "simulate.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ inferry (.*?)\n(.*?)```", GUIDE, re.DOTALL)
FILES = re.findall(r"```yaml\n# (\S+)\n(.*?)```", GUIDE, re.DOTALL)


def words(text: str) -> set[str]:
    """Everything but figures and their units, and the table's verdicts."""
    return {word for word in re.findall(r"[A-Za-z][\w,.:-]*", text) if word not in {"ms", "s", "yes", "no", "worker"}}


def attainments(text: str) -> list[float]:
    """The percentages with a fraction, in order."""
    return [float(found) for found in re.findall(r"(\d+\.\d+)%", text)]


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_guide_shows_what_the_command_prints(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        Path(name).write_text(text)
    rows = "".join(f"{number * 100},{300 + 37 * number % 2000},{5 + number % 20}\n" for number in range(120))
    Path("calls.csv").write_text(f"t_ms,input_tokens,output_tokens\n{rows}")
    done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert words(done.stdout) == words(shown)
    assert attainments(done.stdout) == pytest.approx(attainments(shown), abs=3.0)
    assert done.stdout.splitlines()[0].split() == shown.splitlines()[0].split()


def test_there_are_examples_of_both_commands() -> None:
    assert {command.split()[0] for command, _ in EXAMPLES} == {"simulate", "plan"}
