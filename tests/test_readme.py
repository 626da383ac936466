"""The README's examples run, as they stand, against a gateway on a port of the test's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inferry.cli.config.schema import parse
from support.children import environment
from support.serving import Serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- run: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> object:
    directory = tmp_path_factory.mktemp("readme")
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["inferry-tiny"]}
    config = {"workers": [worker], "ledger": f"sqlite:///{directory / 'inferry.db'}"}
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


def test_the_configuration_shown_is_one() -> None:
    import yaml

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert len(parse(yaml.safe_load(block)).workers) == 2


def test_every_figure_names_a_results_file_that_exists() -> None:
    named = re.findall(r"benchmarks/results/([\w.-]+\.json)", README)
    assert named
    for name in named:
        assert (ROOT / "benchmarks" / "results" / name).is_file()
