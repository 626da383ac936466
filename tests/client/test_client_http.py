"""The client's HTTP against servers that behave in every allowed and forbidden way."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from inferry.client import AsyncClient, ConnectionFailed, Overloaded
from inferry.client.http import HttpClient
from support.serving import closed_port_url

OBJECT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class RawServer:
    """Answers each request with the next of `answers`, byte for byte. None closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.times: list[float] = []
        self.connections = 0
        self.gone = asyncio.Event()

    async def __aenter__(self) -> "RawServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.times.append(asyncio.get_running_loop().time())
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            self.gone.set()
        finally:
            writer.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(bounded())


def a_client(server: RawServer, **more: Any) -> HttpClient:
    return HttpClient(server.url, **{"timeout_s": 100.0, "connect_timeout_s": 100.0, **more})


def test_a_connection_is_used_again() -> None:
    async def scenario() -> None:
        async with RawServer(OK, OK) as server:
            client = a_client(server)
            for _ in range(2):
                response = await client.send("POST", "/x", {"x-a": "b"}, b"body")
                assert (response.status, await response.read()) == (200, b"ok")
            client.close()
            assert server.connections == 1
            assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
            assert server.requests[0].endswith(b"x-a: b\r\n\r\nbody")

    run(scenario())


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async def scenario() -> None:
        closing = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        async with RawServer(closing, OK) as server:
            client = a_client(server)
            for _ in range(2):
                assert await (await client.send("GET", "/", {})).read() == b"ok"
            client.close()
            assert server.connections == 2

    run(scenario())


def test_chunks_and_interim_responses_are_read() -> None:
    async def scenario() -> None:
        chunked = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-A: 1\r\ntransfer-encoding: chunked\r\n\r\n"
        async with RawServer(chunked + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", OK) as server:
            client = a_client(server)
            response = await client.send("GET", "/", {})
            assert (response.status, response.headers["x-a"]) == (200, "1")
            assert await response.read() == b"abc"
            assert await (await client.send("GET", "/", {})).read() == b"ok"
            client.close()
            assert server.connections == 1

    run(scenario())


@pytest.mark.parametrize(
    "answers",
    [
        (None,),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", None),
        (b"no HTTP at all\r\n\r\n",),
    ],
)
def test_a_cut_or_malformed_response_is_an_error(answers: tuple[bytes | None, ...]) -> None:
    async def scenario() -> None:
        async with RawServer(*answers) as server:
            client = a_client(server)
            with pytest.raises(ConnectionFailed):
                response = await client.send("GET", "/", {})
                if len(answers) == 2:  # the second request on the connection makes the server close it
                    assert response._connection is not None
                    response._connection.writer.write(b"GET / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
                await response.read()

    run(scenario())


def test_a_server_that_is_not_there_or_silent_is_an_error() -> None:
    async def scenario() -> None:
        with closed_port_url() as url:
            async with AsyncClient(url) as client:
                with pytest.raises(ConnectionFailed):
                    await client.complete("hi", model="m")
        async with RawServer(b"") as server:
            with pytest.raises(ConnectionFailed, match="no bytes arrived"):
                await a_client(server, timeout_s=0.01).send("GET", "/", {})
            await server.gone.wait()

    run(scenario())


def test_a_cancelled_exchange_closes_its_connection() -> None:
    async def scenario() -> None:
        async with RawServer(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf") as server:
            response = await a_client(server).send("GET", "/", {})
            reading = asyncio.ensure_future(response.read())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            response.close()
            await server.gone.wait()

    run(scenario())


def test_headers_cannot_be_smuggled() -> None:
    async def scenario() -> None:
        async with RawServer() as server:
            for headers in ({"x-a": "b\r\nx-b: c"}, {"x\n": "b"}):
                with pytest.raises(ValueError, match="line break"):
                    await a_client(server).send("GET", "/", headers)
            assert server.connections == 0

    run(scenario())


def test_urls_are_checked() -> None:
    for url in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="URL"):
            HttpClient(url, timeout_s=1, connect_timeout_s=1)


# -- retries -----------------------------------------------------------------------------------------------------------

BUSY = b'{"error":{"message":"full","code":"queue_full"}}'
ANSWER = b'{"model":"m","choices":[{"text":"hello","finish_reason":"stop"}]}'


def answer(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), lines, body)


def test_a_refused_call_is_sent_again_when_the_gateway_says() -> None:
    async def scenario() -> None:
        busy = answer(429, BUSY, b"x-should-retry: true", b"retry-after-ms: 60", b"retry-after: 1")
        async with RawServer(busy, busy, answer(200, ANSWER)) as server, AsyncClient(server.url) as client:
            assert (await client.complete("hi", model="m")).text == "hello"
            first, second, third = server.times
            assert second - first >= 0.06
            assert third - second >= 0.06
            assert server.requests[0] == server.requests[2]

    run(scenario())


@pytest.mark.parametrize(
    ("headers", "retries", "requests"),
    [
        ((b"x-should-retry: true", b"retry-after-ms: 1"), 0, 1),
        ((b"x-should-retry: true", b"retry-after-ms: 1"), 1, 2),
        ((b"x-should-retry: false", b"retry-after-ms: 1"), 5, 1),
        ((b"retry-after-ms: 1",), 5, 1),
        ((b"x-should-retry: true", b"retry-after: 3600"), 5, 1),
    ],
)
def test_other_calls_are_not_sent_again(headers: tuple[bytes, ...], retries: int, requests: int) -> None:
    async def scenario() -> None:
        busy = answer(429, BUSY, *headers)
        async with RawServer(*[busy] * 9) as server, AsyncClient(server.url, retries=retries) as client:
            with pytest.raises(Overloaded) as raised:
                await client.complete("hi", model="m")
            assert raised.value.code == "queue_full"
            assert len(server.requests) == requests

    run(scenario())


def test_a_batch_waits_for_capacity() -> None:
    async def scenario() -> None:
        busy = answer(429, BUSY, b"x-should-retry: true", b"retry-after-ms: 1")
        async with RawServer(*[busy] * 20, answer(200, ANSWER)) as server, AsyncClient(server.url) as client:
            (result,) = await client.batch_complete(["hi"], model="m")
            assert getattr(result, "text", None) == "hello"
            assert b"x-inferry-lane: P2" in server.requests[0]

    run(scenario())


def test_a_stream_without_its_end_was_cut() -> None:
    async def scenario() -> None:
        event = b'data: {"model":"m","choices":[{"text":"hel"}]}\n\n'
        async with RawServer(answer(200, event)) as server, AsyncClient(server.url) as client:
            stream = client.stream("hi", model="m")
            assert (await anext(stream)).text == "hel"
            with pytest.raises(ConnectionFailed, match="cut"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="not ended"):
                _ = stream.completion

    run(scenario())


def test_the_scope_of_a_cancelled_run_sends_no_finish() -> None:
    async def scenario() -> None:
        async with RawServer(OBJECT, OBJECT) as server, AsyncClient(server.url) as client:
            async with client.run("r") as run:
                await run.cancel()
            assert [request.split(b" ")[:2] for request in server.requests] == [[b"DELETE", b"/v1/runs/r?wait_ms=1000"]]

    run(scenario())
