"""Limits shared by gateways, and ownership of a domain: seeded schedules with losses, pauses, crashes and restarts.

`make lease-schedules` plays more of them (SCHEDULES, FIRST_SCHEDULE).
"""

import pytest

from simulation.lease_world import LeaseWorld
from simulation.ownership_world import REPLACED_WITHIN_S, OwnershipWorld
from support.lease_schedules import play_grants, play_ownership

SCHEDULES = 300
BATCH = 50
BATCHES = range(0, SCHEDULES, BATCH)
SUB_AGENT_SEEDS = 200


@pytest.mark.parametrize("first", BATCHES)
def test_spent_and_leased_never_exceed_a_ceiling_and_grants_return_to_zero(first: int) -> None:
    for seed in range(first, first + BATCH):
        play_grants(seed)


def test_grants_return_to_zero_also_where_the_last_call_ends_late_and_messages_are_slow_and_lost() -> None:
    faults = play_grants(46430)
    assert faults["lost message"]
    assert faults["crash of a gateway"] == 2


@pytest.mark.parametrize("seed", [31404, 37572])
def test_what_was_returned_just_before_the_loss_of_the_authority_is_not_spent_again(seed: int) -> None:
    """The authority has granted it to others, while the database still has it as a holding of the gateway."""
    faults = play_grants(seed)
    assert faults["loss of the authority's state"]


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
        play_ownership(seed)


@pytest.mark.parametrize("seed", range(100))
def test_a_dead_owner_is_replaced_within_five_seconds(seed: int) -> None:
    world = OwnershipWorld(seed, loses_messages=False)
    for at in (8.0, 16.0, 24.0):
        world.at(at + seed / 50, world.crash_owner)
    world.play()
    assert len(world.gaps) == 4
    assert max(world.gaps) <= REPLACED_WITHIN_S
