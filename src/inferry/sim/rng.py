"""Random streams by seed and name: draws from one stream never change another."""

from random import Random


def named_rng(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")  # noqa: S311 - repeatable, not secret


def seeded_rng(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - repeatable, not secret
