"""Degraded texts: a model that reads them has to recognise words, because the order of a known frame is gone."""

from collections.abc import Sequence
from random import Random

_SHORTEST = 3


def degraded(random: Random, sentences: Sequence[str]) -> str:
    """The sentences of one meaning, spliced, cut, thinned out or out of order."""
    match random.randrange(5):
        case 0:
            words = _spliced(random, sentences)
        case 1:
            words = _fragment(random, " ".join(sentences).split())
        case 2:
            words = [word for sentence in sentences for word in _fragment(random, sentence.split())]
        case _:
            count = random.randrange(1, len(sentences) + 1)
            words = " ".join(random.sample(list(sentences), count)).split()
    if random.random() < 0.6:
        words = _thinned(random, words)
    if random.random() < 0.35:
        words = _shuffled(random, words)
    return " ".join(words)


def _spliced(random: Random, sentences: Sequence[str]) -> list[str]:
    """The start of one sentence and the end of another."""
    first, second = random.choice(sentences).split(), random.choice(sentences).split()
    return first[: _cut(random, first)] + second[_cut(random, second) :]


def _cut(random: Random, words: list[str]) -> int:
    return int(len(words) * random.uniform(0.3, 0.7) + 0.5)


def _fragment(random: Random, words: list[str]) -> list[str]:
    length = max(_SHORTEST, int(len(words) * random.uniform(0.4, 0.9)))
    start = random.randrange(max(1, len(words) - length + 1))
    return words[start : start + length]


def _thinned(random: Random, words: list[str]) -> list[str]:
    rate = random.uniform(0.1, 0.4)
    kept = [word for word in words if random.random() >= rate]
    return kept if len(kept) >= _SHORTEST else words


def _shuffled(random: Random, words: list[str]) -> list[str]:
    """The order is lost within windows of a few words."""
    window = random.choice((3, 5, 8))
    return [
        word
        for start in range(0, len(words), window)
        for word in random.sample(words[start : start + window], len(words[start : start + window]))
    ]
