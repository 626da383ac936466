"""Every mutation still fits the source. Whether tests notice them is for `make mutants` to say."""

from collections import Counter
from pathlib import Path

import pytest

from mutants.mutant import Mutant, mutated
from mutants.rooms import ROOMS

ROOT = Path(__file__).parents[1]
ALL = [mutant for room in ROOMS.values() for mutant in room.mutants]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutation_fits_the_source_in_exactly_one_place_and_changes_it(mutant: Mutant) -> None:
    text = mutated(mutant, ROOT / "src" / "inferry")
    assert text != (ROOT / "src" / "inferry" / mutant.file).read_text()


def test_no_two_mutants_of_a_room_have_one_name() -> None:
    for name, room in ROOMS.items():
        assert [one for one, times in Counter(mutant.name for mutant in room.mutants).items() if times > 1] == [], name


def test_the_tests_that_mutants_are_tried_against_exist() -> None:
    named = {test for room in ROOMS.values() for test in (*room.tests, *(one for m in room.mutants for one in m.tests))}
    assert [test for test in sorted(named) if not (ROOT / test).exists()] == []
