"""An engine's process and the socket to it, from this side."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple, cast

from msgspec import Struct

from inferry.engine.messages import Frames, Shutdown, frame

_SHUTDOWN_GRACE_S = 5.0
_POLL_S = 0.005


class EngineProgram(NamedTuple):
    """What to run as an engine: the number of its end of the socket comes as the last argument, `setup` as the first
    message.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    setup: Struct
    grace_s: float = _SHUTDOWN_GRACE_S


class EngineLink(asyncio.Protocol):
    """An engine process and the socket to it; `finished` is done when the socket is."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        on_message: Callable[[bytes], None],
        grace_s: float = _SHUTDOWN_GRACE_S,
    ) -> None:
        self.process = process
        self.exit_message: str | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._grace_s = grace_s
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, program: EngineProgram, on_message: Callable[[bytes], None]) -> "AsyncIterator[EngineLink]":
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _spawn(program, theirs)
        except BaseException:
            ours.close()
            raise
        link = cls(process, on_message, program.grace_s)
        try:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            link.send(program.setup)
            yield link
        finally:
            await link._end(ours)

    def send(self, message: Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def kill(self) -> None:
        """The process and whatever it started: its session is its own, so its group has nobody else in it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    async def _end(self, ours: socket.socket) -> None:
        """Ask it to stop, give it a moment, then make it. Returns with processes and socket gone."""
        self.send(Shutdown())
        if self._transport is None:
            ours.close()
            self.finished.set_result(None)
        else:
            self._transport.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        try:
            while self.process.poll() is None or not self.finished.done():
                if loop.time() > deadline:
                    self.kill()
                    if self._transport is not None:
                        self._transport.abort()
                await asyncio.sleep(_POLL_S)
        finally:
            self.kill()  # one that was killed itself leaves its children behind


def _spawn(program: EngineProgram, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that Ctrl-C and a SIGTERM to the group reach the gateway alone."""
    return subprocess.Popen(  # noqa: S603 (an interpreter and a module of our own choice)
        [*program.command, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=dict(program.environment),
    )
