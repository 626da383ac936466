from inferry.durable.gateway_work import MAX_ROWS, CollectedRows
from ledger.builders import an_entry


def test_rows_of_every_job_of_a_call_are_taken_with_its_work() -> None:
    rows = CollectedRows()
    rows.append([an_entry("job_a-1"), an_entry("job_a-1-2"), an_entry("job_ab-1"), an_entry("job_b-1")])
    assert sorted(entry.job_id for entry in rows.take("job_a")[0]) == ["job_a-1", "job_a-1-2"]
    assert [entry.job_id for entry in rows.take("job_b")[0]] == ["job_b-1"]
    assert rows.take("job_a")[0] == []


def test_rows_of_work_that_is_never_reported_are_bounded() -> None:
    rows = CollectedRows()
    for number in range(MAX_ROWS + 5):
        rows.append([an_entry(f"job_{number}-1")])
    assert rows.take("job_0")[0] == []
    assert len(rows.take(f"job_{MAX_ROWS}")[0]) == 1
