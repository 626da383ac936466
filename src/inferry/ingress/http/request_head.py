"""Heads of HTTP/1.1 requests: complete ones are parsed by llhttp, incomplete ones are held within limits.

Everything here is decided by the bytes alone, never by the way they were cut into reads: a head is parsed in one piece
once its end has come, and what is refused earlier (`check_partial_head`) is what the parser would refuse in the whole
of it too. llhttp checks the syntax of fields, and that the fields that frame a body do not contradict each other. What
it leaves open and RFC 9112 demands is checked here: version, request target, Host, and transfer codings.
"""

import re

import httptools

from inferry.ingress.http.reply import Request

MAX_HEADER_BYTES = 65_536
"""Bytes of a head, from the first of the request line to the empty line, both included."""
MAX_HEADER_FIELDS = 128
CHUNKED = -1
"""The length of a body that comes in chunks."""

_MAX_LENGTH_DIGITS = 18
_MIN_FIELD_BYTES = 4  # a:\r\n
_STRAY = re.compile(rb"[^\r]\n|\r[^\n]|\x00|^\n")
"""A line break that is none (RFC 9112, 2.2), or a NUL."""
_METHOD = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,24}"
_REQUEST_LINE = re.compile(_METHOD + rb" [\x21-\x7e]+ HTTP/([0-9]\.[0-9])")
_PARTIAL_REQUEST_LINE = re.compile(_METHOD + rb"(?: |\Z)")
_LINE_PREFIX_BYTES = 32
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9\-._~!$&'()*+,;=%]+):[0-9]{1,5}")


