"""Sixty-four concurrent sub-agents of one run: they never overspend, return every lease, and do not wait."""

import pytest

from inferry.domain.callers import Caller
from inferry.domain.tenants import Tenant
from simulation.budgeted_runs import AGENTS, BudgetedSimulation, SubAgents, play, tokens_until

UNLIMITED = Caller(Tenant(name="a"))
SEEDS = 200
BATCH = 50


def check(seed: int) -> BudgetedSimulation:
    workload = SubAgents(seed)
    calls = sum(len(agent.calls) for agent in workload.agents)
    fault_sim = play(workload)
    gate = fault_sim.gate
    assert not fault_sim.open_jobs
    assert fault_sim.ended_jobs + fault_sim.refusals == calls
    assert not fault_sim.permits
    assert (gate.overrun_tokens, gate.overrun_nanos) == (0, 0)
    accounts = {id(account): account for permit in fault_sim.admitted for account in permit.leased_accounts}
    for account in accounts.values():
        assert (account.leased_tokens, account.leased_nanos, account.active_jobs) == (0, 0, 0)
    root = gate.run_report("a", "root")
    assert root is not None
    assert (root.spent_tokens, root.spent_nanos) == (fault_sim.charged_tokens, fault_sim.charged_nanos)
    books = gate._tenants.get("a")
    assert books is not None
    assert books.quotas.in_flight == 0
    return fault_sim


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_spent_and_leased_never_exceed_a_ceiling_whatever_fails(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            check(seed)
        except Exception as failure:
            raise AssertionError(f"seed {seed}: {failure}") from failure


def test_the_seeds_reach_refusals_stops_and_ends_without_charge() -> None:
    simulations = [check(seed) for seed in range(20)]
    assert sum(fault_sim.refusals for fault_sim in simulations) > 100
    assert sum(fault_sim.stops for fault_sim in simulations) > 20
    assert sum(entry.error_code == "worker_lost" for fault_sim in simulations for entry in fault_sim.entries) > 50
    assert sum(entry.error_code == "client_closed" for fault_sim in simulations for entry in fault_sim.entries) > 50
    assert any(fault_sim.refusals == fault_sim.stops == 0 for fault_sim in simulations)


def test_with_a_ceiling_far_away_sub_agents_are_as_fast_as_without_one() -> None:
    for seed in range(5):
        free = play(SubAgents(seed, trouble=False), UNLIMITED)
        bounded = play(SubAgents(seed, trouble=False, ceiling_share=5.0))
        assert free.most_in_flight == bounded.most_in_flight > 0.9 * AGENTS
        assert bounded.refusals == bounded.stops == 0
        assert bounded.written == free.written
        assert bounded.written_at[-1] <= free.written_at[-1] / 0.9


@pytest.mark.parametrize("lease_tokens", [16, 256])
def test_while_budget_is_left_sub_agents_do_not_wait_for_each_other(lease_tokens: int) -> None:
    """Until the first of them is refused or stopped, as much is written as without a ceiling. The leases of all of them
    together may be more than the ceiling, and what they might write is many times as much."""
    for seed in range(5):
        free = play(SubAgents(seed, trouble=False), UNLIMITED)
        bounded = play(SubAgents(seed, trouble=False, ceiling_share=0.7), lease_tokens=lease_tokens)
        assert bounded.bound_at is not None
        until = bounded.bound_at
        assert tokens_until(bounded.written_at, until) >= 0.9 * tokens_until(free.written_at, until) > 1_000
