"""An engine that reports a usage that implausible usage harms neither its tenants' ceilings nor any estimate."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.http_gateway import HttpGateway
from support.upstream import DONE, Upstream, begin, chunk, event, role

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
LIES: list[dict[str, Any]] = [
    {"prompt_tokens": 10**20, "completion_tokens": 2},
    {"prompt_tokens": -5, "completion_tokens": -5},
    {"prompt_tokens": 0, "completion_tokens": 0},
    {"prompt_tokens": 12, "completion_tokens": 1},
    {"prompt_tokens": 12, "completion_tokens": 10**20},
    {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 10**20}},
]


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[HttpGateway]:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        counts = up.counts  # type: ignore[attr-defined]
        head = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        await response.write(role() + chunk("a") + chunk("b", "stop"))
        await response.write(event({**head, "choices": [], "usage": counts}) + DONE)
        return response

    config = {"tenants": {"acme": {"day_token_ceiling": 100_000}}}
    with HttpGateway(tmp_path, script, config) as gateway:
        yield gateway


def ask(gateway: HttpGateway, key: str, **more: Any) -> Any:
    answer = gateway.call("POST", CHAT, {**BODY, **more}, {"authorization": f"Bearer {key}"})
    assert answer.status == 200, answer.body
    return answer


def metric(gateway: HttpGateway, name: str) -> float:
    page = gateway.call("GET", "/metrics").body.decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))


async def learned(running: HttpGateway) -> tuple[Any, Any]:
    """What the predictors know. On the event loop: they learn after the answer was written, in the same callback."""
    estimator: Any = running.service.gateway.models.estimator
    return estimator.prompt("acme", "m", None, 1000), estimator.output_accuracy


def test_a_usage_that_cannot_be_true_is_neither_billed_nor_learned_nor_shown(
    lying: HttpGateway, caplog: pytest.LogCaptureFixture
) -> None:
    key = lying.key("acme")
    up: Any = lying.upstream
    up.counts = {"prompt_tokens": 12, "completion_tokens": 2}
    ask(lying, key)
    before = lying.run(learned(lying))
    with caplog.at_level(logging.WARNING):
        for number, counts in enumerate(LIES, 1):
            up.counts = counts
            usage = ask(lying, key).json["usage"]
            assert 0 < usage["prompt_tokens"] <= 4096
            assert usage["completion_tokens"] == 2
            assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert metric(lying, "inferry_worker_usage_corrections_total") == number
    assert lying.run(learned(lying)) == before
    assert 0 < metric(lying, "inferry_tokens_total") < 100 * (len(LIES) + 1)
    assert len([one for one in caplog.records if "implausible usage" in one.message]) == 1


def test_a_stream_ends_with_the_usage_that_is_billed(lying: HttpGateway) -> None:
    key = lying.key("acme")
    up: Any = lying.upstream
    for counts in LIES:
        up.counts = counts
        answer = ask(lying, key, stream=True, stream_options={"include_usage": True})
        *_, last, done = [part for part in answer.body.split(b"\n\n") if part]
        assert done == b"data: [DONE]"
        usage = json.loads(last[6:])["usage"]
        assert 0 < usage["prompt_tokens"] <= 4096
        assert usage["completion_tokens"] == 2
