"""Every mutant applies to the source. `make mutants` checks that tests catch it."""

from collections import Counter
from pathlib import Path

import pytest

from mutants.groups import GROUPS
from mutants.mutant import Mutant, mutated

ROOT = Path(__file__).parents[1]
ALL = [mutant for group in GROUPS.values() for mutant in group.mutants]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutation_fits_the_source_in_exactly_one_place_and_changes_it(mutant: Mutant) -> None:
    text = mutated(mutant, ROOT / "src" / "inferry")
    assert text != (ROOT / "src" / "inferry" / mutant.file).read_text()


def test_no_two_mutants_of_a_group_have_one_name() -> None:
    for name, group in GROUPS.items():
        assert [one for one, times in Counter(mutant.name for mutant in group.mutants).items() if times > 1] == [], name


def test_the_tests_that_mutants_are_tried_against_exist() -> None:
    named = {
        test for group in GROUPS.values() for test in (*group.tests, *(one for m in group.mutants for one in m.tests))
    }
    assert [test for test in sorted(named) if not (ROOT / test).exists()] == []


def test_every_file_of_mutants_is_a_group_that_is_tried() -> None:
    folder = Path(__file__).parent / "mutants"
    files = {path.stem for path in folder.glob("*.py") if "GROUP = MutantGroup(" in path.read_text()}
    assert files == set(GROUPS)
