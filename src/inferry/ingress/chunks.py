"""Bodies that come in chunks: where their data is, and nothing of what stands around it.

Extensions of chunks and trailers mean nothing here. They are checked for their grammar (RFC 9112, 7.1), counted
against a limit, and dropped: no trailer ever becomes a header.
"""

import enum
import re

from inferry.ingress.heads import Held, Refused

MOST_EXTRA = 16_384
"""Bytes of lines with chunk extensions and of trailers that one request may have."""

_LONGEST_SIZE = 18  # sixteen digits and the end of the line
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;[ \t]*" + _TOKEN + rb"(?:[ \t]*=[ \t]*(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:" + _EXTENSION + rb")*\r\n")
_BEGUN_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}(?:[ \t;\r]|\Z)")
_TRAILERS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)+\r\n")


class _Next(enum.Enum):
    """What has to come next."""

    SIZE = "size"
    DATA = "data"
    CR = "cr"
    LF = "lf"
    TRAILERS = "trailers"
    LAST_LF = "last lf"
    NOTHING = "nothing"


class Chunks:
    """One body in chunks. `left` bytes of data come next, where that is not 0; else `frame` reads on."""

    __slots__ = ("_extra", "_held", "_next", "left")

    def __init__(self) -> None:
        self.left = 0
        self._next = _Next.SIZE
        self._held: Held | None = None
        self._extra = MOST_EXTRA

    @property
    def is_over(self) -> bool:
        return self._next is _Next.NOTHING

    def took(self, size: int) -> None:
        """So many bytes of data have been read."""
        self.left -= size
        if not self.left:
            self._next = _Next.CR

    def frame(self, data: bytes, at: int) -> int:
        """Read what stands between data, beginning at `at`; where to go on. Raises Refused."""
        state = self._next
        if state is _Next.CR:
            if data[at] != 13:
                raise _broken()
            self._next = _Next.LF
            return at + 1
        if state is _Next.LF or state is _Next.LAST_LF:
            if data[at] != 10:
                raise _broken()
            self._next = _Next.SIZE if state is _Next.LF else _Next.NOTHING
            return at + 1
        if state is _Next.SIZE:
            return self._read_size(data, at)
        if self._held is None and data[at] == 13:
            self._next = _Next.LAST_LF
            return at + 1
        return self._read_trailers(data, at)

    def _read_size(self, data: bytes, at: int) -> int:
        if self._held is None:
            end = data.find(b"\n", at, at + _LONGEST_SIZE) + 1
            if end:
                self._begin(data[at:end])
                return end
            self._held = Held(b"\n", max(_LONGEST_SIZE, self._extra))
        held = self._held
        at = held.take(data, at)
        if held.is_whole:
            self._held = None
            self._begin(bytes(held.text))
        elif _BEGUN_SIZE.match(held.text) is None or held.has_stray():
            raise _broken()
        elif held.is_over:
            raise _too_much()
        return at

    def _begin(self, line: bytes) -> None:
        size = _SIZE.fullmatch(line)
        if size is None:
            raise _broken()
        if size.end(1) != len(line) - 2:
            self._spend(len(line))
        self.left = int(size[1], 16)
        self._next = _Next.DATA if self.left else _Next.TRAILERS

    def _read_trailers(self, data: bytes, at: int) -> int:
        if self._held is None:
            self._held = Held(b"\r\n\r\n", self._extra)
        held = self._held
        at = held.take(data, at)
        if held.is_whole:
            self._held = None
            if _TRAILERS.fullmatch(held.text) is None:
                raise _broken()
            self._spend(len(held.text))
            self._next = _Next.NOTHING
        elif held.has_stray():
            raise _broken()
        elif held.is_over:
            raise _too_much()
        return at

    def _spend(self, size: int) -> None:
        self._extra -= size
        if self._extra < 0:
            raise _too_much()


def _broken() -> Refused:
    return Refused(400, "the body is not well-formed chunks")


def _too_much() -> Refused:
    return Refused(431, f"chunk extensions and trailers of a request have at most {MOST_EXTRA} bytes")
