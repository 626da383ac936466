"""Answers of a trained model in the embedded engine: `python3 -m training.triage.evaluate DIRECTORY [COUNT]`.

`make bench BENCH=triage` evaluates the bundled model and records the result.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from random import Random
from typing import Any

from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from inferry.engine.tokenizer import HfTokenizer
from training.triage.documents import RULES, Document, make_task
from training.triage.grammar import INTENTS, UNSCRIPTED, frames
from training.triage.tickets import fits_intent, make_ticket

_MAX_TOKENS = 96
_TALK = ("Hello", "What can you do?", "Draft a reply.", "What is the capital of Japan?")
TOUR = (
    "Classify this ticket: I was charged twice this month.",
    "Write a reply to this ticket: My order has not arrived yet.",
    "Policy: no refund date. Check this reply: You will have your money back on Friday.",
)
"""The prompts of the README's tour."""


def _user(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


class Model:
    """Greedy answers of the embedded engine."""

    def __init__(self, directory: Path) -> None:
        config = EngineConfig()
        self._core = EngineCore(TorchRunner.load(directory, config), config)
        self._tokenizer = HfTokenizer(directory)
        self._keys = 0

    def answer(self, conversations: Sequence[Sequence[dict[str, object]]]) -> list[str]:
        sampling = Sampling(temperature=0.0, max_tokens=_MAX_TOKENS)
        first = self._keys
        for messages in conversations:
            ids = self._tokenizer.encode_chat(messages)
            rejection = self._core.add(Request(self._keys, ids, sampling, 1))
            if rejection is not None:
                raise ValueError(f"prompt of {len(ids)} tokens refused")
            self._keys += 1
        tokens: dict[int, list[int]] = {key: [] for key in range(first, self._keys)}
        while self._core.has_work:
            for key, token in self._core.step().tokens:
                tokens[key].append(token)
        return [self._tokenizer.decode(tokens[key]) for key in range(first, self._keys)]

    def answer_one(self, text: str) -> str:
        return self.answer([_user(text)])[0]


def evaluate(directory: Path, count: int = 1_000, seed: int = 7) -> dict[str, Any]:
    """Accuracy on held-out templates and vocabulary, and the answers to tickets that no template made."""
    model, random = Model(directory), Random(seed)
    return {
        "rules": RULES,
        "classify": _classification(model, random, count),
        "classify_development": _share(_exact(model, _documents(random, "classify", "dev", count))),
        "classify_with_training_templates": _share(_exact(model, _documents(random, "classify", "train", count))),
        "check_development": _share(_exact(model, _documents(random, "check", "dev", count))),
        "check": _share(_exact(model, _documents(random, "check", "held", count))),
        "reply": _replies(model, random, count // 4),
        **{path.stem: _unscripted(model, path) for path in UNSCRIPTED},
        "talk": [{"user": text, "answer": model.answer_one(text)} for text in _TALK],
        "tour": [{"user": text, "answer": model.answer_one(text)} for text in TOUR],
    }


def _documents(random: Random, task: Any, split: Any, count: int) -> list[Document]:
    return [make_task(random, task, split) for _ in range(count)]


def _asked(document: Document) -> list[dict[str, object]]:
    return [{"role": message.role, "content": message.content} for message in document.messages[:-1]]


def _exact(model: Model, documents: list[Document]) -> list[bool]:
    answers = model.answer([_asked(document) for document in documents])
    return [answer == document.messages[-1].content for answer, document in zip(answers, documents, strict=True)]


def _share(hits: list[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def _classification(model: Model, random: Random, count: int) -> dict[str, Any]:
    """Held-out templates, vocabulary and wordings of the instruction, together."""
    documents = _documents(random, "classify", "held", count)
    hits = _exact(model, documents)
    intents = [next(one for one in INTENTS if one in document.messages[-1].content) for document in documents]
    total, right = Counter(intents), Counter(intent for intent, hit in zip(intents, hits, strict=True) if hit)
    by_intent = {
        intent: {
            "documents": total[intent],
            "right": right[intent],
            "accuracy": round(right[intent] / total[intent], 4),
        }
        for intent in INTENTS
        if total[intent]
    }
    sources = {frame.source for intent in INTENTS for frame in frames(intent, "held")}
    error = error_by_frame(hits, [sources.intersection(document.frames) for document in documents])
    return {"accuracy": _share(hits), "standard_error": round(error, 4), "documents": count, "by_intent": by_intent}


def error_by_frame(hits: Sequence[bool], used: Sequence[AbstractSet[str]]) -> float:
    """The standard error of the share of hits, by a jackknife over the sentence frames that the texts were made of.

    Texts with a common frame are right or wrong together, so that the error by text is too small.
    """
    total, right = len(hits), sum(hits)
    shares = []
    for frame in sorted(set().union(*used)):
        with_it = [hit for hit, own in zip(hits, used, strict=True) if frame in own]
        if len(with_it) < total:
            shares.append((right - sum(with_it)) / (total - len(with_it)))
    mean = sum(shares) / len(shares)
    return float(((len(shares) - 1) / len(shares) * sum((share - mean) ** 2 for share in shares)) ** 0.5)


def _replies(model: Model, random: Random, count: int) -> dict[str, Any]:
    """Share of replies to held-out tickets that belong to the intent."""
    tickets = [make_ticket(random, random.choice(INTENTS), "held") for _ in range(count)]
    replies = model.answer([_user(f"Write a reply to this ticket: {ticket.text}") for ticket in tickets])
    hits = [fits_intent(reply, ticket.intent) for ticket, reply in zip(tickets, replies, strict=True)]
    return {"documents": count, "fits_intent": _share(hits)}


def _unscripted(model: Model, path: Path) -> dict[str, Any]:
    tickets = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    listed = [
        {
            **ticket,
            "answer": model.answer_one(f"Classify this ticket: {ticket['ticket']}"),
            "reply": model.answer_one(f"Write a reply to this ticket: {ticket['ticket']}"),
        }
        for ticket in tickets
    ]
    return {"right": sum(one["answer"] == one["intent"] for one in listed), "tickets": listed}


if __name__ == "__main__":
    print(json.dumps(evaluate(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000), indent=2))
