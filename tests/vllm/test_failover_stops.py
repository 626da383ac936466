"""Greedy streams with stop strings survive the loss of a real server and stop at the same place."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from inferry.domain.values import replace
from support.gateway_process import Answer, GatewayProcess, Request, StreamReaders
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PLAIN = [Request(number, tokens=300, chat=number % 2 == 0) for number in range(24)]
LEAST_STRUCK = 4
Serve = Callable[..., GatewayProcess]


def read(url: str, asks: list[Request], strikes: Callable[[], bool] | None = None) -> list[Answer]:
    async def until() -> None:
        while strikes is not None and not await asyncio.to_thread(strikes):
            await asyncio.sleep(0.01)

    async def scenario() -> list[Answer]:
        async with StreamReaders(url) as readers:
            return await readers.read_all(asks, until())

    return asyncio.run(asyncio.wait_for(scenario(), 400))


def stopped(ask: Request, text: str) -> Request:
    """The same with stop strings: one that comes late in the text, and two that never do, so that much is held back."""
    late = len(text) * 3 // 4
    stop = next(
        text[at : at + size]
        for size in (9, 17, 33, 65)
        for at in range(late, len(text) - size)
        if text.find(text[at : at + size]) > len(text) // 2
    )
    never = ("\x01" + text[5:40], text[late : late + 3] + "\x01")
    return replace(ask, stop=(never[0], stop, never[1]), includes_stop=ask.number % 3 == 0)


def visible(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.finish, answer.stop_reason


def test_streams_with_stop_strings_outlive_their_server(serve: Serve, servers: tuple[VllmServer, VllmServer]) -> None:
    first, second = servers
    texts = [answer.text for answer in read(second.url, PLAIN)]
    asks = [stopped(ask, text) for ask, text in zip(PLAIN, texts, strict=True)]
    expected = read(second.url, asks)
    assert {answer.finish for answer in expected} == {"stop"}
    gateway = serve({"capacity": "fixed"})
    begun = first.metric("vllm:generation_tokens_total") + 40 * LEAST_STRUCK
    with first.held() as held:

        def strikes() -> bool:
            held.run_for(0.2)
            written = first.settled("vllm:generation_tokens_total")
            if written < begun or first.metric("vllm:num_requests_running") < LEAST_STRUCK:
                return False
            first.send_signal(signal.SIGKILL)
            held.resume()
            return True

        answers = read(gateway.url, asks, strikes)
    assert [visible(answer) for answer in answers] == [visible(answer) for answer in expected]
    assert all(len(answer.ids) == 1 for answer in answers), "a stream keeps its id"
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.output_tokens is not None
        assert wanted.output_tokens is not None
        # Tokens behind a stop string in an event that joins several are counted with it.
        assert 0 <= answer.output_tokens - wanted.output_tokens <= 32
    assert gateway.metric("inferry_attempt_retries_total") >= LEAST_STRUCK
    gateway.until(gateway.is_empty, 10)
