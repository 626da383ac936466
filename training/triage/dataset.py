"""Documents made by several processes, kept as flat tensors on the device that trains."""

import multiprocessing
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from training.triage.documents import make_document
from training.triage.tokens import PAD, Encoded, Encoder

_SHARD = 4_000
_LONGEST = 512
_ROUND = 16


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Texts of training, for the tokenizer."""
    random = Random(f"tokenizer {seed}")
    for _ in range(count):
        yield from make_document(random).texts


@dataclass(frozen=True)
class Shard:
    """Documents one behind the other."""

    ids: "array[int]"
    weights: "array[float]"
    lengths: "array[int]"


def joined(documents: Iterable[Encoded]) -> Shard:
    shard = Shard(array("h"), array("f"), array("h"))
    for document in documents:
        shard.ids.extend(document.ids)
        shard.weights.extend(document.weights)
        shard.lengths.append(len(document.ids))
    return shard


def make_documents(tokenizer_json: str, seed: int, count: int, processes: int) -> list[Shard]:
    """About `count` documents; the same ones whatever the number of processes, except for random cuts of words."""
    shards = [(tokenizer_json, seed, shard) for shard in range(-(-count // _SHARD))]
    if processes <= 1:
        return [_make_shard(shard) for shard in shards]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(_make_shard, shards, chunksize=1)


def _make_shard(shard: tuple[str, int, int]) -> Shard:
    tokenizer_json, seed, number = shard
    random = Random(f"documents {seed} {number}")
    encoder = Encoder(tokenizer_json)
    made: list[Encoded] = []
    while len(made) < _SHARD:
        encoded = encoder.encode(make_document(random), is_loose=random.random() < 0.4)
        if len(encoded.ids) <= _LONGEST:
            made.append(encoded)
    return joined(made)


@dataclass(frozen=True)
class Batch:
    """Rows of token ids, padded, and what the loss of predicting each of them counts."""

    ids: Tensor
    weights: Tensor


class Dataset:
    def __init__(self, shards: list[Shard], device: str) -> None:
        ids, weights, places = array("h"), array("f"), array("h")
        for shard in shards:
            ids += shard.ids
            weights += shard.weights
            places += shard.lengths
        self._device = device
        self._ids = torch.frombuffer(ids, dtype=torch.int16).to(device)
        self._weights = torch.frombuffer(weights, dtype=torch.float32).to(device)
        self.lengths = places.tolist()
        lengths = torch.tensor(self.lengths)
        self._starts = (lengths.cumsum(0) - lengths).to(device)
        self._lengths = lengths.to(device)

    @property
    def tokens(self) -> int:
        return self._ids.numel()

    def batches(self, tokens: int, random: Random) -> Iterator[Batch]:
        """One pass over the documents in batches of similar length with at most `tokens` places each."""
        keys = [length + random.random() * _ROUND for length in self.lengths]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        groups: list[list[int]] = [[]]
        for index in order:
            # Lengths nearly rise, so a document is at most one rounding step shorter than one before it.
            width = _width(self.lengths[index]) + _ROUND
            if groups[-1] and width * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(index)
        random.shuffle(groups)
        for group in groups:
            yield self.batch(group)

    def batch(self, group: list[int]) -> Batch:
        width = max(_width(self.lengths[index]) for index in group)
        rows = torch.tensor(group, device=self._device)
        columns = torch.arange(width, device=self._device)
        is_inside = columns < self._lengths[rows].unsqueeze(1)
        places = (self._starts[rows].unsqueeze(1) + columns).clamp_(max=self.tokens - 1)
        ids = torch.where(is_inside, self._ids[places].long(), PAD)
        return Batch(ids, torch.where(is_inside, self._weights[places], 0.0))


def _width(length: int) -> int:
    return -(-length // _ROUND) * _ROUND
