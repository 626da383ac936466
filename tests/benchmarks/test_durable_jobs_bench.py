"""A slice of the benchmark of durable jobs: all end, each is delivered once, and Redis keeps nothing of them."""

from benchmarks.durable_jobs import measure


def test_all_jobs_end_and_redis_is_empty_afterwards() -> None:
    found = measure(600)
    assert found["deliveries"]["taken"] == found["deliveries"]["done"] == found["jobs"] == 600
    assert found["redis_mb_afterwards"] < found["redis_mb_at_most"] + 0.5
