"""A mutant: a deliberate error in one place of the source."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """Replaces `old`, which occurs exactly once in `file` (relative to the package), by `new`.

    `tests` run before the tests of the group: those that are likely to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


class MutantGroup(NamedTuple):
    """Mutants with the same tests: files or folders, the fastest first."""

    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]


class CannotBeTried(Exception):
    """The mutant cannot be applied; the message says why."""


def mutated(mutant: Mutant, package: Path) -> str:
    """The file's text with the mutation. Raises CannotBeTried unless `old` occurs exactly once."""
    path = package / mutant.file
    text = path.read_text() if path.is_file() else ""
    places = text.count(mutant.old)
    if places != 1:
        raise CannotBeTried(f"{mutant.name}: {mutant.file} has {places} places that read {mutant.old!r}, not one")
    return text.replace(mutant.old, mutant.new)
