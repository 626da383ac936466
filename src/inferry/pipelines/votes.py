"""Votes of an ensemble: when one is decided, and which answer wins. Pure."""

from collections.abc import Mapping, Sequence


def leader(votes: Mapping[int, object]) -> int:
    """The member whose answer has the most votes; between equals the one that comes first in the configuration."""
    counts = _counts(votes)
    return min(votes, key=lambda member: (-counts[votes[member]], member))


def is_decided(votes: Mapping[int, object], open_members: int) -> bool:
    """Whether answers that are still open cannot change which meaning wins.

    A tie goes to the member that comes first, so a lead must exceed the number of open answers.
    """
    counts = sorted(_counts(votes).values(), reverse=True)
    if not counts:
        return False
    second = counts[1] if len(counts) > 1 else 0
    return not open_members or counts[0] - second > open_members


def share(votes: Mapping[int, object], member: int) -> float:
    """The part of the votes that agrees with a member."""
    return _counts(votes)[votes[member]] / len(votes)


def best(scores: Sequence[tuple[int, float]]) -> int:
    """The member with the highest score; between equals the first."""
    return max(scores, key=lambda one: (one[1], -one[0]))[0]


def _counts(votes: Mapping[int, object]) -> dict[object, int]:
    counts: dict[object, int] = {}
    for value in votes.values():
        counts[value] = counts.get(value, 0) + 1
    return counts
