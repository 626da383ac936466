"""Bytes of one connection to requests, without I/O.

`read` takes bytes as they arrive and appends complete requests to `requests`, in their order. The size of heads, bodies
and waiting requests is bounded. Whether a body is kept is decided when its head has arrived (`Server.accepts_body`).
"""

import enum
from collections import deque
from typing import Final

from inferry.domain.errors import BodyTooLarge, GatewayError
from inferry.ingress.http.body_sink import BodySink
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_body import MAX_DISCARD_BYTES, RequestBody, StreamedBody
from inferry.ingress.http.request_head import (
    CHUNKED,
    MAX_HEADER_BYTES,
    DelimitedBuffer,
    HttpProtocolError,
    check_partial_head,
    malformed_request,
)
from inferry.ingress.http.server import Server

MAX_PIPELINED_REQUESTS: Final = 16
"""Requests that wait behind the one being answered. Reading pauses at this number."""
PROGRESS_BYTES: Final = 262_144
"""A body that goes to a sink has the time for a body anew after each this many bytes."""
LARGE_HEAD: Final = 16_384
"""Bytes. A connection ends with a request whose head is larger: parsing a series of them would delay other clients."""


class ReadPhase(enum.Enum):
    """What is being read."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


class RequestReader:
    """The requests of one connection.

    `requests` are complete and wait for their turn. `is_finished`: no later byte of the connection is interpreted.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_buffer",
        "_has_blank_line",
        "_head_bytes",
        "_partial",
        "_server",
        "is_finished",
        "peer",
        "phase",
        "requests",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self.peer = ""
        self.phase = ReadPhase.IDLE
        self.requests: deque[Request] = deque()
        self.is_finished = False
        self._body_bytes = 0
        self._head_bytes = 0
        self._buffer: DelimitedBuffer | None = None  # a head that has begun
        self._has_blank_line = False  # an empty line came before the head
        self._partial = Request(b"", b"", {})
        self._body: RequestBody | None = None

    @property
    def is_reading_body(self) -> bool:
        """Whether the next bytes belong to a body that is read."""
        return self._body is not None

    @property
    def is_full(self) -> bool:
        """Whether too many requests wait for another one to be read."""
        requests = self.requests
        return bool(requests) and (
            len(requests) >= MAX_PIPELINED_REQUESTS
            or self._head_bytes > MAX_HEADER_BYTES
            or self._body_bytes > self._server.max_body_bytes
        )

    @property
    def sink(self) -> BodySink | None:
        """Where the body that is being read goes, if it is not kept."""
        body = self._body
        return body.sink if isinstance(body, StreamedBody) else None

    @property
    def is_blocked(self) -> bool:
        """Whether the sink of the body being read is full."""
        sink = self.sink
        return sink is not None and sink.is_full

    @property
    def body_progress(self) -> int:
        """Grows while a body arrives that goes to a sink."""
        body = self._body
        return body.size // PROGRESS_BYTES if isinstance(body, StreamedBody) else 0

    @property
    def expects_continue(self) -> bool:
        """Whether the client sends its body only after a 100 Continue."""
        request = self._partial
        return not request.is_http10 and request.headers.get(b"expect", b"").lower() == b"100-continue"

    def read(self, data: bytes, at: int) -> int:
        """Read `data` from offset `at`; return the offset of the first unread byte.

        Bytes stay unread while `is_full`, and where the first half of a line break is the last byte.
        """
        size = len(data)
        try:
            while at < size and not self.is_finished:
                if self._body is not None:
                    at = self._read_body(self._body, data, at)
                elif self.phase is ReadPhase.HEAD:
                    at = self._read_head(data, at)
                elif not self._partial.keeps_alive:
                    self.is_finished = True  # the request before these bytes was the last one
                elif self.is_full or (data[at] == 13 and at + 1 == size):
                    return at
                elif data[at] == 13:
                    at = self._read_blank_line(data, at)
                else:
                    at = self._read_head(data, at)
        except HttpProtocolError as protocol_error:
            # The traceback refers to frames that hold the data read, and these frames refer to the exception.
            protocol_error.__traceback__ = None
            self.refuse(protocol_error)
        return size

    def take(self) -> Request:
        """Remove and return the next request."""
        request = self.requests.popleft()
        self._body_bytes -= len(request.body)
        self._head_bytes -= request.head_bytes
        return request

    def abort(self) -> None:
        """The connection is lost: nothing that was read will be served."""
        self._abort_sink()
        for request in self.requests:
            if request.sink is not None:
                request.sink.abort()
        self.requests.clear()

    def refuse_incomplete(self, problem: GatewayError | None) -> None:
        """Queue the request being read although its rest is missing. Later bytes are ignored."""
        self._abort_sink()
        self._partial.problem = problem
        self._body = None
        self.is_finished = True
        self._append(self._partial)

    def refuse(self, protocol_error: HttpProtocolError) -> None:
        """Queue an error response for bytes that are no valid request. Later bytes are ignored."""
        self._abort_sink()
        self.is_finished = True
        self._buffer = self._body = None
        request = Request(b"", b"", {})
        request.protocol_error = protocol_error.status, protocol_error.reason
        self._append(request)

    # -- heads -------------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes, at: int) -> int:
        if self._buffer is None:
            end = data.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES) + 4
            if end > 3:
                return self._begin_request(data if at == 0 and end == len(data) else data[at:end], data, end)
            self.phase = ReadPhase.HEAD
            self._buffer = DelimitedBuffer(b"\r\n\r\n", MAX_HEADER_BYTES)
        buffer = self._buffer
        at = buffer.feed(data, at)
        if buffer.is_complete:
            self._buffer = None
            return self._begin_request(bytes(buffer.text), data, at)
        protocol_error = check_partial_head(buffer)
        if protocol_error is not None:
            raise protocol_error
        if buffer.is_over:
            raise HttpProtocolError(431, f"the request head exceeds {MAX_HEADER_BYTES} bytes")
        return at

    def _read_blank_line(self, data: bytes, at: int) -> int:
        """Skip one empty line before a request, as RFC 9112 asks for."""
        if data[at + 1] != 10 or self._has_blank_line:
            raise malformed_request()
        self._has_blank_line = True
        return at + 2

    def _begin_request(self, head: bytes, data: bytes, at: int) -> int:
        """Handle a complete head. `data` continues at `at` behind it."""
        server = self._server
        request = self._partial = server.head_parser.parse(head)
        request.head_bytes = len(head)
        self._has_blank_line = False
        length = request.length
        if not length:
            self._complete()
            return at
        if server.accepts_body is not None and not server.accepts_body(request, self.peer):
            self._discard_body()
            return at
        if request.sink is not None:
            self.phase = ReadPhase.BODY
            self._body = StreamedBody(length, request.sink)
            if self._body.exceeds_discard_limit:
                self.refuse_incomplete(_too_large(self._body))
            return at
        if 0 < length <= min(len(data) - at, server.max_body_bytes):
            request.body = data[at : at + length]  # the whole body has arrived: most bodies are short
            self._complete()
            return at + length
        self.phase = ReadPhase.BODY
        body = self._body = RequestBody(length, server.max_body_bytes)
        if body.exceeds_discard_limit or (body.is_too_large and self.expects_continue):
            self.refuse_incomplete(_too_large(body))
        return at

    # -- bodies ------------------------------------------------------------------------------------------------------

    def _discard_body(self) -> None:
        """Read past a short body, so that the connection can be used again. A longer one is not read."""
        length = self._partial.length
        self.phase = ReadPhase.BODY
        if length == CHUNKED or length > MAX_DISCARD_BYTES or self.expects_continue:
            self.refuse_incomplete(self._partial.problem)
        else:
            self._body = RequestBody(length, 0)

    def _read_body(self, body: RequestBody, data: bytes, at: int) -> int:
        at = body.feed(data, at)
        request = self._partial
        sink = request.sink
        if sink is not None and sink.problem is not None:
            self.refuse_incomplete(sink.problem)
        elif body.is_complete and sink is not None:
            sink.end()
            self._complete()
        elif body.is_complete:
            if not body.is_too_large:
                request.body = body.content()
            elif body.max_bytes:
                request.problem = _too_large(body)
            self._complete()
        elif body.exceeds_discard_limit:
            self.refuse_incomplete(_too_large(body))
        return at

    def _abort_sink(self) -> None:
        if self._body is not None and self._partial.sink is not None:
            self._partial.sink.abort()

    def _complete(self) -> None:
        request = self._partial
        self._body = None
        self.phase = ReadPhase.IDLE
        if request.head_bytes > LARGE_HEAD:
            self.is_finished = True
        self._append(request)

    def _append(self, request: Request) -> None:
        self.requests.append(request)
        self._body_bytes += len(request.body)
        self._head_bytes += request.head_bytes


def _too_large(body: RequestBody) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {body.max_bytes} bytes")
