"""The body of one request while it comes: kept up to a limit, read past it for a while, and never copied twice."""

from inferry.ingress.chunks import Chunks
from inferry.ingress.heads import CHUNKED

MOST_PARTS = 1024
"""A body that comes in more pieces than this is put together as it comes: small pieces cost more than they hold."""
WORTH_KEEPING = 65_536
"""A piece of a body that is larger than this is kept as it came, instead of being copied."""
MOST_DISCARDED = 8
"""A body this many times over the limit is not read to its end before it is refused."""
MOST_UNWANTED = 65_536
"""A body that is not wanted (its sender is not authenticated, or the path takes none) is read and dropped up to this
size, so that the connection goes on. A longer one, or one in chunks, is not read: the answer ends the connection."""


class Body:
    """A body of `length` bytes, or in chunks, of which up to `wanted` bytes are kept."""

    __slots__ = ("_chunks", "_length", "_most", "_parts", "is_hopeless", "is_whole", "size", "wanted")

    def __init__(self, length: int, wanted: int) -> None:
        self.wanted = wanted
        self.size = 0
        self.is_whole = False
        self._length = length
        self._most = wanted * MOST_DISCARDED or MOST_UNWANTED
        self.is_hopeless = length > self._most  # it is so long that its end is not waited for
        self._chunks = Chunks() if length == CHUNKED else None
        self._parts: list[bytes | bytearray | memoryview] = []

    @property
    def is_too_large(self) -> bool:
        return self.size > self.wanted or self._length > self.wanted

    def kept(self) -> bytes:
        """All of it that is kept; nothing where it is too large."""
        first = self._parts[0] if len(self._parts) == 1 else None
        return first if isinstance(first, bytes) else b"".join(self._parts)

    def take(self, data: bytes, at: int) -> int:
        """Take what belongs to it from `data`, beginning at `at`; where that ends. Raises Refused."""
        chunks = self._chunks
        if chunks is None:
            end = min(len(data), at + self._length - self.size)
            self._add(data, at, end)
            self.is_whole = self.size == self._length
            return end
        while at < len(data):
            if chunks.left:
                end = min(len(data), at + chunks.left)
                chunks.took(end - at)
                self._add(data, at, end)
                at = end
                continue
            at = chunks.frame(data, at)
            if chunks.is_over:
                self.is_whole = True
                break
            if self.size + chunks.left > self._most:
                self.is_hopeless = True
                break
        return at

    def _add(self, data: bytes, at: int, end: int) -> None:
        self.size += end - at
        parts = self._parts
        if self.size > self.wanted:
            # Keep reading for a while, without keeping it: a client that is still sending when its connection closes
            # would see a reset instead of the answer.
            parts.clear()
            return
        # What is kept as it came keeps all of `data`, so it has to be most of it.
        parts.append(memoryview(data)[at:end] if end - at > max(WORTH_KEEPING, len(data) // 2) else data[at:end])
        if len(parts) > MOST_PARTS:
            whole = parts[0]
            if not isinstance(whole, bytearray):
                whole = parts[0] = bytearray(whole)
            whole += b"".join(parts[1:])
            del parts[1:]
