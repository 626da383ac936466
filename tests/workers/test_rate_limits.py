"""Hosted APIs: calls are paced by their rate limit headers."""

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.streams import Done, Item
from inferry.workers.openai_http.profiles import HOSTED
from inferry.workers.openai_http.rate_limits import (
    MAX_PAUSE_S,
    KeyRateLimiter,
    KeyRateLimiters,
    RateLimits,
    parse_rate_limits,
)
from support.http_jobs import a_call, a_plan, a_worker, done, error_of, ran, run
from support.upstream import Upstream, begin, well_behaved


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("1s", 1.0), ("6m0s", 360.0), ("20ms", 0.02), ("1m30.5s", 90.5), ("2", 2.0), ("1d", 3600.0), ("-3", 0.0)),
        *(("", None), ("soon", None), ("5x", None), ("nan", None)),
    ],
)
def test_the_time_of_a_reset_is_read_however_it_is_written(text: str, seconds: float | None) -> None:
    assert parse_rate_limits({b"x-ratelimit-reset-requests": text.encode()}, 0.0).requests_reset_s == seconds


def test_retry_after_may_be_seconds_or_a_date() -> None:
    assert parse_rate_limits({b"retry-after": b"7"}, 0.0).retry_after_s == 7
    assert parse_rate_limits({b"retry-after": b"Thu, 01 Jan 1970 00:01:00 GMT"}, 50.0).retry_after_s == 10
    assert parse_rate_limits({b"retry-after": b"7", b"retry-after-ms": b"250"}, 0.0).retry_after_s == 0.25
    assert parse_rate_limits({b"retry-after": b"when it suits"}, 0.0).retry_after_s is None
    assert parse_rate_limits({b"retry-after": b"99999999"}, 0.0).retry_after_s == 3600


def test_a_key_of_which_nothing_is_known_is_not_limited() -> None:
    assert KeyRateLimiter().available(0.0) == math.inf
    assert KeyRateLimiters(2).capacity(0.0) is None


def test_the_remaining_quota_counts_until_its_reset_less_calls_in_flight() -> None:
    key = KeyRateLimiter()
    for _ in range(3):
        key.sent(100)
    key.on_response(RateLimits(requests=5, requests_reset_s=10.0), 100, 1.0)
    assert key.available(1.0) == 3  # two are under way that may not have been counted
    key.on_response(RateLimits(), 100, 1.0)
    assert key.available(1.0) == 4
    assert key.available(11.5) == math.inf


def test_tokens_left_bound_calls_by_what_calls_cost() -> None:
    key = KeyRateLimiter()
    for _ in range(60):
        key.sent(1000)
        key.on_response(RateLimits(tokens=5500, tokens_reset_s=60.0), 1000, 1.0)
        key.ended()
    assert key.available(1.0) == 5
    assert key.available_at(1.0) == 1.0


def test_a_refused_key_pauses_for_retry_after_else_backs_off() -> None:
    key = KeyRateLimiter()
    assert key.refused(RateLimits(retry_after_s=5.0), 100.0) == 5
    assert (key.available(104.0), key.available(105.0)) == (0, math.inf)
    assert key.available_at(102.0) == 105
    fresh = KeyRateLimiter()
    pauses = [fresh.refused(RateLimits(), 0.0) for _ in range(8)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, MAX_PAUSE_S)
    fresh.accepted()
    assert fresh.refused(RateLimits(), 0.0) == 1.0
    assert fresh.refused(RateLimits(requests=0, requests_reset_s=9.0, tokens=4, tokens_reset_s=99.0), 0.0) == 9.0


def test_the_key_with_most_left_is_used() -> None:
    rate_limiter = KeyRateLimiters(3)
    for number, left in enumerate((4, 9, 0)):
        rate_limiter.keys[number].sent(1)
        rate_limiter.keys[number].on_response(RateLimits(requests=left, requests_reset_s=60.0), 1, 0.0)
        rate_limiter.keys[number].ended()
    assert rate_limiter.choose(1.0) == 1
    assert rate_limiter.capacity(1.0) == 13
    rate_limiter.keys[1].refused(RateLimits(retry_after_s=30.0), 1.0)
    assert rate_limiter.choose(1.0) == 0
    rate_limiter.keys[0].refused(RateLimits(retry_after_s=10.0), 1.0)
    assert rate_limiter.choose(1.0) is None
    assert rate_limiter.retry_after_s(1.0) == 10
    assert rate_limiter.choose(11.5) == 0


