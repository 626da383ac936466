"""Two real servers and thirty-two greedy streams: every stream survives the loss of one server unchanged."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from support.gateway_process import Answer, GatewayProcess, Request, StreamReaders
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKS = [Request(number, tokens=400 + number % 33, chat=number % 2 == 0) for number in range(32)]
LEAST_STRUCK = 4
ALL_AT_ONCE = {"capacity": "fixed"}
"""How much of slow engines to use is another matter."""
Serve = Callable[..., GatewayProcess]
Pair = tuple[VllmServer, VllmServer]


def run(work: Coroutine[Any, Any, list[Answer]]) -> list[Answer]:
    return asyncio.run(asyncio.wait_for(work, 400))


async def read(url: str, strikes: Callable[[], bool] = lambda: True) -> list[Answer]:
    """All streams; meanwhile it is tried to strike until that has happened."""
    async with StreamReaders(url) as readers:
        return await readers.read_all(ASKS, until(strikes))


async def until(condition: Callable[[], bool]) -> None:
    """Engines and gateway are asked and not the readers: those may have fallen far behind."""
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.01)


def struck(gateway: GatewayProcess, server: VllmServer, blow: Callable[[], None]) -> list[Answer]:
    """All streams, with a blow to the server that has several of them begun and none ended.

    Its engine computes a little at a time until that is so: what is heard of it may be old, and left to itself it could
    have finished everything before the blow falls.
    """
    begun = server.metric("vllm:generation_tokens_total") + 40
    blows: list[float] = []
    with server.held() as held:

        def strikes() -> bool:
            held.run_for(0.2)
            written = server.settled("vllm:generation_tokens_total")
            at_work = server.metric("vllm:num_requests_running")
            if written < begun or at_work < LEAST_STRUCK:
                return False
            blow()
            blows.append(at_work)
            held.resume()
            return True

        answers = run(read(gateway.url, strikes))
    assert blows, "it was over before"
    return answers


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    """What the streams say when nothing happens; filled by the first who asks."""
    return []


@pytest.fixture
def expected(servers: Pair, undisturbed: list[Any]) -> list[Any]:
    """The answers of one server that is asked without a gateway between."""
    if not undisturbed:
        undisturbed += [answer.visible for answer in run(read(servers[1].url))]
    return undisturbed


def check(answers: list[Answer], expected: list[Any]) -> None:
    assert [answer.visible for answer in answers] == expected
    assert [answer.output_tokens for answer in answers] == [ask.tokens for ask in ASKS]
    assert all(len(answer.ids) == 1 for answer in answers), "a stream keeps its id"


def went_on(gateway: GatewayProcess) -> float:
    """How many attempts were lost and went on elsewhere."""
    return gateway.metric("inferry_attempt_retries_total")


def test_without_faults_no_output_is_lost(serve: Serve, expected: list[Any]) -> None:
    gateway = serve(ALL_AT_ONCE)
    check(run(read(gateway.url)), expected)
    gateway.until(gateway.is_empty, 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_streams_outlive_a_server_that_gets_a_signal(
    serve: Serve, servers: Pair, expected: list[Any], number: signal.Signals
) -> None:
    gateway = serve(ALL_AT_ONCE)
    check(struck(gateway, servers[0], lambda: servers[0].send_signal(number)), expected)
    assert went_on(gateway) >= LEAST_STRUCK
    gateway.until(gateway.is_empty, 10)


def test_streams_outlive_an_engine_core(serve: Serve, servers: Pair, expected: list[Any]) -> None:
    gateway = serve(ALL_AT_ONCE)
    check(struck(gateway, servers[0], servers[0].kill_engine_core), expected)
    assert went_on(gateway) >= LEAST_STRUCK
    gateway.until(gateway.is_empty, 10)


def test_preempted_streams_lose_nothing(serve: Serve, servers: Pair, expected: list[Any]) -> None:
    lanes = {"P0": {"may_preempt": ["P2"]}, "P2": {"preemptible": True}}
    gateway = serve({**ALL_AT_ONCE, "max_sequences": 6}, lanes=lanes)
    batch = [Request(ask.number, tokens=ask.tokens, chat=ask.chat, lane="P2") for ask in ASKS]
    live = [Request(100 + number, tokens=12, lane="P0") for number in range(8)]

    def written() -> float:
        return sum(server.metric("vllm:generation_tokens_total") for server in servers)

    before = written()

    def is_full() -> bool:
        return gateway.metric("inferry_queue_depth") > 0 and written() >= before + 200

    async def scenario() -> tuple[list[Answer], list[Answer]]:
        async with StreamReaders(gateway.url) as readers, StreamReaders(gateway.url) as urgent:
            reading = asyncio.ensure_future(readers.read_all(batch))
            waiting = asyncio.ensure_future(until(is_full))
            await asyncio.wait([waiting, reading], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            answers = await urgent.read_all(live)
            return await reading, answers

    answers, urgent = asyncio.run(asyncio.wait_for(scenario(), 400))
    check(answers, expected)
    assert [answer.output_tokens for answer in urgent] == [12] * len(live)
    assert went_on(gateway) >= 1, "nobody had to make way"
    gateway.until(gateway.is_empty, 10)