class HttpProtocolError(Exception):
    """What came is no request that is understood here. The connection ends with this answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class DelimitedBuffer:
    """Text that ends with `delimiter`, has at most `limit` bytes and comes in pieces. Every byte is looked at once."""

    __slots__ = ("_delimiter", "_limit", "first_line_checked", "is_complete", "searched", "text")

    def __init__(self, delimiter: bytes, limit: int) -> None:
        self.text = bytearray()
        self.is_complete = False
        self.first_line_checked = False  # its first line has been looked at
        self.searched = 0  # how much of it had come before the last piece
        self._delimiter = delimiter
        self._limit = limit

    def feed(self, data: bytes, at: int) -> int:
        """Take what belongs to it from `data`, beginning at `at`; where that ends."""
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
        """It is as long as it may be, and has not ended."""
        return not self.is_complete and len(self.text) >= self._limit

    def has_stray_control(self) -> bool:
        """Whether a bare CR, a bare LF or a NUL has come with the last piece."""
        return find_stray(self.text, max(0, self.searched - 1)) is not None


def find_stray(text: bytearray, start: int) -> re.Match[bytes] | None:
    """The first line break that is none, or NUL. Counting is thirty times as fast as the search, and finds most heads
    in order.
    """
    at = start + (start > 0 and text[start] == 10)  # that one was looked at with what came before it
    breaks = text.count(b"\r\n", at)
    returns = text.count(b"\r", at) - text.endswith(b"\r")  # what follows the last one is still to come
    if breaks == text.count(b"\n", at) == returns and text.find(b"\0", start) < 0:
        return None
    return _STRAY.search(text, start)


def check_partial_head(buffer: DelimitedBuffer) -> HttpProtocolError | None:
    """What is wrong with a head, as far as it has come. To be asked after every piece, or once for all of it."""
    text = buffer.text
    stray = find_stray(text, max(0, buffer.searched - 1))
    if not buffer.first_line_checked:
        end = text.find(b"\r\n", max(0, buffer.searched - 1))
        if end < 0 and stray is None:
            if buffer.searched >= _LINE_PREFIX_BYTES or _PARTIAL_REQUEST_LINE.match(text):
                return None
            return _malformed_request()
        if end >= 0 and (stray is None or stray.start() > end):
            buffer.first_line_checked = True
            line = _REQUEST_LINE.fullmatch(text, 0, end)
            if line is None:
                return _malformed_request()
            if line[1] not in (b"1.0", b"1.1"):
                return HttpProtocolError(505, "the version of HTTP has to be 1.1 or 1.0")
    return None if stray is None else _malformed_request()


def _malformed_request() -> HttpProtocolError:
    return HttpProtocolError(400, "this is not a well-formed HTTP/1.1 request")


class RequestHeadParser:
    """Parses heads, each in one piece. One of these serves all connections of an event loop."""

    __slots__ = ("_host", "_is_complete", "_parser", "_repeated", "_request")

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request(b"", b"", {})
        self._repeated: dict[bytes, list[bytes]] = {}
        self._is_complete = False
        self._host = b""  # the last that was found valid: clients send the same one again and again

    def parse(self, head: bytes) -> Request:
        """The request that a whole head announces. Raises Refused."""
        request = self._request = Request(b"", b"", {})
        error = self._parse(head, request)
        if error is None:
            error = self._check(request)
        if error is None:
            return request
        # A flaw that shows in an incomplete head goes first, so that the verdict does not depend on the split.
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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _parse(self, head: bytes, request: Request) -> HttpProtocolError | None:
        line = head.find(b"\r\n")
        if not head.endswith(b" HTTP/1.1", 0, line):
            if not head.endswith(b" HTTP/1.0", 0, line):
                return _malformed_request()
            request.is_http10 = True
        if head.count(b" ", 0, line) != 2 or head[0] <= 32:  # the parser would skip empty lines, whatever ends them
            return _malformed_request()
        if len(head) > _MIN_FIELD_BYTES * MAX_HEADER_FIELDS and head.count(b"\n") > MAX_HEADER_FIELDS + 2:
            return HttpProtocolError(431, f"a request has at most {MAX_HEADER_FIELDS} header fields")
        self._is_complete = False
        if self._repeated:
            self._repeated.clear()
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here: this is a request like any other, and so is its body
        except httptools.HttpParserInvalidMethodError:
            self._reset_parser()
            return HttpProtocolError(501, "this method is not implemented")
        except httptools.HttpParserError:
            self._reset_parser()
            return _malformed_request()
        if not self._is_complete:
            self._reset_parser()
            return _malformed_request()
        if self._repeated:
            # A repeated field is one list (RFC 9110, 5.3): two keys, tenants or runs then match none that is known.
            for name, values in self._repeated.items():
                request.headers[name] = b", ".join(values)
        return None

    def _check(self, request: Request) -> HttpProtocolError | None:
        """What RFC 9112 demands beyond the grammar. Sets the length of the body, and a target in origin form."""
        headers = request.headers
        host = headers.get(b"host")
        coding = headers.get(b"transfer-encoding")
        length = headers.get(b"content-length")
        if coding is not None or length is not None or b"upgrade" in headers or request.method == b"CONNECT":
            self._reset_parser()  # it waits for a body, or for another protocol
        elif not request.keeps_alive:
            self._reset_parser()  # it takes nothing more
        if request.is_http10:
            request.keeps_alive = False
        if host != self._host or host is None:
            if host is None:
                if not request.is_http10:
                    return HttpProtocolError(400, "an HTTP/1.1 request has one Host header")
            elif _HOST.fullmatch(host) is None:
                return HttpProtocolError(400, "the Host header is not one host with or without a port")
            else:
                self._host = host
        if coding is not None:
            if coding.lower() != b"chunked":
                return HttpProtocolError(501, "the only transfer coding that is understood is chunked")
            if request.is_http10 or length is not None:
                return HttpProtocolError(400, "a transfer coding goes with HTTP/1.1 and without a content-length")
            request.length = CHUNKED
        elif length is not None:
            if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
                return HttpProtocolError(400, "the content-length is not a number of bytes")
            request.length = int(length)
        if not request.target.startswith(b"/") or request.method == b"CONNECT":
            return _normalize_target(request)
        return None

    def _reset_parser(self) -> None:
        self._parser = httptools.HttpRequestParser(self)


def _normalize_target(request: Request) -> HttpProtocolError | None:
    """Bring a target that is no path into the form of one (RFC 9112, 3.2)."""
    target = request.target
    if request.method == b"CONNECT":
        request.keeps_alive = False  # what follows is no HTTP
        return None if _AUTHORITY.fullmatch(target) else _malformed_request()
    if target == b"*" and request.method == b"OPTIONS":
        return None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        return _malformed_request()
    request.headers[b"host"] = absolute[1]  # it goes before the header
    path = absolute[2] or b"/"
    request.target = b"/" + path if path.startswith(b"?") else path
    return None
