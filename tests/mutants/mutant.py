"""A mutant: one place of the source, written wrongly on purpose."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` stands exactly once in `file`, which is relative to the package, and becomes `new`.

    `tests` are test files that are run before those of its room: the ones that are likely to notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


class MutantGroup(NamedTuple):
    """Mutants that are tried against the same tests: files or folders, the quickest first."""

    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]


class CannotBeTried(Exception):
    """The message says why."""


def mutated(mutant: Mutant, package: Path) -> str:
    """The file's text with the mutation. Raises CannotBeTried where it does not fit exactly once."""
    path = package / mutant.file
    text = path.read_text() if path.is_file() else ""
    places = text.count(mutant.old)
    if places != 1:
        raise CannotBeTried(f"{mutant.name}: {mutant.file} has {places} places that read {mutant.old!r}, not one")
    return text.replace(mutant.old, mutant.new)
