"""TCP proxies that can be cut: nothing passes, as in a network partition, until they are healed."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from support.serving import free_port

T = TypeVar("T")


class Proxies:
    """`with Proxies() as proxies:` all proxies run on one thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._all: list[Proxy] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def to(self, target: str | int) -> "Proxy":
        """A proxy before a Unix socket (a path) or a port of this host."""
        proxy = Proxy(self, target)
        self.run(proxy.start())
        self._all.append(proxy)
        return proxy

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _close(self) -> None:
        for proxy in self._all:
            await proxy.stop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Proxy:
    """Connections of its clients go to the target. While it is cut bytes wait; healing delivers them, or resets."""

    def __init__(self, owner: Proxies, target: str | int) -> None:
        self._owner = owner
        self._target = target
        self.port = free_port()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def is_cut(self) -> bool:
        return not self._open.is_set()

    def cut(self) -> None:
        self._owner.run(self._cut())

    def heal(self, *, resets: bool = False) -> None:
        self._owner.run(self._heal(resets))

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        self._server.close()
        await self._heal(True)

    async def _cut(self) -> None:
        self._open.clear()

    async def _heal(self, resets: bool) -> None:
        if resets:
            for writer in list(self._writers):
                writer.transport.abort()
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            other_reader, other_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(other_writer)
        try:
            await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))
        finally:
            for one in (writer, other_writer):
                self._writers.discard(one)
                one.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, str):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection("127.0.0.1", self._target)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes in one direction, then its end, which is also that of a connection that was reset."""
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            await self._open.wait()
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.transport.abort()
