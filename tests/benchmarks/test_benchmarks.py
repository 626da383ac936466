"""Every benchmark can be imported, and names what it needs beyond the repository."""

from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHES, main
from benchmarks.harbor_reference import REFERENCE, matches_reference, workload_digest
from benchmarks.result_files import RESULTS
from benchmarks.simulator import USED_FOR_TURNS, flags_of, frontend_of, recordings
from benchmarks.trace_files import AZURE, SOURCES, VARIABLE, find_trace, find_traces, trace_file
from inferry.sim.harbor import harbor

NEEDS_MANY_CORES = ("processes",)
"""Its figures say nothing on a machine with two cores, and none are kept from one."""


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_is_imported_and_measures_without_arguments(name: str) -> None:
    signature(import_module(f"benchmarks.{name}").measure).bind()
    kept = RESULTS / f"{name.replace('_', '-')}.json"
    assert kept.is_file() or name in NEEDS_MANY_CORES, "its figures are kept"


def test_an_unknown_benchmark_is_refused_with_the_list_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path", "nothing"]) == 2
    told = capsys.readouterr().out
    assert "unknown benchmark nothing" in told
    assert all(f"  {name}: " in told for name in BENCHES)


def test_a_benchmark_may_be_named_as_its_results_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings-ab", "nothing"]) == 2
    assert "unknown benchmark nothing;" in capsys.readouterr().out


def test_the_harbor_workloads_equal_the_reference() -> None:
    assert [len(digests) for digests in REFERENCE.values()] == [10, 10]
    assert matches_reference(7) == {"seed": 7, "newer": True, "simpler": True}
    assert workload_digest(harbor(7, digests=299)) != REFERENCE["newer"][7]


def test_the_recorded_rows_are_in_the_repository() -> None:
    rows = recordings()
    assert len(rows) == 8
    assert set(USED_FOR_TURNS) <= {row["label"] for row in rows}
    for row in rows:
        assert flags_of(row).max_num_seqs == 256
        assert frontend_of(row["label"])


def test_a_missing_trace_is_an_error_that_names_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for directory in (None, tmp_path):
        if directory is not None:
            monkeypatch.setenv(VARIABLE, str(directory))
        with pytest.raises(SystemExit, match=f"Set {VARIABLE}") as refused:
            trace_file(AZURE)
        assert all(name in str(refused.value) for name in SOURCES)
        assert find_trace(AZURE) is None
        assert "left out" in capsys.readouterr().out
    (tmp_path / AZURE).touch()
    assert find_trace(AZURE) == trace_file(AZURE) == tmp_path / AZURE
    assert find_traces() == [tmp_path / AZURE]
