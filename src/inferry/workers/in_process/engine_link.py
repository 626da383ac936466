"""The gateway's side of an engine: `Link`, and `EngineLink` to a process on this host over a socket."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, cast

from msgspec import Struct

from inferry.engine.messages import Frames, Shutdown, frame

_SHUTDOWN_GRACE_S = 5.0


class EngineProgram(NamedTuple):
    """What to run as an engine. The descriptor of its socket is the last argument, `setup` the first message.

    `grace_s` is the time between the request to stop and a kill.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    setup: Struct
    grace_s: float = _SHUTDOWN_GRACE_S


class Link(Protocol):
    """A connection to an engine that speaks `engine.messages`.

    `finished` is done when the connection is lost. `exit_message` is the engine's own last error. `pid` is the engine's
    process on this host.
    """

    exit_message: str | None

    @property
    def finished(self) -> "asyncio.Future[None]": ...

    @property
    def pid(self) -> int | None: ...

    def send(self, message: Struct) -> None: ...

    def kill(self) -> None:
        """End an engine that has stopped answering."""


OpenLink = Callable[[Callable[[bytes], None]], AbstractAsyncContextManager[Link]]
"""Starts or finds an engine and connects to it. The argument is called with the body of each message."""


class EngineLink(asyncio.Protocol):
    """An engine process and the socket to it; `finished` is done when the socket is closed."""

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

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def send(self, message: Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def kill(self) -> None:
        """Kill the process and its children. It leads a session of its own, so its group holds nothing else."""
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
        """Ask the process to stop, and kill it after the grace period. Returns when process and socket are gone."""
        self.send(Shutdown())
        if self._transport is None:
            ours.close()
            self.finished.set_result(None)
        else:
            self._transport.close()
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[None] = loop.create_future()
        waiter = threading.Thread(target=_report_exit, args=(self.process, loop, exited), daemon=True)
        waiter.start()
        try:
            _, pending = await asyncio.wait({exited, self.finished}, timeout=self._grace_s)
            if pending:
                self.kill()
                if self._transport is not None:
                    self._transport.abort()
                await asyncio.wait(pending)
            waiter.join()
        finally:
            self.kill()  # children outlive a process that was killed


def _report_exit(
    process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop, exited: "asyncio.Future[None]"
) -> None:
    """Runs in a thread: asyncio can only await processes that it has started itself."""
    process.wait()
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(_set_done, exited)


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _spawn(program: EngineProgram, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process in a session of its own, so that Ctrl-C and a SIGTERM to the group reach the gateway alone."""
    return subprocess.Popen(  # noqa: S603 (an interpreter and a module of our own choice)
        [*program.command, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=dict(program.environment),
    )
