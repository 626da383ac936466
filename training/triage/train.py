"""Trains the triage model: `python3 -m training.triage.train --device cuda --minutes 4.5 --out DIRECTORY`."""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from training.triage.dataset import Batch, Dataset, joined, make_documents, sample_texts
from training.triage.documents import Task, make_task
from training.triage.grammar import Split
from training.triage.network import Network, Shape, write_checkpoint
from training.triage.tokens import Encoder, train_tokenizer, write_json, write_tokenizer

VERSION = "6"
Measured = dict[tuple[Task, Split], Dataset]
Shares = dict[tuple[Task, Split], float]
_WARM_UP = 0.02
_EXACT: tuple[Task, ...] = ("classify", "check")
_SPLITS: tuple[Split, ...] = ("train", "dev", "held")


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    started = time.monotonic()
    tokenizer_json = train_tokenizer(sample_texts(options.seed, min(20_000, options.documents))).to_str()
    documents = make_documents(tokenizer_json, options.seed, options.documents, options.processes)
    dataset = Dataset(documents, options.device)
    made_s = time.monotonic() - started
    _say(f"{len(dataset.lengths)} documents, {dataset.tokens / 1e6:.1f} M tokens, made in {made_s:.0f} s")
    shape = Shape(hidden=options.hidden, layers=options.layers, intermediate=3 * options.hidden)
    network = Network(shape).to(options.device)
    _say(f"{sum(parameter.numel() for parameter in network.parameters()) / 1e6:.2f} M parameters")
    measured = {split: _measured(tokenizer_json, split, options) for split in _SPLITS}
    _train(network, dataset, measured["train"] | measured["dev"], options)
    end = _shares(network, measured["train"] | measured["dev"] | measured["held"], options.held_out)
    _say(f"end: {_listed(end)}")
    options.out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.out, network)
    write_tokenizer(options.out, tokenizer_json)
    write_json(options.out / "inferry-triage.json", {"version": VERSION})
    size = sum(path.stat().st_size for path in options.out.iterdir())
    _say(f"{options.out}: {size / 1e6:.1f} MB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="time limit of training")
    parser.add_argument("--steps", type=int, default=20_000, help="most steps; the learning rate falls to zero")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--held-out", type=int, default=2_000, help="documents per measurement")
    return parser.parse_args()


def _measured(tokenizer_json: str, split: Split, options: argparse.Namespace) -> Measured:
    found: Measured = {}
    for task in _EXACT:
        random, encoder = Random(f"measured {task} {split}"), Encoder(tokenizer_json)
        documents = (make_task(random, task, split) for _ in range(options.held_out))
        encoded = joined(encoder.encode(document, is_loose=False) for document in documents)
        found[task, split] = Dataset([encoded], options.device)
    return found


def _train(
    network: Network,
    dataset: Dataset,
    measured: Measured,
    options: argparse.Namespace,
) -> None:
    matrices = [parameter for parameter in network.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=options.device != "cpu")
    random = Random(options.seed)
    started = reported = time.monotonic()
    report_s = max(10.0, options.minutes * 60 / 12)
    seen = 0
    best = _Best()
    for step, batch in enumerate(_endless(dataset, options.batch_tokens, random)):
        spent = (time.monotonic() - started) / (60 * options.minutes)
        done = max(step / options.steps, spent)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * _rate(done)
        loss = _loss(network, batch, options.device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        seen += batch.ids.numel()
        if time.monotonic() - reported > report_s:
            speed = seen / (time.monotonic() - started) / 1e3
            shares = _shares(network, measured, options.held_out // 2)
            _say(f"{done:4.0%} step {step} loss {loss.item():.3f} {speed:.0f} k tokens/s {_listed(shares)}")
            best.offer(network, shares)
            reported = time.monotonic()
    _say(f"{step} steps, {seen / 1e6:.0f} M tokens")
    best.offer(network, _shares(network, measured, options.held_out // 2))
    network.load_state_dict(best.weights)


def _endless(dataset: Dataset, tokens: int, random: Random) -> Iterator[Batch]:
    while True:
        yield from dataset.batches(tokens, random)


def _rate(done: float) -> float:
    """A short warm-up, then a cosine to zero."""
    return min(done / _WARM_UP, 0.5 * (1 + math.cos(math.pi * done)), 1.0)


def _loss(network: Network, batch: Batch, device: str) -> Tensor:
    network.train()
    weights = batch.weights[:, 1:]
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        logits = network(batch.ids[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class _Best:
    """The weights with the highest accuracy on development documents so far."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._share = -1.0

    def offer(self, network: Network, shares: Shares) -> None:
        share = sum(shares[task, "dev"] for task in _EXACT)
        if share > self._share:
            self._share = share
            self.weights = {name: value.clone() for name, value in network.state_dict().items()}


@torch.inference_mode()
def _shares(network: Network, measured: Measured, count: int) -> Shares:
    """Share of answers of which every token is the most likely one, by task and split."""
    network.eval()
    found: Shares = {}
    for (task, split), dataset in measured.items():
        chosen = min(count, len(dataset.lengths))
        right = 0
        for start in range(0, chosen, 100):
            batch = dataset.batch(list(range(start, min(start + 100, chosen))))
            best = network(batch.ids[:, :-1]).argmax(-1)
            is_right = (best == batch.ids[:, 1:]) | (batch.weights[:, 1:] < 0.5)
            right += int(is_right.all(1).sum())
        found[task, split] = right / chosen
    return found


def _listed(shares: Shares) -> str:
    return ", ".join(f"{task} {split} {share:.1%}" for (task, split), share in shares.items())


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
