"""The actor that runs the engine of a replica and connects one gateway to it.

The engine is the same process that an in-process worker runs, with the same messages. `EngineHost` forwards them: the
engine's messages through the streaming generator of `connect`, all messages since the last one as one batch; the
gateway's messages through calls of `send`. All methods run on the event loop of the actor.

One gateway is connected at a time. A second one is refused while the first is heard from, so that two gateways cannot
exceed the engine's capacity together. The requests of a gateway that has fallen silent are aborted.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from inferry.engine.messages import (
    Abort,
    Aborted,
    Draining,
    Fatal,
    Heartbeat,
    Ready,
    Shutdown,
    decode_from_engine,
    frame,
)
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram
from inferry.workers.ray.session import Session

SILENCE_S = 5.0
"""A gateway that has sent nothing for this long is gone. It sends a heartbeat every second."""
CHECK_INTERVAL_S = 0.5
_HOST_ABORT = 0
"""The number of the host's own aborts; a gateway counts its calls from 1."""


class EngineHost:
    """`make_program` is called on the replica's node: its interpreter and environment are those of the node."""

    def __init__(self, make_program: Callable[[], EngineProgram], silence_s: float = SILENCE_S) -> None:
        self._make_program = make_program
        self._silence_s = silence_s
        self._link: EngineLink | None = None
        self._ready: bytes | None = None
        self._is_ready = asyncio.Event()
        self._is_draining = False
        self._session: Session | None = None
        self._outbox: list[bytes] = []
        self._has_news = asyncio.Event()
        self._pending_aborts = 0
        self._is_idle = asyncio.Event()

    async def run(self) -> str:
        """Run the engine until it ends; return the reason."""
        async with EngineLink.open(self._make_program(), self._on_message) as link:
            self._link = link
            while not link.finished.done():
                await asyncio.wait({link.finished}, timeout=CHECK_INTERVAL_S)
                session = self._session
                if session is not None and time.monotonic() - session.heard_at > self._silence_s:
                    self._end_session()
            self._link = None
            self._end_session()
            self._is_ready.set()
            return link.exit_message or "the engine process ended"

    async def wait_ready(self) -> None:
        """Return when the engine can generate. Raises RuntimeError where it has ended."""
        await self._is_ready.wait()
        if self._link is None:
            raise RuntimeError("the engine did not start")

    async def connect(self, session_id: str) -> AsyncIterator[bytes]:
        """The engine's messages in batches, until the session or the engine ends. The first batch is empty."""
        if self._session is not None:
            yield frame(Fatal("another gateway is connected to the replica"))
            return
        session = self._session = Session(session_id, time.monotonic())
        self._outbox = [] if self._ready is None else [self._ready]
        if self._is_draining:
            self._outbox.append(frame(Draining()))
        yield b""
        while self._session is session or self._outbox:
            if not self._outbox:
                self._has_news.clear()
                await self._has_news.wait()
            batch, self._outbox = b"".join(self._outbox), []
            if batch:
                yield batch

    async def send(self, session_id: str, number: int, data: bytes) -> None:
        """Messages of the gateway; an empty batch is its heartbeat."""
        session = self._session
        if session is None or session.session_id != session_id:
            return
        for message in session.received(number, data, time.monotonic()):
            if self._link is not None and not isinstance(message, Shutdown):
                self._link.send(message)

    async def disconnect(self, session_id: str) -> None:
        """The gateway is done with the replica."""
        if self._session is not None and self._session.session_id == session_id:
            self._end_session()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; return when those that the engine has are done, or after the timeout."""
        self._is_draining = True
        self._forward(frame(Draining()))
        if self._session is not None and self._session.keys:
            self._is_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), timeout_s)

    def _on_message(self, body: bytes) -> None:
        message = decode_from_engine(body)
        if isinstance(message, Aborted) and message.call == _HOST_ABORT:
            self._pending_aborts -= 1
            return
        if isinstance(message, Ready):
            self._ready = frame(message)
            self._is_ready.set()
        elif isinstance(message, Fatal) and self._link is not None:
            self._link.exit_message = message.message
        elif self._pending_aborts and not isinstance(message, Heartbeat):
            return  # of an earlier session: the engine answers in order
        if self._session is not None:
            self._session.sent(message)
            if not self._session.keys:
                self._is_idle.set()
        self._forward(frame(message))

    def _forward(self, data: bytes) -> None:
        if self._session is not None:
            self._outbox.append(data)
            self._has_news.set()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        self._has_news.set()
        self._is_idle.set()
        if session is not None and session.keys and self._link is not None:
            self._pending_aborts += 1
            self._link.send(Abort(_HOST_ABORT, sorted(session.keys)))
