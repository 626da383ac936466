"""One request of a client's connection, and the answer to it."""

import http
from collections.abc import Callable
from typing import TYPE_CHECKING

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidRequest
from inferry.ingress.errors import error_body

if TYPE_CHECKING:
    from inferry.ingress.http.connection import Connection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}


class Request:
    """One request, whole. `problem` says why its body could not be had, or may not be; the body is empty then.

    `length` is how long its body is said to be; -1 where it comes in chunks. `caller` is who sent it, once somebody has
    asked. `protocol_error` is the status and the reason where this stands for what could not be understood.
    """

    __slots__ = (
        "body",
        "caller",
        "head_bytes",
        "headers",
        "is_http10",
        "keeps_alive",
        "length",
        "method",
        "problem",
        "protocol_error",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = b""
        self.length = 0
        self.head_bytes = 0
        self.caller: Caller | None = None
        self.problem: GatewayError | None = None
        self.protocol_error: tuple[int, str] | None = None
        self.is_http10 = False
        self.keeps_alive = True


class Reply:
    """The answer to one request: `respond`, or `begin`, then any number of `write`, then `end`.

    `on_disconnect` is called when the client leaves before the end, and from then on nothing is written. While
    `is_paused` the client reads more slowly than it is written to, and what is written waits in memory; `on_writable`
    tells when that is over. `heartbeat` is what may be put into a begun answer at any time without a meaning of its
    own.
    """

    __slots__ = (
        "_begun",
        "_connection",
        "_head",
        "_request",
        "heartbeat",
        "is_disconnected",
        "on_disconnect",
        "on_writable",
    )

    def __init__(self, connection: "Connection", request: Request) -> None:
        self._connection = connection
        self._request = request
        self._head = b""
        self._begun = False
        self.is_disconnected = False
        self.heartbeat = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._connection.is_paused

    @property
    def peer(self) -> str:
        """The address at the other end of the connection; empty where it is not known any more."""
        return self._connection.peer

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """The answer in one piece; `headers` are complete lines."""
        connection = self._connection
        close = b"" if connection.keeps_alive_after(self._request) else b"connection: close\r\n"
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (STATUS_LINES[status], headers, len(body), close)
        connection.end_reply(self, head if self._request.method == b"HEAD" else head + body)

    def begin(self, headers: bytes) -> None:
        """Head of a streamed answer; it leaves together with the first piece."""
        framing = b"transfer-encoding: chunked\r\n"
        if self._request.is_http10:
            framing = b"connection: close\r\n"  # chunks are unknown there: the end of the connection is the end
        elif not self._connection.keeps_alive_after(self._request):
            framing += b"connection: close\r\n"
        self._head = b"%b%b%b\r\n" % (STATUS_LINES[200], headers, framing)
        self._begun = True

    def write(self, piece: bytes) -> None:
        if not piece:
            return
        head = self._head
        if head:
            self._head = b""
        if self._request.is_http10:
            self._connection.send(head + piece)
        else:
            self._connection.send(b"%b%x\r\n%b\r\n" % (head, len(piece), piece))

    def end(self, piece: bytes) -> None:
        """The last piece."""
        head, self._head = self._head, b""
        if self._request.is_http10:
            self._connection.end_reply(self, head + piece)
        elif piece:
            self._connection.end_reply(self, b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece))
        else:
            self._connection.end_reply(self, head + b"0\r\n\r\n")

    def abort(self) -> None:
        """Break the connection off, which cannot be taken for a good end."""
        self._connection.abort()

    def release(self) -> None:
        """It is over: let go of whoever listened, and with it of the request, without waiting for the collector."""
        self.on_disconnect = self.on_writable = None

    def probe(self) -> bool:
        """Write something that means nothing to the client; False where nothing would."""
        if self._begun:
            self.write(self.heartbeat)
            return bool(self.heartbeat)
        if not self._request.is_http10:
            self._connection.send(CONTINUE)
        return not self._request.is_http10


def protocol_error_response(status: int, reason: str) -> bytes:
    """The answer to what could not be understood as a request. Nothing follows it."""
    body = error_body(InvalidRequest(reason))
    head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (STATUS_LINES[status], len(body)) + body
