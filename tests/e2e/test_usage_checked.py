"""Implausible or malformed usage of an engine harms neither ceilings nor estimates, and fails no call."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.streams import Usage
from inferry.workers.openai_http.sse import EventScanner
from support.http_gateway import HttpGateway
from support.upstream import DONE, Upstream, begin, chunk, event, role

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
LIES: list[Any] = [
    {"prompt_tokens": 10**20, "completion_tokens": 2},
    {"prompt_tokens": -5, "completion_tokens": -5},
    {"prompt_tokens": 0, "completion_tokens": 0},
    {"prompt_tokens": 12, "completion_tokens": 1},
    {"prompt_tokens": 12, "completion_tokens": 10**20},
    {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 10**20}},
    # Malformed.
    {"prompt_tokens": "12", "completion_tokens": "2"},
    {"prompt_tokens": True, "completion_tokens": 2},
    {"prompt_tokens": 12, "completion_tokens": 2.5},
    {"prompt_tokens": float("nan"), "completion_tokens": float("inf")},
    {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": "3"}},
    {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": 3},
    "many",
    [12, 2],
    12,
]


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[HttpGateway]:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        counts = up.counts  # type: ignore[attr-defined]
        head = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        await response.write(role() + chunk("a"))
        choice = {"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}
        await response.write(event({**head, "choices": [choice], "usage": up.early_counts}))  # type: ignore[attr-defined]
        await response.write(event({**head, "choices": [], "usage": counts}))
        if up.late_counts is not None:  # type: ignore[attr-defined]
            await response.write(event({**head, "choices": [], "usage": up.late_counts}))  # type: ignore[attr-defined]
        await response.write(DONE)
        return response

    config = {"tenants": {"acme": {"day_token_ceiling": 100_000}}}
    with HttpGateway(tmp_path, script, config) as gateway:
        up: Any = gateway.upstream
        up.counts = up.early_counts = up.late_counts = None
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


def test_implausible_usage_is_neither_billed_nor_learned_nor_shown(
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
            assert len(up.bodies) == number + 1, "a call is sent once"
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
        shown = json.loads(last[6:])
        assert (shown["id"], shown["object"], shown["model"]) == ("up-1", "chat.completion.chunk", "m")
        assert 0 < shown["usage"]["prompt_tokens"] <= 4096
        assert shown["usage"]["completion_tokens"] == 2


GOOD = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}
OTHER = {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}


@pytest.mark.parametrize(
    ("early", "counts", "late", "billed"),
    [
        (None, OTHER, GOOD, GOOD),
        (OTHER, GOOD, None, GOOD),
        (None, GOOD, {"prompt_tokens": 20}, {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}),
        (None, GOOD, {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 14}, OTHER),
        (None, {**GOOD, "total_tokens": 99}, None, GOOD),
        (None, GOOD, {"prompt_tokens": "20"}, GOOD),
        (None, {"prompt_tokens": "20"}, GOOD, GOOD),
        ({"prompt_tokens": float("nan")}, GOOD, None, GOOD),
    ],
)
def test_the_last_usage_counts_and_its_total_is_the_sum(
    lying: HttpGateway, early: Any, counts: Any, late: Any, billed: dict[str, int]
) -> None:
    key, up = lying.key("acme"), lying.upstream
    up.early_counts, up.counts, up.late_counts = early, counts, late  # type: ignore[attr-defined]
    whole = ask(lying, key).json["usage"]
    assert {name: whole[name] for name in billed} == billed
    before = metric(lying, "inferry_tokens_total")
    streamed = ask(lying, key, stream=True, stream_options={"include_usage": True})
    *_, last, _ = [part for part in streamed.body.split(b"\n\n") if part]
    shown = json.loads(last[6:])["usage"]
    assert {name: shown[name] for name in billed} == billed
    assert metric(lying, "inferry_tokens_total") - before == billed["total_tokens"]


def test_a_usage_event_that_an_early_one_follows_shows_what_is_billed() -> None:
    scanner = EventScanner()
    finish = {"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}
    scanner.scan(event({"choices": [], "usage": GOOD}) + event({"choices": [finish], "usage": OTHER}))
    assert scanner.usage == Usage(20, 0, 3)
    assert not scanner.is_usage_event_exact
