"""Timeouts of upstream servers: slow headers, silence, endless comments and refusals."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.streams import FinishReason
from support.http_jobs import done, error_of
from support.upstream import Upstream, begin, chunk, role
from workers.broken_servers import GOOD, against, says


def test_slow_headers_are_accepted_and_missing_ones_time_out() -> None:
    async def slow(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await says(GOOD)(up, request, body)

    async def never(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await up.release.wait()
        return await begin(request)

    done(against(slow, first_token_timeout_s=10, inter_token_timeout_s=0.1))
    assert error_of(against(never, first_token_timeout_s=0.2)).code == "worker_timeout"


def test_the_itl_timeout_is_shorter_than_the_first_token_timeout() -> None:
    async def sigterm(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(role() + chunk("a"))
        await up.release.wait()
        return response

    items = against(sigterm, first_token_timeout_s=60, inter_token_timeout_s=0.2)
    assert error_of(items).code == "worker_timeout"
    assert error_of(items).message == "worker up sent no token for 0.2 s"


def test_silence_after_the_finish_event_is_not_a_loss() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a") + chunk("b", "stop"))
        await up.release.wait()
        return response

    items = against(script, inter_token_timeout_s=0.2)
    assert (done(items).finish, done(items).usage.output_tokens) == (FinishReason.STOP, 2)


def test_comments_do_not_extend_the_itl_timeout() -> None:
    async def pings(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(role() + chunk("a"))
        while not up.release.is_set():
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.02)
        return response

    assert error_of(against(pings, first_token_timeout_s=60, inter_token_timeout_s=0.3)).code == "worker_timeout"


@pytest.mark.parametrize("word", [b": ping\n\n", role(), b"d"], ids=["comments", "roles", "half an event"])
def test_empty_events_do_not_extend_the_first_token_timeout(word: bytes) -> None:
    async def pings(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while not up.release.is_set():
            await response.write(word)
            await asyncio.sleep(0.02)
        return response

    assert error_of(against(pings, first_token_timeout_s=0.3)).code == "worker_timeout"


def test_a_refusal_that_never_ends_times_out() -> None:
    async def drip(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        while not up.release.is_set():
            await response.write(b".")
            await asyncio.sleep(0.02)
        return response

    assert error_of(against(drip, first_token_timeout_s=0.3)).code == "worker_timeout"
