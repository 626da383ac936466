"""Prompts that take long to tokenise: other calls do not wait for them, and one that cannot fit is not tokenised."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferry.ingress.job_parser import INLINE_TOKENIZE_BYTES
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, get, post

CONTEXT = 4096
LONGEST_TOKEN = 8


class Slow:
    """Takes until it is told to be through."""

    longest_token_bytes = LONGEST_TOKEN
    fingerprint = "long"

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        self.began.set()
        assert self.may_end.wait(120)
        return [1, 2, 3]

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError


class Tokenising(Serving):
    def __init__(self, directory: Path) -> None:
        self.tokenizer = Slow()
        super().__init__(directory, lambda: ([ScriptedWorker(context_tokens=CONTEXT)], {"m": self.tokenizer}), {})


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Tokenising]:
    with Tokenising(tmp_path) as gateway:
        yield gateway
        gateway.tokenizer.may_end.set()


def test_a_long_prompt_is_tokenized_off_the_event_loop(gateway: Tokenising) -> None:
    call = {"model": "m", "prompt": "x" * (INLINE_TOKENIZE_BYTES + 1), "max_tokens": 1}
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(post, gateway.url, "/v1/completions", call)
        assert gateway.tokenizer.began.wait(120)
        # It is tokenised now and for as long as we like, and others are answered.
        assert get(gateway.url, "/health")[0] == 200
        assert post(gateway.url, "/v1/completions", {"model": "m", "prompt": [1, 2], "max_tokens": 1})[0] == 200
        assert not asked.done()
        gateway.tokenizer.may_end.set()
        assert asked.result(120)[0] == 200


def test_a_prompt_far_beyond_the_context_is_refused_without_being_tokenised(gateway: Tokenising) -> None:
    prompt = "x" * (CONTEXT * LONGEST_TOKEN + LONGEST_TOKEN)
    status, _, answer = post(gateway.url, "/v1/completions", {"model": "m", "prompt": prompt})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert gateway.tokenizer.calls == 0
