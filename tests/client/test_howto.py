"""The Python examples of the guides run as they are, but for the URL, the key and the model."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.children import environment
from support.scripted_model import ScriptedModelGateway

GUIDES = Path(__file__).parents[2] / "docs" / "howto"
EXAMPLES = [
    (guide, number, code)
    for guide in ("client", "langchain", "openai-agents")
    for number, code in enumerate(
        re.findall(r"<!-- run: python -->\n```python\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)
    )
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with ScriptedModelGateway(tmp_path_factory.mktemp("guides")) as serving:
        yield serving.url, serving.key("acme")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize(("guide", "number", "code"), EXAMPLES, ids=[f"{one[0]}-{one[1]}" for one in EXAMPLES])
def test_an_example_runs(guide: str, number: int, code: str, gateway: tuple[str, str]) -> None:
    url, key = gateway
    code = code.replace("http://127.0.0.1:8000", url).replace('"KEY"', f'"{key}"').replace('"MODEL"', '"m"')
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(LANGSMITH_TRACING="false"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
