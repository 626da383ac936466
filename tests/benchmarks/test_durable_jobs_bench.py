"""A slice of the benchmark of durable jobs: all end, each is delivered once, and Redis keeps nothing of them."""

from pathlib import Path

from benchmarks.durable_jobs import measure_with


def test_all_jobs_end_and_redis_is_empty_afterwards(tmp_path: Path) -> None:
    found = measure_with(f"sqlite:///{tmp_path}/ledger.db", 600)
    assert found["deliveries"]["taken"] == found["deliveries"]["done"] == found["jobs"] == 600
    assert found["redis_mb_afterwards"] < found["redis_mb_at_most"] + 0.5
