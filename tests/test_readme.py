"""The README's examples run as they are, and every row of its table of claims names something that exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inferry.cli import docs
from inferry.cli.config.loader import parse
from inferry.cli.config_page import config_page
from inferry.observe.metric_table import METRIC_TABLE
from support.children import environment
from support.serving import Serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CLASSES = {
    '"Classify this ticket: I was charged twice this month."': "billing",
    '"Policy: no refund date. Check this reply: You will have your money back on Friday."': "violates: no refund date",
}
PRINTS = "print(answer.choices[0].message.content)"
(ANSWERS,) = re.findall(r"<!-- answers: triage -->\n```text\n(.*?)```", README, re.DOTALL)
EXAMPLES = re.findall(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> object:
    directory = tmp_path_factory.mktemp("readme")
    config = {"ledger": f"sqlite:///{directory / 'inferry.db'}"}
    with Serving(directory, config=config) as serving:
        yield serving, directory


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[f"{i}-{e[0]}" for i, e in enumerate(EXAMPLES)])
def test_an_example_runs(language: str, code: str, gateway: tuple[Serving, Path]) -> None:
    serving, directory = gateway
    code = code.replace("http://127.0.0.1:8000", serving.url).replace(
        ".venv/bin/inferry", f"{sys.executable} -m inferry"
    )
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error":{' not in done.stdout
    for prompt, expected in CLASSES.items():
        if prompt in code:
            assert expected in done.stdout, "the model's class of the example's ticket"
    if PRINTS in code:
        assert done.stdout == ANSWERS


def test_an_example_classifies_a_ticket_and_one_has_its_answers_below_it() -> None:
    assert any(prompt in code for _, code in EXAMPLES for prompt in CLASSES)
    assert sum(PRINTS in code for _, code in EXAMPLES) == 1
    assert ANSWERS.strip()


def test_the_configuration_shown_is_one() -> None:
    import yaml

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert len(parse(yaml.safe_load(block)).workers) == 2


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/figures.md"])
def test_every_figure_names_a_results_file_that_exists(page: str) -> None:
    table = (ROOT / page).read_text().split("igures\n", 1)[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| measurement")]
    assert rows
    for row in rows:
        named = re.findall(r"benchmarks/results/([\w.-]+\.json)", row)
        assert named, row
        assert all((ROOT / "benchmarks" / "results" / name).is_file() for name in named), row


# -- the table of claims -----------------------------------------------------------------------------------------------


def _claims() -> dict[str, list[str]]:
    """The names in the last column of "What works", by feature."""
    section = README.split("## What works\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {cells[0].strip(): re.findall(r"`([^`]+)`", cells[-1]) for cells in rows}


def _config_keys() -> set[str]:
    """Keys of the generated configuration page; those of worker sections as `workers[].key`."""
    keys: set[str] = set()
    worker = False
    for line in config_page().splitlines():
        if line.startswith("## "):
            worker = line.startswith("## `workers[]`")
            keys.update(re.findall(r"`(kind: [\w-]+)`", line))
        elif found := re.match(r"\| `([^`]+)` \|", line):
            keys.add(f"workers[].{found[1]}" if worker else found[1])
    return keys


KNOWN = (
    _config_keys()
    | set(json.loads(docs.pages()["openapi.json"])["paths"])
    | {name for name, _ in docs.commands()}
    | {metric.name for metric in METRIC_TABLE}
)


def test_there_are_claims() -> None:
    assert len(_claims()) >= 15


@pytest.mark.parametrize("feature", _claims())
def test_a_claim_names_configuration_endpoints_commands_or_metrics_that_exist(feature: str) -> None:
    named = _claims()[feature]
    assert named, "the row names nothing that can be looked up"
    assert [name for name in named if name not in KNOWN] == []


def test_a_claim_about_something_that_does_not_exist_is_found() -> None:
    assert {"lanes.<lane>.colour", "/v1/images", "inferry fly", "inferry_wishes_total", "kind: abacus"} & KNOWN == set()
