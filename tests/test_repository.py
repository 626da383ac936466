"""The files of the repository: required files, forbidden content, maximum lengths."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def test_the_repository_has_its_papers() -> None:
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".ci/run", "docs/adr/README.md"):
        assert (ROOT / name).is_file(), name
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_no_file_contains_a_path_of_a_machine() -> None:
    foreign = re.compile(rb"/(?:root|home/\w+|work)/(?!\.)\w")
    for path in tracked():
        if path == Path(__file__):
            continue
        assert not foreign.search(path.read_bytes()), path


FILE_LINES = 400
FUNCTION_LINES = 60


def sources(*roots: str) -> Iterator[tuple[str, str]]:
    for root in roots:
        for path in sorted((ROOT / root).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def file_lengths() -> dict[str, int]:
    return {name: len(text.splitlines()) for name, text in sources("src", "benchmarks", "training", "tests")}


def function_lengths() -> dict[str, int]:
    lengths: dict[str, int] = {}
    for path, text in sources("src", "benchmarks", "training", "tests"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                name, lines = f"{path} {node.name}", node.end_lineno - node.lineno + 1
                lengths[name] = max(lines, lengths.get(name, 0))
    return lengths


@pytest.mark.parametrize(
    ("measure", "limit"),
    [(file_lengths, FILE_LINES), (function_lengths, FUNCTION_LINES)],
    ids=["files", "functions"],
)
def test_no_file_and_no_function_is_too_long(measure: Callable[[], dict[str, int]], limit: int) -> None:
    too_long = {name: lines for name, lines in measure().items() if lines >= limit}
    assert not too_long, f"not under {limit} lines"
