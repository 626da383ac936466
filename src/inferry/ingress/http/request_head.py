"""Heads of HTTP/1.1 requests: llhttp parses complete ones; incomplete ones are buffered within limits.

The result depends on the bytes alone, never on how they were split into reads. A head is parsed in one piece once it is
complete, and `check_partial_head` refuses only what the parser would refuse too. llhttp checks the syntax of fields and
that the fields that frame a body agree. This module checks what RFC 9112 demands beyond that: version, request target,
Host, and transfer codings.
"""

import re
from typing import Final

import httptools

from inferry.ingress.http.request import Request

MAX_HEADER_BYTES: Final = 65_536
"""Limit for a head, from the request line to the empty line, both included."""
MAX_HEADER_FIELDS: Final = 128
CHUNKED: Final = -1
"""`Request.length` of a body in chunks."""

_MAX_LENGTH_DIGITS: Final = 18
_MIN_FIELD_BYTES: Final = 4  # a:\r\n
_STRAY: Final = re.compile(rb"[^\r]\n|\r[^\n]|\x00|^\n")
"""A bare CR, a bare LF (RFC 9112, 2.2), or a NUL."""
_METHOD: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,24}"
_REQUEST_LINE: Final = re.compile(_METHOD + rb" [\x21-\x7e]+ HTTP/([0-9]\.[0-9])")
_PARTIAL_REQUEST_LINE: Final = re.compile(_METHOD + rb"(?: |\Z)")
_LINE_PREFIX_BYTES: Final = 32
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]+):[0-9]{1,5}")


class HttpProtocolError(Exception):
    """The bytes received are no valid request. The connection closes after the error response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class DelimitedBuffer:
    """Text of at most `limit` bytes that ends with `delimiter` and arrives in pieces. Each byte is searched once."""

    __slots__ = ("_delimiter", "_limit", "first_line_checked", "is_complete", "searched", "text")

    def __init__(self, delimiter: bytes, limit: int) -> None:
        self.text = bytearray()
        self.is_complete = False
        self.first_line_checked = False
        self.searched = 0  # bytes that had arrived before the last piece
        self._delimiter = delimiter
        self._limit = limit

    def feed(self, data: bytes, at: int) -> int:
        """Take the text's bytes from `data`, beginning at offset `at`; return the offset behind them."""
        text, delimiter = self.text, self._delimiter
        self.searched = had = len(text)
        text += memoryview(data)[at : at + self._limit - had]
        found = text.find(delimiter, max(0, had - len(delimiter) + 1))
        if found >= 0:
            self.is_complete = True
            del text[found + len(delimiter) :]
        return at + len(text) - had

    @property
    def is_over(self) -> bool:
        """Whether the text has reached the limit without its delimiter."""
        return not self.is_complete and len(self.text) >= self._limit

    def has_stray_control(self) -> bool:
        """Whether the last piece holds a bare CR, a bare LF or a NUL."""
        return find_stray(self.text, max(0, self.searched - 1)) is not None


def find_stray(text: bytearray, start: int) -> re.Match[bytes] | None:
    """The first bare CR, bare LF or NUL.

    Counting is thirty times as fast as the search, and is enough for most heads.
    """
    at = start + (start > 0 and text[start] == 10)  # searched together with the CR before it
    breaks = text.count(b"\r\n", at)
    returns = text.count(b"\r", at) - text.endswith(b"\r")  # the byte after the last CR has not arrived
    if breaks == text.count(b"\n", at) == returns and text.find(b"\0", start) < 0:
        return None
    return _STRAY.search(text, start)


def check_partial_head(buffer: DelimitedBuffer) -> HttpProtocolError | None:
    """The error in a head as far as it has arrived. Call it after every piece, or once for the whole head."""
    text = buffer.text
    stray = find_stray(text, max(0, buffer.searched - 1))
    if not buffer.first_line_checked:
        end = text.find(b"\r\n", max(0, buffer.searched - 1))
        if end < 0 and stray is None:
            if buffer.searched >= _LINE_PREFIX_BYTES or _PARTIAL_REQUEST_LINE.match(text):
                return None
            return malformed_request()
        if end >= 0 and (stray is None or stray.start() > end):
            buffer.first_line_checked = True
            line = _REQUEST_LINE.fullmatch(text, 0, end)
            if line is None:
                return malformed_request()
            if line[1] not in (b"1.0", b"1.1"):
                return HttpProtocolError(505, "the HTTP version must be 1.1 or 1.0")
    return None if stray is None else malformed_request()


def malformed_request() -> HttpProtocolError:
    return HttpProtocolError(400, "malformed HTTP/1.1 request")


