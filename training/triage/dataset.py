"""Documents made by several processes, and batches of them by length."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from training.triage.documents import make_document
from training.triage.tokens import PAD, Encoded, Encoder

_SHARD = 2_000
_LONGEST = 512
_ROUND = 16


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Texts of training, for the tokenizer."""
    random = Random(f"tokenizer {seed}")
    for _ in range(count):
        document = make_document(random)
        yield document.plain
        yield from (message.content for message in document.messages)


def make_dataset(tokenizer_json: str, seed: int, count: int, processes: int) -> list[Encoded]:
    """`count` documents; the same ones whatever the number of processes, except for random cuts of words."""
    shards = [(tokenizer_json, seed, shard) for shard in range(-(-count // _SHARD))]
    if processes <= 1:
        made = [_make_shard(shard) for shard in shards]
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            made = pool.map(_make_shard, shards, chunksize=1)
    return [document for shard in made for document in shard][:count]


def _make_shard(shard: tuple[str, int, int]) -> list[Encoded]:
    tokenizer_json, seed, number = shard
    random = Random(f"documents {seed} {number}")
    encoder = Encoder(tokenizer_json)
    made: list[Encoded] = []
    while len(made) < _SHARD:
        encoded = encoder.encode(make_document(random), is_loose=random.random() < 0.4)
        if len(encoded.ids) <= _LONGEST:
            made.append(encoded)
    return made


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    weights: Tensor


def batches(dataset: list[Encoded], tokens: int, random: Random) -> Iterator[Batch]:
    """One pass over the documents in batches of similar length with at most `tokens` places each."""
    order = sorted(range(len(dataset)), key=lambda index: len(dataset[index].ids) + random.random() * _ROUND)
    groups: list[list[int]] = [[]]
    for index in order:
        width = _width(len(dataset[index].ids))
        if groups[-1] and width * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(index)
    random.shuffle(groups)
    for group in groups:
        yield padded([dataset[index] for index in group])


def padded(documents: list[Encoded]) -> Batch:
    width = max(_width(len(document.ids)) for document in documents)
    ids = torch.full((len(documents), width), PAD, dtype=torch.int64)
    weights = torch.zeros(len(documents), width)
    for row, document in enumerate(documents):
        length = len(document.ids)
        ids[row, :length] = torch.from_numpy(document.ids)
        weights[row, :length] = torch.from_numpy(document.weights)
    return Batch(ids, weights)


def _width(length: int) -> int:
    return -(-length // _ROUND) * _ROUND
