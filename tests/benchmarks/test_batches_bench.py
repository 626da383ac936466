"""A slice of the benchmark of batches: everything completes, and memory does not grow with the number of items."""

from benchmarks.batches import measure

ITEMS = 3000
MAX_GROWTH_MB = 60.0


def test_memory_is_bounded_and_a_cancelled_batch_stops() -> None:
    found = measure(ITEMS, idle_probes=5)
    assert found["items"] == ITEMS
    assert found["memory_most_mb"] - found["memory_before_mb"] < MAX_GROWTH_MB
    counts = found["cancel"]["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == ITEMS
    assert counts["failed"] > 0
