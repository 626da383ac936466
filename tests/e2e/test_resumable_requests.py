"""Streams resume after the death of their server only if their output is exactly the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.clock import SystemClock
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.serving import Serving, post
from support.stop_server import StopServer, read
from support.upstream import Upstream

TOKENS = 24
BODY: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0}


class Pair(Serving):
    """A gateway before two servers. The first that is called breaks off after so many tokens, the others never."""

    def __init__(self, directory: Path) -> None:
        self.servers = Upstream(self._script), Upstream(self._script)
        self.breaks_after: int | None = None
        for server in self.servers:
            server.detokenize = read
        super().__init__(directory, self._workers)

    async def _script(self, up: Upstream, request: Any, body: dict[str, Any]) -> Any:
        breaks_after, self.breaks_after = self.breaks_after, None
        return await StopServer(breaks_after)(up, request, body)

    def _workers(self) -> Any:
        return [
            OpenAIHttpWorker(name, HttpWorkerSettings(url=server.url, models=("m",)), SystemClock())
            for name, server in zip(("a", "b"), self.servers, strict=True)
        ], {}

    async def _main(self) -> None:
        async with self.servers[0], self.servers[1]:
            await super()._main()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as gateway:
        yield gateway


def asked(pair: Pair, breaks_after: int | None = None, *, chat: bool = True, **fields: Any) -> tuple[str, Any]:
    """Text, and how it ended: (finish reason, stop reason) or the code of the error."""
    pair.breaks_after = breaks_after
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": [5, 6, 7]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, _, answer = post(pair.url, path, {**BODY, **prompt, **fields})
    assert status == 200, answer
    if not fields.get("stream"):
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        return text, (choice["finish_reason"], choice.get("stop_reason"))
    text, end = "", None
    for part in answer.split("\n\n"):
        if part.startswith("data: {"):
            event = json.loads(part[6:])
            if "error" in event:
                return text, event["error"]["code"]
            for choice in event["choices"]:
                text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
                if choice["finish_reason"]:
                    end = (choice["finish_reason"], choice.get("stop_reason"))
    return text, end


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_with_stop_strings_outlives_its_server(pair: Pair, chat: bool, stream: bool) -> None:
    text, _ = asked(pair, chat=chat)
    stop = [text[14:19], "never in it"]
    expected = asked(pair, chat=chat, stop=stop)
    assert expected[1] == ("stop", stop[0])
    for breaks_after in range(1, 14):
        found = asked(pair, breaks_after, chat=chat, stop=stop, stream=stream)
        assert found == expected, breaks_after


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 0, "seed": 7},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1, "temperature": 1},
        {"logit_bias": {"5": 1}},
    ],
)
def test_requests_that_resume_exactly_are_resumed(pair: Pair, fields: dict[str, Any]) -> None:
    assert asked(pair, 6, stream=True, **fields) == asked(pair, stream=True, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7, "seed": 7},
        {"temperature": None, "seed": 7},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["a"]},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_stream_that_cannot_resume_exactly_ends_with_an_error(pair: Pair, fields: dict[str, Any]) -> None:
    _, end = asked(pair, 6, stream=True, **fields)
    assert end == "worker_lost"
    assert asked(pair, 0, stream=True, **fields) == asked(pair, stream=True, **fields), "what nobody saw starts again"
    assert asked(pair, 6, **fields) == asked(pair, **fields), "so does what does not stream"
