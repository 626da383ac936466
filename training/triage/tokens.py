"""The tokenizer, its chat template, and documents as token ids."""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.triage.documents import Document

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, EOS, END = 0, 1, 2, 6
VOCABULARY = 3072
CONTEXT = 16_384
_ROLES = {"system": 3, "user": 4, "assistant": 5}
_SPLIT_RATE = 0.1
_TEXT_WEIGHT, _SHORT_ANSWER = 0.1, 20
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% elif message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] in ['user', 'tool'] %}{{ '<|user|>' }}"
    "{% else %}{{ raise_exception('roles are system, developer, user, assistant and tool') }}{% endif %}"
    "{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Encoded:
    """`weights[i]` is what the loss of predicting token i counts."""

    ids: "array[int]"
    weights: "array[float]"


def train_tokenizer(texts: Iterable[str]) -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    # Single digits: numbers of every length have the same few tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return tokenizer


class Encoder:
    """Documents as ids. Input text is also cut into smaller tokens at random, so that unknown words are no surprise."""

    def __init__(self, tokenizer_json: str) -> None:
        self._exact: Any = Tokenizer.from_str(tokenizer_json)
        self._loose: Any = Tokenizer.from_str(tokenizer_json)
        self._loose.model.dropout = _SPLIT_RATE

    def encode(self, document: Document, *, is_loose: bool) -> Encoded:
        ids: list[int] = [BOS]
        weights: list[float] = [0.0]
        reader = self._loose if is_loose else self._exact
        for message in document.messages:
            is_answer = message.role == "assistant"
            tokens = self._ids(self._exact if is_answer else reader, message.content)
            weight = max(1.0, _SHORT_ANSWER / (len(tokens) + 1)) if is_answer else _TEXT_WEIGHT
            ids += [_ROLES[message.role], *tokens, END]
            weights += [0.0, *([weight] * len(tokens)), weight if is_answer else 0.0]
        if document.plain:
            tokens = self._ids(self._exact, document.plain)
            ids += [*tokens, EOS]
            weights += [1.0] * (len(tokens) + 1)
        return Encoded(array("h", ids), array("f", weights))

    def _ids(self, tokenizer: Any, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def write_tokenizer(directory: Path, tokenizer_json: str) -> None:
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[PAD],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
