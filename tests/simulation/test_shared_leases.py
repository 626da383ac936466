"""Limits shared by gateways, and ownership of a domain: seeded schedules with losses, pauses, crashes and restarts.

`make lease-schedules` explores more of them (SCHEDULES, FIRST_SCHEDULE).
"""

import os

import pytest

from simulation.lease_world import TOKENS, LeaseWorld
from simulation.ownership_world import REPLACED_WITHIN_S, OwnershipWorld

FIRST = int(os.environ.get("FIRST_SCHEDULE", "0"))
SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
BATCH = 50
BATCHES = range(FIRST, FIRST + SCHEDULES, BATCH)
SUB_AGENT_SEEDS = 200


@pytest.mark.parametrize("first", BATCHES)
def test_spent_and_leased_never_exceed_a_ceiling_and_grants_return_to_zero(first: int) -> None:
    for seed in range(first, first + BATCH):
        world = LeaseWorld(seed)
        world.play()
        assert not any(one.calls for one in world.gateways), seed
        assert world.held_by_live() == 0, seed
        settled, held = world.authority.totals(TOKENS)
        assert settled + held >= world.used_tokens, seed


@pytest.mark.parametrize("first", range(0, SUB_AGENT_SEEDS, BATCH))
def test_64_sub_agents_over_three_gateways_never_exceed_the_ceiling_of_their_run(first: int) -> None:
    for seed in range(first, first + BATCH):
        world = LeaseWorld(seed, agents=64, calls=2)
        world.play(until_s=120.0)  # all calls have ended
        assert world.used_tokens <= world.ceiling, seed
        assert world.held_by_live() == 0, seed


def test_without_faults_gateways_use_nearly_all_of_a_ceiling() -> None:
    for seed in range(20):
        world = LeaseWorld(seed, agents=64, calls=4, faults=False, ceiling_share=0.3)
        world.play()
        assert world.refused, seed
        assert 0.9 * world.ceiling <= world.used_tokens <= world.ceiling, (seed, world.used_tokens, world.ceiling)


@pytest.mark.parametrize("first", BATCHES)
def test_two_owners_never_send_at_the_same_time(first: int) -> None:
    for seed in range(first, first + BATCH):
        world = OwnershipWorld(seed)
        world.plan_faults(30.0)
        world.play()
        assert world.sends, seed


@pytest.mark.parametrize("seed", range(100))
def test_a_dead_owner_is_replaced_within_five_seconds(seed: int) -> None:
    world = OwnershipWorld(seed, loses_messages=False)
    for at in (8.0, 16.0, 24.0):
        world.at(at + seed / 50, world.crash_owner)
    world.play()
    assert len(world.gaps) == 4
    assert max(world.gaps) <= REPLACED_WITHIN_S
