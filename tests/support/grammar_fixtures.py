"""Schemas and engines for tests of grammars."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from inferry.domain.constraints import Constraint
from inferry.domain.sampling import Sampling
from inferry.domain.workers import ToolFormatName
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.grammars import Grammars
from inferry.engine.messages import End, Request
from inferry.engine.runner import TorchRunner
from inferry.engine.tokenizer import HfTokenizer

TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["billing", "bug"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["intent", "urgency", "note"],
    "additionalProperties": False,
}
PROMPT = [10, 20, 30]
SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=4),
    Sampling(temperature=1.5, top_p=0.6, seed=5),
    Sampling(temperature=0.7, top_k=5, seed=6),
]


def a_request(
    key: int, constraint: Constraint | None, *, tokens: int = 400, sampling: Sampling | None = None, **more: Any
) -> Request:
    base = sampling or Sampling(temperature=1.0, seed=key)
    values = {name: getattr(base, name) for name in ("temperature", "top_p", "top_k", "seed")}
    wanted = Sampling(**values, max_tokens=tokens, constraint=constraint)
    return Request(key, more.pop("prompt", PROMPT), wanted, lane=1, **more)


def a_schema(generator: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema whose values are of bounded length."""
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern", "number"]
    kind = generator.choice([*kinds, *(["object", "array", "anyOf"] * 3 if depth else [])])
    match kind:
        case "object":
            names = generator.sample(["a", "b c", "ä", 'quo"te', "x1", "long_name"], generator.randint(0, 4))
            required = [name for name in names if generator.random() < 0.7]
            properties = {name: a_schema(generator, depth - 1) for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            least = generator.randint(0, 2)
            items = a_schema(generator, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + generator.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [a_schema(generator, depth - 1) for _ in range(generator.randint(1, 3))]}
        case "enum":
            return {"enum": generator.sample(["red", 'say "hi"', 3, None, True, 1.5, {"k": [1]}], 3)}
        case "pattern":
            return {"type": "string", "pattern": generator.choice(["^[a-f]{2,4}$", "^x(yz)?$", r"^\d{3}-\d$"])}
        case "string":
            return {"type": "string", "minLength": generator.randint(0, 2), "maxLength": generator.randint(2, 8)}
        case "integer" | "number":
            least = generator.randint(-50, 50)
            limits = {"minimum": least, "maximum": least + generator.randint(0, 99)}
            return (
                {"type": "integer", **limits} if kind == "integer" else {"type": "integer", "multipleOf": 1, **limits}
            )
        case _:
            return {"type": kind}


def of_schema(schema: dict[str, Any], *, is_strict: bool = True) -> Constraint:
    return Constraint("response_format", schema=json.dumps(schema), is_strict=is_strict)


class GrammarEngine:
    """An engine with the tiny model. `outputs` and `ends` are by key."""

    def __init__(
        self, model_dir: Path, config: EngineConfig | None = None, tool_format: ToolFormatName | None = "hermes"
    ) -> None:
        config = config or EngineConfig()
        runner = TorchRunner.load(model_dir, config)
        self.grammars = Grammars(model_dir, runner.vocab_size, runner.eos_ids, tool_format)
        self.core = EngineCore(runner, config, grammars=self.grammars)
        self.tokenizer = HfTokenizer(model_dir)
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}

    def step(self) -> None:
        done = self.core.step()
        for key, token in done.tokens:
            self.outputs.setdefault(key, []).append(token)
        for end in done.ends:
            assert end.account.key not in self.ends
            self.ends[end.account.key] = end

    def run(self, requests: list[Request]) -> "GrammarEngine":
        for request in requests:
            assert self.core.add(request) is None
        while self.core.has_work:
            self.step()
        assert self.core.pool.free == self.core.pool.total
        assert not self.grammars.is_compiling
        return self

    def text(self, key: int) -> str:
        return self.tokenizer.decode(self.outputs.get(key, []))


def write_byte_tokenizer(directory: Path, size: int, special: tuple[str, ...] = ("<|end|>",)) -> None:
    """A tokenizer of single bytes and a few longer tokens. The first id ends an output."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the red and the green and the blue one"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
