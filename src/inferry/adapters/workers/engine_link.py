"""The engine's process and the socket to it, from this side."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from inferry.engine.config import EngineConfig
from inferry.engine.messages import Frames, Shutdown, ToEngine, frame, setup

_SHUTDOWN_GRACE_S = 5.0
_POLL_S = 0.005


class EngineLink(asyncio.Protocol):
    """An engine process and the socket to it; `gone` is done when the socket is."""

    def __init__(self, process: "subprocess.Popen[bytes]", on_message: Callable[[bytes], None]) -> None:
        self.process = process
        self.last_words: str | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, model_dir: Path, config: EngineConfig, on_message: Callable[[bytes], None]
    ) -> "AsyncIterator[EngineLink]":
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _spawn(theirs)
        except BaseException:
            ours.close()
            raise
        link = cls(process, on_message)
        try:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            link.send(setup(model_dir, config))
            yield link
        finally:
            await link._end(ours)

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def _end(self, ours: socket.socket) -> None:
        """Ask it to stop, give it a moment, then make it. Returns with process and socket gone."""
        self.send(Shutdown())
        if self._transport is None:
            ours.close()
            self.gone.set_result(None)
        else:
            self._transport.close()
        loop = asyncio.get_running_loop()
        patience = loop.time() + _SHUTDOWN_GRACE_S
        while self.process.poll() is None or not self.gone.done():
            if loop.time() > patience:
                self.process.kill()
                if self._transport is not None:
                    self._transport.abort()
            await asyncio.sleep(_POLL_S)


def _spawn(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that Ctrl-C and a SIGTERM to the group reach the gateway alone."""
    environment = dict(os.environ)
    package_root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    return subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [sys.executable, "-m", "inferry.engine.process", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=environment,
    )