class RequestHeadParser:
    """Parses complete heads. One parser serves all connections of an event loop."""

    __slots__ = ("_host", "_is_complete", "_parser", "_repeated", "_request")

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request(b"", b"", {})
        self._repeated: dict[bytes, list[bytes]] = {}
        self._is_complete = False
        self._host = b""  # the last valid one: clients repeat it

    def parse(self, head: bytes) -> Request:
        """The request of a complete head. Raises HttpProtocolError."""
        request = self._request = Request(b"", b"", {})
        error = self._parse(head, request)
        if error is None:
            error = self._check(request)
        if error is None:
            return request
        # An error that an incomplete head shows has precedence, so that the result does not depend on the split.
        buffer = DelimitedBuffer(b"\r\n\r\n", MAX_HEADER_BYTES)
        buffer.feed(head, 0)
        raise check_partial_head(buffer) or error

    # -- httptools' callbacks ----------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._request.target = url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if value and value[-1] <= 32:
            value = value.rstrip(b" \t")
        headers = self._request.headers
        existing = headers.get(name)
        if existing is None:
            headers[name] = value
        else:
            self._repeated.setdefault(name, [existing]).append(value)

    def on_headers_complete(self) -> None:
        self._is_complete = True
        parser, request = self._parser, self._request
        request.method = parser.get_method()
        request.keeps_alive = parser.should_keep_alive()

    # -- steps of parsing --------------------------------------------------------------------------------------------

    def _parse(self, head: bytes, request: Request) -> HttpProtocolError | None:
        line = head.find(b"\r\n")
        if not head.endswith(b" HTTP/1.1", 0, line):
            if not head.endswith(b" HTTP/1.0", 0, line):
                return malformed_request()
            request.is_http10 = True
        if head.count(b" ", 0, line) != 2 or head[0] <= 32:  # llhttp would skip empty lines
            return malformed_request()
        if len(head) > _MIN_FIELD_BYTES * MAX_HEADER_FIELDS and head.count(b"\n") > MAX_HEADER_FIELDS + 2:
            return HttpProtocolError(431, f"the request has more than {MAX_HEADER_FIELDS} header fields")
        self._is_complete = False
        if self._repeated:
            self._repeated.clear()
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are ignored: the request is served as HTTP/1.1
        except httptools.HttpParserInvalidMethodError:
            self._reset_parser()
            return HttpProtocolError(501, "the method is not implemented")
        except httptools.HttpParserError:
            self._reset_parser()
            return malformed_request()
        if not self._is_complete:
            self._reset_parser()
            return malformed_request()
        if self._repeated:
            # A repeated field is one list (RFC 9110, 5.3): two keys, tenants or runs then match no known one.
            for name, values in self._repeated.items():
                request.headers[name] = b", ".join(values)
        return None

    def _check(self, request: Request) -> HttpProtocolError | None:
        """Check what RFC 9112 demands beyond the grammar. Sets the body's length, and a target in origin form."""
        headers = request.headers
        host = headers.get(b"host")
        coding = headers.get(b"transfer-encoding")
        length = headers.get(b"content-length")
        if coding is not None or length is not None or b"upgrade" in headers or request.method == b"CONNECT":
            self._reset_parser()  # the parser waits for a body or another protocol
        elif not request.keeps_alive:
            self._reset_parser()  # the parser accepts no further request
        if request.is_http10:
            request.keeps_alive = False
        if host != self._host or host is None:
            if host is None:
                if not request.is_http10:
                    return HttpProtocolError(400, "an HTTP/1.1 request needs one Host header")
            elif _HOST.fullmatch(host) is None:
                return HttpProtocolError(400, "invalid Host header: expected host or host:port")
            else:
                self._host = host
        if coding is not None:
            if coding.lower() != b"chunked":
                return HttpProtocolError(501, "unsupported transfer coding: only chunked is supported")
            if request.is_http10 or length is not None:
                return HttpProtocolError(400, "transfer-encoding requires HTTP/1.1 and no content-length")
            request.length = CHUNKED
        elif length is not None:
            if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
                return HttpProtocolError(400, "invalid content-length: expected a number of bytes")
            request.length = int(length)
        if not request.target.startswith(b"/") or request.method == b"CONNECT":
            return _normalize_target(request)
        return None

    def _reset_parser(self) -> None:
        self._parser = httptools.HttpRequestParser(self)


def _normalize_target(request: Request) -> HttpProtocolError | None:
    """Convert a target that is no path to origin form (RFC 9112, 3.2)."""
    target = request.target
    if request.method == b"CONNECT":
        request.keeps_alive = False  # the bytes after it are no HTTP
        return None if _AUTHORITY.fullmatch(target) else malformed_request()
    if target == b"*" and request.method == b"OPTIONS":
        return None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        return malformed_request()
    request.headers[b"host"] = absolute[1]  # it has precedence over the header
    path = absolute[2] or b"/"
    request.target = b"/" + path if path.startswith(b"?") else path
    return None
