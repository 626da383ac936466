"""Streams of chance, by seed and name: what is drawn in one never shifts what is drawn in another."""

from random import Random


def stream(seed: int, name: str) -> Random:
    return Random(f"{seed}/{name}")  # noqa: S311 - repeatable, not secret


def plain(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - repeatable, not secret
