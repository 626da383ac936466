"""Shares and bounds against an engine in virtual time: the quick version of the fairness bench."""

from benchmarks import fairness
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS


def test_fifty_agents_get_what_one_gets_and_order_costs_next_to_nothing() -> None:
    figures = fairness.shares(30.0)
    assert 0.9 < figures.fleet_over_single < 1.1
    assert figures.jain_index >= 0.98
    assert figures.throughput_loss < 0.02


def test_at_three_times_overload_p0_waits_for_a_quantum_and_no_lane_starves() -> None:
    figures = fairness.bounds(10.0)
    assert 0 < figures.overtaken_by <= figures.overtaken_at_most
    assert figures.admitted["P0"] > 100 * QUANTUM_TOKENS / 2
    for lane in ("P1", "P2"):
        # It is owed its share of what goes above it and is never further behind than the cap of its credit.
        assert figures.admitted[lane] > 2 * QUANTUM_TOKENS
        assert figures.behind_its_share[lane] <= QUANTUM_TOKENS
