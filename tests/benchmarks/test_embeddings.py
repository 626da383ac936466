"""The embeddings benchmark in virtual time: what the scheduler's window is worth, whatever the machine."""

from benchmarks.embeddings import CONCURRENT, MIN_RATIO, WINDOW_MS, virtual


def test_500_clients_have_five_times_the_throughput_of_one_and_wait_no_longer_than_the_window() -> None:
    alone, together = virtual(1, "adaptive"), virtual(CONCURRENT, "adaptive")
    assert together["calls_per_s"] >= MIN_RATIO * alone["calls_per_s"]
    assert together["calls_per_pass"] >= 50
    assert together["queue_ms_p95"] <= together["queue_ms_max"] <= WINDOW_MS


def test_without_a_window_every_call_is_a_pass() -> None:
    assert virtual(CONCURRENT, "off")["calls_per_pass"] == 1
