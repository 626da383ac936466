"""A connection without a socket: bytes in, bytes out, and a manual clock."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from inferry.ingress.http.connection import Connection
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.server import Server


class _Timer:
    def __init__(self, act: Callable[[], object]) -> None:
        self.act: Callable[[], object] | None = act

    def cancel(self) -> None:
        self.act = None


class ManualLoop:
    """What a connection asks of its event loop; `run_ready` runs what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        self._ready.append(lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        timer = _Timer(lambda: callback(*args))
        self._count += 1
        heapq.heappush(self._timers, (self.now + delay, self._count, timer))
        return timer

    def run_ready(self) -> None:
        while self._ready:
            self._ready.popleft()()

    def advance(self, seconds: float) -> None:
        """Let the time pass, with everything that happens meanwhile."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if timer.act is not None:
                timer.act()
            self.run_ready()
        self.now = end


def as_loop(loop: ManualLoop) -> asyncio.AbstractEventLoop:
    return cast(asyncio.AbstractEventLoop, loop)


class FakeTransport:
    """The transport of one connection, as the connection sees it; and what its client sees of it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_reading = True
        self.is_ended = False
        self.is_closed = False
        self.is_aborted = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    @property
    def answers(self) -> bytes:
        return b"".join(self.written)


def say_ok(request: Request, reply: Reply) -> None:
    """The simplest of servers: it says whether the request could be had."""
    reply.respond(200 if request.problem is None else request.problem.status, b"", b"")


def a_server(
    serve: Callable[[Request, Reply], None] = say_ok,
    *,
    max_body_bytes: int = 1_000_000,
    accepts_body: Callable[[Request, str], bool] | None = None,
) -> tuple[Server, ManualLoop]:
    loop = ManualLoop()
    server = Server(
        serve,
        max_body_bytes=max_body_bytes,
        body_timeout_s=30.0,
        idle_timeout_s=75.0,
        accepts_body=accepts_body,
        loop=as_loop(loop),
    )
    return server, loop


def connect(server: Server, loop: ManualLoop) -> tuple[Connection, FakeTransport]:
    transport = FakeTransport()
    connection = Connection(server, as_loop(loop))
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, transport


def feed(connection: Connection, transport: FakeTransport, loop: ManualLoop, pieces: Iterable[bytes]) -> None:
    """Send pieces as a socket does: none is delivered while nothing is read, or after the end."""
    for piece in pieces:
        if transport.is_closed:
            return
        assert transport.is_reading, "nothing is read although everything has been answered"
        connection.data_received(piece)
        loop.run_ready()


def converse(pieces: Iterable[bytes], serve: Callable[[Request, Reply], None] = say_ok) -> FakeTransport:
    """One connection to a house of its own, and all that is said on it."""
    server, loop = a_server(serve)
    connection, transport = connect(server, loop)
    feed(connection, transport, loop, pieces)
    return transport
