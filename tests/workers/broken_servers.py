"""Servers that break the protocol on purpose, and calls against them."""

import asyncio
from typing import Any

from aiohttp import web

from inferry.domain.streams import Delta, Done, Failed, Item
from inferry.workers.openai_http.profiles import Profile
from support.http_jobs import a_call, ran, run
from support.upstream import DONE, Script, Upstream, begin, chunk, role, usage

PLAIN = Profile(kind="plain")


GOOD = role() + chunk("Hé") + chunk("llo", "stop") + usage(3, 2) + DONE


def says(*pieces: bytes, pause_s: float = 0.0) -> Script:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause_s)
        return response

    return script


def against(script: Script, **settings: Any) -> list[Item]:
    found: list[Item] = []

    async def scenario() -> None:
        async with Upstream(script) as up:
            found.extend(await ran(up, a_call(tokens=30), **settings))

    run(scenario())
    check_order(found)
    return found


def check_order(items: list[Item]) -> None:
    """The law of every stream."""
    assert [isinstance(item, Done | Failed) for item in items] == [False] * (len(items) - 1) + [True]
    assert [item.index for item in items if isinstance(item, Delta)] == list(range(len(items) - 1))


class Pieces:
    """A server that writes its answer's bytes as they are, in the pieces it was told."""

    def __init__(self, *pieces: bytes, resets: bool = False) -> None:
        self._pieces = pieces
        self._resets = resets

    async def items(self, **settings: Any) -> list[Item]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            if head.startswith(b"GET"):
                models = b'{"data":[{"id":"m"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models)
                )
            else:
                for piece in self._pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            if self._resets:
                writer.transport.abort()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        up = Upstream()
        up.port = server.sockets[0].getsockname()[1]
        try:
            items = await ran(up, a_call(), profile=PLAIN, **settings)
        finally:
            server.close()
            await server.wait_closed()
        check_order(items)
        return items


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
