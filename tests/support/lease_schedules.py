"""Seeded schedules of shared limits and ownership: `python -m support.lease_schedules FIRST COUNT`."""

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from simulation.lease_database import TOKENS
from simulation.lease_world import LeaseWorld
from simulation.ownership_world import OwnershipWorld
from support.seed_results import SeedResults

WHOLE = 10_000
"""Schedules whose results are kept as evidence."""


def play_grants(seed: int) -> Counter[str]:
    """Spent and leased never exceed a ceiling, and grants return to zero. Raises AssertionError."""
    world = LeaseWorld(seed)
    world.play()
    if not _is_settled(world):
        # Dead gateways hold what is left, so that one call after the other waits until it times out; or the last call
        # ended late, and messages are slow and lost.
        world.play(until_s=200.0)
    assert not _has_calls(world), f"calls of seed {seed} have not ended"
    assert world.held_by_live() == 0, f"grants of seed {seed} have not returned"
    settled, held = world.authority.totals(TOKENS)
    assert settled + held >= world.used_tokens, f"the authority of seed {seed} counts less than was used"
    return world.faults


def play_ownership(seed: int) -> Counter[str]:
    """Two owners never send at the same time. Raises AssertionError."""
    world = OwnershipWorld(seed)
    world.plan_faults(30.0)
    world.play()
    assert world.sends, f"nothing was sent in seed {seed}"
    return world.faults


def _is_settled(world: LeaseWorld) -> bool:
    generation = world.authority.generation
    is_known = all(one.protocol.generation == generation for one in world.gateways)
    return is_known and not _has_calls(world) and not world.held_by_live()


def _has_calls(world: LeaseWorld) -> bool:
    return any(one.calls for one in world.gateways)


def _outcome(play: Callable[[int], Counter[str]], seed: int) -> tuple[str | None, Counter[str]]:
    """The problem of a schedule, and how many faults of each kind it had."""
    try:
        return None, play(seed)
    except Exception as error:
        return repr(error), Counter()


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    seeds, is_good = range(first, first + count), True
    with ProcessPoolExecutor() as processes:
        for name, play in (("grants", play_grants), ("ownership", play_ownership)):
            results = SeedResults("lease-schedules", "lease_schedules", first, whole=WHOLE, part=name)
            outcomes = processes.map(partial(_outcome, play), seeds, chunksize=50)
            for seed, (problem, faults) in zip(seeds, outcomes, strict=True):
                results.add(seed, problem=problem, faults=faults.elements())
                if problem is not None:
                    print(f"{name}, seed {seed} FAILED: {problem}", flush=True)
            is_good = results.write() and is_good
            print(f"{count} schedules of {name} played, results: {results.path}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
