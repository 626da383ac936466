"""A job that is tokenized by the owner is the job that a process with the tokenizer makes."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from inferry.dispatch.model_catalog import ModelCatalog
from inferry.dispatch.pool import Pool
from inferry.domain.callers import ANONYMOUS
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ContextLengthExceeded
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import Task
from inferry.engine.tokenizer import HfTokenizer
from inferry.ingress.job_parser import LongPrompt, parse
from inferry.ingress.late_tokens import lacks_tokens, tokenized
from inferry.ingress.openai.decode import ChatEndpoint, decode_completion
from inferry.ingress.pooling.decode import ENDPOINTS, PooledEndpoint
from inferry.ingress.pooling.parse import parse_pooled
from inferry.ingress.wire_format import OPENAI, ClientRequest
from inferry.prediction.estimator import Estimator
from support.scripted_worker import ScriptedWorker

FEATURES = frozenset({"structured_outputs", "logprobs", "echo", "seed"})


class Capable(ScriptedWorker):
    def cards(self) -> list[ModelCard]:
        tasks = frozenset({Task.GENERATE, Task.EMBED})
        return [structs.replace(card, features=FEATURES, tasks=tasks) for card in super().cards()]


def models(tokenizer: Tokenizer | None, context_tokens: int = 4096) -> ModelCatalog:
    clock = SystemClock()
    tokenizers = {} if tokenizer is None else {"m": tokenizer}
    pool = Pool([Capable(context_tokens=context_tokens)], clock)
    return ModelCatalog(DEFAULT_LANES, pool, tokenizers, Estimator(), clock)


def parsed(path: str, body: dict[str, Any], known: ModelCatalog) -> InferenceJob:
    raw = msgspec.json.encode({"model": "m", **body})
    found: InferenceJob | LongPrompt
    if path == "chat":
        found = parse(ChatEndpoint().decode(raw), {}, known, ANONYMOUS)
    elif path == "completions":
        found = parse(ClientRequest(decode_completion(raw), raw, OPENAI), {}, known, ANONYMOUS)
    else:
        endpoint = ENDPOINTS[f"/v1/{path}".encode()]
        assert isinstance(endpoint, PooledEndpoint)
        found = parse_pooled(endpoint.decode_pooled(raw), {}, known, ANONYMOUS)
    assert isinstance(found, InferenceJob)
    return found


@pytest.fixture
def tokenizer(tiny_model: Path) -> HfTokenizer:
    return HfTokenizer(tiny_model)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a few words", "max_tokens": 5}),
        ("completions", {"prompt": "a few words", "max_tokens": 5, "echo": True}),
        ("completions", {"prompt": "a few words", "max_tokens": 5, "logprobs": 2}),
        ("completions", {"prompt": [5, 6, 7], "max_tokens": 5, "echo": True}),
        ("completions", {"prompt": [5, 6, 7], "max_tokens": 5, "guided_choice": ["a", "b"]}),
        ("chat", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1}),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "guided_regex": "[a-c]+"}),
        ("embeddings", {"input": ["one text", "another"]}),
    ],
)
def test_a_job_gets_what_the_parser_gives_it_where_the_tokenizer_is_known(
    path: str, body: dict[str, Any], tokenizer: HfTokenizer
) -> None:
    owner = models(tokenizer)
    expected, job = parsed(path, body, owner), parsed(path, body, models(None))
    assert lacks_tokens(job, owner)
    assert not lacks_tokens(expected, owner)
    found = asyncio.run(tokenized(job, owner))
    assert found.payload == expected.payload
    assert (found.token_budget, found.footprint.prompt) == (expected.token_budget, expected.footprint.prompt)
    assert not lacks_tokens(found, owner)


def test_a_prompt_that_exceeds_the_context_is_refused_once_its_tokens_are_known(tokenizer: HfTokenizer) -> None:
    body = {"prompt": "word " * 30, "max_tokens": 5}
    job = parsed("completions", body, models(None))
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(tokenized(job, models(tokenizer, context_tokens=8)))


def test_jobs_of_engines_that_read_the_body_lack_nothing() -> None:
    known = models(None)
    assert not lacks_tokens(parsed("completions", {"prompt": "a few words"}, known), known)
