"""Clients and servers on one event loop in virtual time, with every byte through a socket pair of the kernel.

What one side of a socket pair writes can be read from the other side at once, so no byte is under way when the clock
jumps: what is measured depends on the scripts and not on the machine. `time.perf_counter` is the loop's time meanwhile,
since that is what the load generator and the probes measure with.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from support.virtual_time import VirtualTimeLoop

T = TypeVar("T")
Start = Callable[[], Awaitable[Callable[[], Awaitable[None]]]]
"""Starts what shall serve on the loop it is called on; what it returns ends it."""


class VirtualNetLoop(VirtualTimeLoop):
    """`create_server` and `create_connection` meet by their port, on this loop alone."""

    def __init__(self) -> None:
        super().__init__()
        self._factories: dict[int, Any] = {}
        self._ports = itertools.count(20_000)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Any,
        host: Any = None,
        port: int | None = None,
        sock: socket.socket | None = None,
        **options: Any,
    ) -> "_Listening":
        # Of a socket only its number is used.
        port = port or (0 if sock is None else sock.getsockname()[1]) or next(self._ports)
        self._factories[port] = protocol_factory
        return _Listening(port, self._factories, sock)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: int | None = None, **options: Any
    ) -> Any:
        factory = self._factories.get(port or 0)
        if factory is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = socket.socketpair()
        await self.connect_accepted_socket(factory, theirs)
        return await super().create_connection(protocol_factory, sock=ours)


class _Listening:
    """As much of an `asyncio.Server` as its users need."""

    def __init__(self, port: int, factories: dict[int, Any], sock: socket.socket | None) -> None:
        self._port, self._factories, self._sock = port, factories, sock

    @property
    def sockets(self) -> tuple["_Listening"]:
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self._port)

    def is_serving(self) -> bool:
        return self._port in self._factories

    def close(self) -> None:
        self._factories.pop(self._port, None)
        if self._sock is not None:
            self._sock.close()

    async def wait_closed(self) -> None: ...


def run_virtual_net(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, with the world of `work` on one loop."""
    loop = VirtualNetLoop()
    with patch.object(time, "perf_counter", loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


@contextmanager
def loops_with(start: Start) -> Iterator[list[float]]:
    """Every loop that uvloop is asked for is a virtual one on which `start` has been called.

    For commands that make their own loop. Gives the virtual seconds that each has run for.
    """
    took: list[float] = []

    class Peopled(VirtualNetLoop):
        def __init__(self) -> None:
            super().__init__()
            self._clock = patch.object(time, "perf_counter", self.time)
            self._clock.start()
            self._end = self.run_until_complete(_started(start))
            self._began = self.time()

        def close(self) -> None:
            if not self.is_closed():
                took.append(self.time() - self._began)
                self.run_until_complete(_ended(self._end))
                self._clock.stop()
            super().close()

    with patch("uvloop.new_event_loop", Peopled):
        yield took


async def _started(start: Start) -> Callable[[], Awaitable[None]]:
    return await start()


async def _ended(end: Callable[[], Awaitable[None]]) -> None:
    await end()
    await asyncio.sleep(0.01)  # virtual: transports close in the turns after
