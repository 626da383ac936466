"""What is kept of seeded runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result_files
from support import seed_results
from support.seed_results import SeedResults


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path / "whole")
    monkeypatch.setattr(seed_results, "PARTIAL", tmp_path / "partial")


def _read(path: Path) -> Any:
    return json.loads(path.read_text())["result"]


def test_a_part_of_a_results_file_says_which_seeds_failed_and_why_and_leaves_the_other_parts() -> None:
    batches, jobs = (SeedResults("killed", module, 7, whole=1) for module in ("killed_batches", "killed_jobs"))
    batches.add(7, problem=None, faults=["kill", "kill"], restart=1.234)
    assert batches.write()
    jobs.add(7, problem=None, faults=["kill"], restart=2.0)
    jobs.add(8, problem="job 3 is charged 2 times", faults=["kill"])
    assert not jobs.write()
    found = _read(result_files.RESULTS / "killed.json")
    assert (found["killed_batches"]["passed"], found["killed_batches"]["longest_s"]) == (1, {"restart": 1.23})
    part = found["killed_jobs"]
    assert (part["first_seed"], part["played"], part["passed"], part["failed_seeds"]) == (7, 2, 1, [8])
    assert part["problems"] == {"8": "job 3 is charged 2 times"}
    assert part["faults"] == {"kill": 2}


def test_fewer_seeds_than_a_whole_run_do_not_replace_evidence(tmp_path: Path) -> None:
    results = SeedResults("chaos", "chaos_cluster", 1, whole=2)
    results.add(1, problem=None)
    results.write()
    assert results.path == tmp_path / "partial" / "chaos.json"
    assert _read(results.path)["chaos_cluster"]["played"] == 1
    assert not (tmp_path / "whole").exists()
    results.add(2, problem=None)
    results.write()
    assert results.path == tmp_path / "whole" / "chaos.json"
    assert _read(results.path)["chaos_cluster"]["played"] == 2


def test_a_long_problem_is_cut_off() -> None:
    results = SeedResults("chaos", "chaos_cluster", 1, whole=1)
    results.add(1, problem="x" * 100_000)
    results.write()
    assert _read(results.path)["chaos_cluster"]["problems"] == {"1": "x" * seed_results.LONGEST_PROBLEM}


def test_added_seeds_keep_the_runs_before_them(tmp_path: Path) -> None:
    for first, adds in ((7, True), (8, True), (9, True), (1, False)):
        results = SeedResults("killed", "killed_jobs", first, whole=1, adds=adds)
        for _ in range(2):  # it is written after every seed
            results.add(first, problem=None)
            results.write()
        assert results.path == tmp_path / "whole" / "killed.json"
        part = _read(results.path)["killed_jobs"]
        assert (part["first_seed"], part["played"]) == (first, 2)
        earlier = [one["first_seed"] for one in part.get("earlier", [])]
        assert earlier == (list(range(7, first)) if adds else [])
