"""Streams of chance, by seed and name: what is drawn in one never shifts what is drawn in another."""

from random import Random


def named_rng(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")  # noqa: S311 - repeatable, not secret


def seeded_rng(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - repeatable, not secret
