"""The body of one request while it arrives: kept up to a limit, discarded beyond it, and never copied twice."""

from typing import Final

from inferry.ingress.http.body_sink import BodySink
from inferry.ingress.http.chunked_body import ChunkedDecoder
from inferry.ingress.http.request_head import CHUNKED

MAX_PARTS: Final = 1024
"""Pieces of a body are joined above this number: small pieces take more memory than they hold."""
ZERO_COPY_MIN_BYTES: Final = 65_536
"""A larger piece of a body is kept as received instead of being copied."""
MAX_DISCARD_FACTOR: Final = 8
"""A body longer than this multiple of the limit is refused without being read to its end."""
MAX_DISCARD_BYTES: Final = 65_536
"""A body that is not accepted (not authenticated, or no body expected) is read and discarded up to this size, so that
the connection can be used again. A longer one, or one in chunks, is not read: the connection closes after the response.
"""


class RequestBody:
    """A body of `length` bytes, or in chunks, of which up to `max_bytes` are kept."""

    __slots__ = (
        "_chunked",
        "_length",
        "_parts",
        "_read_limit",
        "exceeds_discard_limit",
        "is_complete",
        "max_bytes",
        "size",
    )

    def __init__(self, length: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self.is_complete = False
        self._length = length
        self._read_limit = max_bytes * MAX_DISCARD_FACTOR or MAX_DISCARD_BYTES
        self.exceeds_discard_limit = length > self._read_limit  # its end is not awaited
        self._chunked = ChunkedDecoder() if length == CHUNKED else None
        self._parts: list[bytes | bytearray | memoryview] = []

    @property
    def is_too_large(self) -> bool:
        return self.size > self.max_bytes or self._length > self.max_bytes

    def content(self) -> bytes:
        """The body; empty where it is too large."""
        first = self._parts[0] if len(self._parts) == 1 else None
        return first if isinstance(first, bytes) else b"".join(self._parts)

    def feed(self, data: bytes, at: int) -> int:
        """Take the body's bytes from `data`, beginning at offset `at`; return the offset behind them.

        Raises HttpProtocolError.
        """
        chunked = self._chunked
        if chunked is None:
            end = min(len(data), at + self._length - self.size)
            self._add(data, at, end)
            self.is_complete = self.size == self._length
            return end
        while at < len(data):
            if chunked.remaining:
                end = min(len(data), at + chunked.remaining)
                chunked.advance(end - at)
                self._add(data, at, end)
                at = end
                continue
            at = chunked.read_framing(data, at)
            if chunked.is_over:
                self.is_complete = True
                break
            if self.size + chunked.remaining > self._read_limit:
                self.exceeds_discard_limit = True
                break
        return at

    def _add(self, data: bytes, at: int, end: int) -> None:
        self.size += end - at
        parts = self._parts
        if self.size > self.max_bytes:
            # Read on without keeping the data: a client that is still sending when its connection closes would see a
            # reset instead of the response.
            parts.clear()
            return
        # A view keeps all of `data` in memory, so it has to cover most of it.
        parts.append(memoryview(data)[at:end] if end - at > max(ZERO_COPY_MIN_BYTES, len(data) // 2) else data[at:end])
        if len(parts) > MAX_PARTS:
            joined = parts[0]
            if not isinstance(joined, bytearray):
                joined = parts[0] = bytearray(joined)
            joined += b"".join(parts[1:])
            del parts[1:]


class StreamedBody(RequestBody):
    """A body that goes to a sink as it arrives. One that is too large is refused without being read to its end."""

    __slots__ = ("sink",)

    def __init__(self, length: int, sink: BodySink) -> None:
        super().__init__(length, sink.max_bytes)
        self.sink = sink
        self._read_limit = sink.max_bytes
        self.exceeds_discard_limit = length > sink.max_bytes

    def _add(self, data: bytes, at: int, end: int) -> None:
        self.size += end - at
        self.sink.feed(data[at:end])
