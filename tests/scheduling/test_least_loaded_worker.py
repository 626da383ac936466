"""The least loaded worker of a group is known without a search wherever its own load did not rise."""

from random import Random

import pytest

from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.placement.worker_groups import WorkerGroup, load_of
from inferry.scheduling.worker_state import WorkerState
from support.builders import a_view


def a_group(workers: int) -> WorkerGroup:
    states = tuple(WorkerState(f"w{number}") for number in range(workers))
    for state in states:
        state.update_view(a_view(state.name, sequences=8), TickContext())
    group = WorkerGroup(states)
    for state in states:
        state.worker_sets.append(group)
    return group


def set_sequences(worker: WorkerState, sequences: int) -> None:
    worker.sequences = sequences
    worker.invalidate_load()


@pytest.mark.parametrize("seed", range(20))
def test_the_least_loaded_worker_is_the_first_by_name_of_those_with_the_lowest_load(seed: int) -> None:
    rng, group = Random(seed), a_group(workers=4)
    for _ in range(200):
        for worker in rng.sample(group.workers, rng.randint(1, 3)):
            set_sequences(worker, rng.randint(0, 3))
        least = group.least()
        assert least is min(group.workers, key=lambda worker: (worker.sequences, worker.name))
        assert load_of(least) == least.sequences / 8