# -- on a worker -----------------------------------------------------------------------------------------------------


def refusing(headers: dict[str, str], *keys: str) -> Any:
    """Answers 429 to these keys (all, where none is named), and well to others."""

    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not keys or request.headers["authorization"].removeprefix("Bearer ") in keys:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=headers)
        return await well_behaved(up, request, body)

    return script


def test_too_many_calls_fail_with_retry_after() -> None:
    async def scenario() -> None:
        for headers, least, most in (
            ({"retry-after": "7"}, 6.0, 7.0),
            ({}, 0.5, 1.0),
            ({"retry-after": "x"}, 0.5, 1.0),
        ):
            async with Upstream(refusing(headers)) as up:
                error = error_of(await ran(up, profile=HOSTED, api_key="k"))
                assert (error.code, error.retryable, error.can_failover) == ("no_worker", True, True)
                assert error.retry_after_s is not None
                assert least <= error.retry_after_s <= most

    run(scenario())


def test_while_an_upstream_wants_a_pause_it_is_not_called() -> None:
    async def scenario() -> None:
        async with Upstream(refusing({"retry-after": "60"})) as up:
            worker, items = a_worker(up, profile=HOSTED, api_key="k"), list[Item]()
            await worker.start()
            assert worker.view().capacity.sequences == 256
            await worker.run(a_plan(a_call("a")), items.append)
            assert worker.view().capacity.sequences == 0
            await worker.run(a_plan(a_call("b")), items.append)
            assert len(up.bodies) == 1
            retry_after_s = error_of(items).retry_after_s
            assert retry_after_s is not None
            assert retry_after_s > 50
            await worker.close()

    run(scenario())


def test_another_key_is_used_without_a_client_error() -> None:
    async def scenario() -> None:
        async with Upstream(refusing({"retry-after": "60"}, "one")) as up:
            done(await ran(up, profile=HOSTED, api_keys=("one", "two")))
            used = [headers["authorization"] for headers in up.headers]
            assert used == ["Bearer one", "Bearer two"]
        async with Upstream(refusing({"retry-after": "60"})) as up:
            error_of(await ran(up, profile=HOSTED, api_keys=("one", "two")))
            assert len(up.bodies) == 2

    run(scenario())


def test_capacity_shrinks_to_what_the_upstream_still_allows() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"x-ratelimit-remaining-requests": "4", "x-ratelimit-reset-requests": "1m0s"}
        )
        await response.prepare(request)
        await up.release.wait()
        return response

    async def scenario() -> None:
        async with Upstream(script) as up:
            worker = a_worker(up, profile=HOSTED, api_key="k")
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call()), lambda item: None))
            async with asyncio.timeout(120):
                while worker.view().capacity.sequences == 256:
                    await asyncio.sleep(0.005)
            assert worker.view().capacity.sequences == 5  # the one under way and four more
            await worker.close()
            await running
            assert worker.view().capacity.sequences == 4
            up.release.set()

    run(scenario())


def test_a_hosted_api_gets_no_field_it_would_refuse() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            job = a_call(cache_salt="x", priority=3, return_token_ids=True, temperature=0.5)
            items = await ran(up, job, profile=HOSTED, api_key="k", wants_priorities=True)
            assert isinstance(items[-1], Done)
            (body,) = up.bodies
            assert not {"cache_salt", "priority", "return_token_ids"} & body.keys()
            assert body["temperature"] == 0.5
            assert body["stream_options"] == {"include_usage": True}

    run(scenario())


def test_calls_that_never_got_an_answer_do_not_hold_their_place() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await begin(request)

    async def scenario() -> None:
        async with Upstream(script) as up:
            worker, items = a_worker(up, profile=HOSTED, api_key="k"), list[Item]()
            await worker.start()
            for number in range(5):
                await worker.run(a_plan(a_call(f"j{number}")), items.append)
            assert worker._keys.limiter is not None
            assert worker._keys.limiter.keys[0].in_flight == 0
            assert worker._keys.limiter.keys[0]._unanswered == 0
            await worker.close()

    run(scenario())
