"""One end of a connection between an ingress process and the owner: frames, batches, signs of life.

Everything belongs to one event loop. Messages are collected and leave as one frame when the current burst of callbacks
is over. While the peer reads slowly nothing is written. A peer that has been silent for `SILENCE_TIMEOUT_S` is lost.
"""

import asyncio
import logging
from typing import Any, cast

from inferry.cluster.frames import (
    BATCH_BYTES,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    FrameError,
    Message,
    Ping,
    decode_frame,
    encode_frame,
)
from inferry.cluster.handshake import HandshakeFailed

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
SILENCE_TIMEOUT_S = 10.0
WRITE_BUFFER_BYTES = 1024 * 1024
"""Bytes in the write buffer above which the peer counts as slow."""


class LinkEnd(asyncio.Protocol):
    """What both ends share. A subclass defines what a message means, and what follows the loss of the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        self._received = 0
        self._needed = LENGTH_BYTES
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._outbox: list[Any] = []
        self._outbox_bytes = 0
        self._is_flush_due = False
        self._is_paused = False
        self._is_detached = False
        self._timer: asyncio.TimerHandle | None = None
        self._received_at = loop.time()
        self._sent_at = self._received_at
        self.is_lost = False

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """Handle a message. HandshakeFailed and FrameError end the connection."""
        raise NotImplementedError

    def on_opened(self) -> None:
        """The connection was made."""

    def on_lost(self) -> None:
        """The connection has ended: no further message comes or goes."""

    def collect(self) -> None:
        """Add what is to be sent in this turn. Called while the peer reads."""

    def on_heartbeat(self) -> None:
        """Called about once per `HEARTBEAT_INTERVAL_S`."""

    # -- sending -----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether the peer reads more slowly than this process writes."""
        return self._is_paused

    def send(self, message: Message, size: int = 0) -> None:
        """Send the message with others of this turn. `size` is about its length in bytes, where it may be long."""
        self._outbox.append(message)
        self._outbox_bytes += size
        if self._outbox_bytes >= BATCH_BYTES and not self._is_paused:
            self._write_frame()
        elif not self._is_flush_due:
            self.request_flush()

    def request_flush(self) -> None:
        """Call `collect` and write, once the current burst of callbacks is over."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection once everything was written."""
        if self._transport is not None:
            self._is_paused = False
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._stop()  # uvloop does not report the loss of a connection whose making was cancelled
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> tuple[asyncio.Transport, bytes]:
        """Hand the connection over to another protocol: its transport, and the bytes that were not read."""
        assert self._transport is not None
        self._flush()
        self._is_detached = True
        self._stop()
        return self._transport, b"".join(self._chunks)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_paused or self.is_lost:
            return
        self.collect()
        if self._outbox:
            self._write_frame()

    def _write_frame(self) -> None:
        messages, self._outbox = self._outbox, []
        self._outbox_bytes = 0
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._sent_at = self._loop.time()
            try:
                transport.write(encode_frame(messages))
            except Exception:
                log.exception("a message cannot be sent to another process; the connection is closed")
                transport.abort()

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._received_at = self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL_S, self._beat)
        self.on_opened()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_detached:
            return
        self._stop()
        self.is_lost = True
        self.on_lost()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.request_flush()

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        self._chunks.append(data)
        self._received += len(data)
        if self._received < self._needed:
            return
        if len(self._chunks) > 1:
            data = b"".join(self._chunks)
        self._chunks = []
        try:
            self._read_frames(data)
        except (FrameError, HandshakeFailed) as error:
            log.error("a connection between gateway processes was closed: %s", error)
            self.abort()

    def _read_frames(self, data: bytes) -> None:
        size, at = len(data), 0
        while True:
            left = size - at
            if left < LENGTH_BYTES:
                self._needed = LENGTH_BYTES
                break
            length = int.from_bytes(data[at : at + LENGTH_BYTES], "big")
            if length > self.max_frame_bytes:
                raise FrameError(f"a frame of {length} bytes exceeds {self.max_frame_bytes}")
            self._needed = LENGTH_BYTES + length
            if left < self._needed:
                break
            start = at + LENGTH_BYTES
            at = start + length
            for message in decode_frame(memoryview(data)[start:at]):
                if type(message) is not Ping:
                    self.on_message(message)
            if self._is_detached:
                break
        rest = data[at:]
        self._chunks = [rest] if rest else []
        self._received = len(rest)

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._received_at > SILENCE_TIMEOUT_S:
            log.error("a connection between gateway processes was silent for %.0f s", now - self._received_at)
            self.abort()
            return
        self.on_heartbeat()
        if now - self._sent_at >= HEARTBEAT_INTERVAL_S and not self._is_paused:
            self.send(Ping())
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL_S, self._beat)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
