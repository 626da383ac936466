"""What a newcomer finds: the files that must be there, and nothing that speaks of another place."""

import re
import subprocess
from pathlib import Path

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


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    foreign = re.compile(rb"/(?:root|home/\w+|work)/(?!\.)\w")
    for path in tracked():
        if path == Path(__file__):
            continue
        assert not foreign.search(path.read_bytes()), path


def test_no_source_file_is_too_long() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= 530, f"{path} has {lines} lines: perhaps two rooms in one"
