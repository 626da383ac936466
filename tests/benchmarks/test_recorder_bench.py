"""The benchmark of the recorder counts every row, and says which rows it expected."""

from pathlib import Path

import pytest

from benchmarks import recorder


def test_every_call_and_every_handed_over_attempt_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "WARM_UP_S", 0.2)
    monkeypatch.setattr(recorder, "CALLS_PER_S", 50.0)
    found = recorder._measured(f"sqlite:///{tmp_path / 'ledger.db'}", seconds=0.5, pairs=1)
    assert found["expected_rows"] == 10 + 3 * 25 + 1500, "warm-up, the calls of three arms, attempts of one"
    assert (found["lost_rows"], found["failed_calls"]) == (0, 0)
    assert found["recorder"]["accepted"] == found["recorder"]["written"]
    assert set(found["pairs"][0]) == set(recorder.ARMS)
    assert found["p99_ratio"] > 0
