"""The HTTP client against servers written byte by byte."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Done, Failed, Item
from inferry.workers.http_client import Client, Connection
from inferry.workers.openai_http.profiles import Profile
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.upstream import DONE, chunk, usage
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
MODELS = b'{"data":[{"id":"m"}]}'
ANSWER = chunk("a") + chunk("b", "stop") + usage(1, 2) + DONE

PLAIN = Profile(kind="plain")
"""A server that is asked for nothing but completions."""

Serve = Callable[[int, int, asyncio.StreamWriter], Awaitable[bool]]


def framed(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + extra + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(*parts: bytes) -> bytes:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


def calls(serve: Serve, count: int = 1) -> tuple[list[Item], int]:
    """The ends of `count` calls one after another, and how many connections it took.

    `serve(connection, request, writer)` answers a call, both counted from 0, and says whether to keep the connection.
    """
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number, served = connections, 0
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if head.startswith(b"GET"):
                    writer.write(framed(MODELS))
                    continue
                keep = await serve(number, served, writer)
                served += 1
                if not keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def scenario() -> list[Item]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        worker = OpenAIHttpWorker(
            "up", HttpWorkerSettings(url=url, profile=PLAIN, first_token_timeout_s=5), LoopClock()
        )
        ends: list[Item] = []
        try:
            await worker.start()
            for _ in range(count):
                plan = BatchPlan(
                    plan_id=1, worker="up", jobs=(a_job(body=BODY),), reason=ReleaseReason.IMMEDIATE, formed_at=0.0
                )
                items: list[Item] = []
                await worker.run(plan, items.append)
                ends.append(items[-1])
        finally:
            await worker.close()
            server.close()
            await server.wait_closed()
        return ends

    return run_virtual_net(asyncio.wait_for(scenario(), 120)), connections


def test_connections_are_kept_and_used_again() -> None:
    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(chunked(ANSWER))
        return True

    ends, connections = calls(serve, count=5)
    assert all(isinstance(end, Done) for end in ends)
    assert connections == 1


def test_a_dead_pooled_connection_fails_no_call() -> None:
    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        if request == 1:
            return False  # closes without a word, as a server does whose keep-alive ran out meanwhile
        writer.write(chunked(ANSWER))
        return True

    ends, connections = calls(serve, count=4)
    assert all(isinstance(end, Done) for end in ends)
    assert connections > 1


def test_a_fresh_connection_that_breaks_is_not_tried_for_ever() -> None:
    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        return False

    (end,), connections = calls(serve)
    assert isinstance(end, Failed)
    assert end.error.code == "worker_lost"
    assert connections == 2  # the one that listed the models had been used before


def test_a_request_whose_answer_had_begun_is_never_sent_again() -> None:
    seen = 0

    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        nonlocal seen
        seen += 1
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        return False

    (end,), _ = calls(serve)
    assert isinstance(end, Failed)
    assert seen == 1


@pytest.mark.parametrize(
    ("answer", "is_good"),
    [
        (framed(ANSWER), True),
        (chunked(ANSWER[:30], ANSWER[30:31], ANSWER[31:]), True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(ANSWER), True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + ANSWER, True),
        (b"HTTP/1.0 200 OK\r\n\r\n" + ANSWER, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + ANSWER.removesuffix(DONE), True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + chunk("a"), False),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", False),
        (b"", False),
    ],
    ids=[
        "length",
        "chunks",
        "continue",
        "close",
        "http-1.0",
        "only-the-end-missing",
        "short",
        "not-http",
        "bad-chunk",
        "nothing",
    ],
)
def test_every_way_to_frame_an_answer(answer: bytes, is_good: bool) -> None:
    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        await writer.drain()
        return False

    (end,), _ = calls(serve)
    assert isinstance(end, Done) == is_good


class Impatient:
    """Has enough with the first bytes of the body."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.bodies: list[bytes] = []

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None:
        self.bodies.append(body)
        self._connection.discard_rest()

    def on_end(self) -> None:
        self.bodies.append(b"end")

    def on_lost(self, cause: str) -> None:
        self.bodies.append(b"lost")


def test_a_discarded_response_that_ends_soon_keeps_its_connection() -> None:
    async def scenario() -> None:
        enough = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
            await enough.wait()
            writer.write(b"1\r\nb\r\n0\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, 5.0)
        connection = await client.connect()
        exchange = Impatient(connection)
        connection.start(exchange, client.request(b"GET", b"/", b""))
        while not exchange.bodies:
            await asyncio.sleep(0)
        assert client.free() is None
        enough.set()
        while (kept := client.free()) is None:
            await asyncio.sleep(0)
        assert kept is connection
        assert exchange.bodies == [b"a"]
        client.close()
        server.close()
        await server.wait_closed()

    run_virtual_net(asyncio.wait_for(scenario(), 120))


def test_a_long_body_arrives_whole() -> None:
    async def scenario() -> None:
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            got.set_result(await reader.readexactly(length))
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, 5.0)
        connection = await client.connect()
        body = bytes(range(256)) * 20_000
        connection.start(Impatient(connection), client.request(b"POST", b"/", b"", memoryview(body)[:-3], b"end"))
        assert await got == body[:-3] + b"end"
        client.close()
        server.close()
        await server.wait_closed()

    run_virtual_net(asyncio.wait_for(scenario(), 120))


def test_unsolicited_bytes_reach_no_call() -> None:
    async def serve(connection: int, request: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(chunked(ANSWER) + chunked(chunk("stray")))
        return True

    ends: list[Any]
    ends, _ = calls(serve, count=3)
    assert all(isinstance(end, Done) for end in ends)
