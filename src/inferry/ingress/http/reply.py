"""The response to one request of a client's connection."""

import asyncio
import http
from collections.abc import Callable
from typing import Final

from inferry.domain.errors import InvalidRequest
from inferry.ingress.errors import error_body
from inferry.ingress.http.request import Request

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"  # for a client that is gone: logged, never sent
STATUS_LINES[529] = b"HTTP/1.1 529 Overloaded\r\n"  # of the Messages API only


class ReplyChannel(asyncio.Protocol):
    """What a reply needs of its connection. A class and not a typing Protocol: mypyc calls its methods directly."""

    __slots__ = ("is_paused", "peer")

    def __init__(self) -> None:
        self.is_paused = False
        self.peer = ""

    def keeps_alive_after(self, request: Request) -> bool:
        """Whether the connection stays open after the response to this request."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def end_reply(self, reply: "Reply", data: bytes) -> None:
        """Send the last bytes of a response."""
        raise NotImplementedError

    def abort(self) -> None:
        """Reset the connection: a client cannot mistake a reset for a complete response."""
        raise NotImplementedError


class Reply:
    """The response to one request: `respond`, or `begin`, then any number of `write`, then `end`.

    `on_disconnect` is called when the client disconnects before the end; nothing is written after that. `is_paused`
    is True while the client reads more slowly than the gateway writes; written data then waits in memory, and
    `on_writable` is called when the client has caught up. `heartbeat` is a piece without meaning that may be written
    into a begun response at any time. `status` is that of the response. `_head` holds header lines that are not sent
    yet: added ones at first, the whole head once the response has begun.
    """

    __slots__ = (
        "_begun",
        "_channel",
        "_head",
        "heartbeat",
        "is_disconnected",
        "on_disconnect",
        "on_writable",
        "request",
        "status",
    )

    def __init__(self, channel: ReplyChannel, request: Request) -> None:
        self.request = request
        self._channel = channel
        self._head = b""
        self._begun = False
        self.status = 200
        self.is_disconnected = False
        self.heartbeat = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._channel.is_paused

    @property
    def peer(self) -> str:
        """The client's address; empty where it is unknown."""
        return self._channel.peer

    def add_headers(self, lines: bytes) -> None:
        """Header lines besides those that `respond` or `begin` will be given; they replace lines added before."""
        self._head = lines

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send the response in one piece. `headers` are complete lines."""
        channel = self._channel
        self.status = status
        close = b"" if channel.keeps_alive_after(self.request) else b"connection: close\r\n"
        head = b"%b%b%bcontent-length: %d\r\n%b\r\n" % (STATUS_LINES[status], self._head, headers, len(body), close)
        channel.end_reply(self, head if self.request.method == b"HEAD" else head + body)

    def begin(self, headers: bytes) -> None:
        """Set the head of a streamed response. It is sent together with the first piece."""
        framing = b"transfer-encoding: chunked\r\n"
        if self.request.is_http10:
            framing = b"connection: close\r\n"  # HTTP/1.0 has no chunks: closing the connection ends the body
        elif not self._channel.keeps_alive_after(self.request):
            framing += b"connection: close\r\n"
        self._head = b"%b%b%b%b\r\n" % (STATUS_LINES[200], self._head, headers, framing)
        self._begun = True

    def write(self, piece: bytes) -> None:
        if not piece:
            return
        head = self._head
        if head:
            self._head = b""
        if self.request.is_http10:
            self._channel.send(head + piece)
        else:
            self._channel.send(b"%b%x\r\n%b\r\n" % (head, len(piece), piece))

    def end(self, piece: bytes) -> None:
        """Send the last piece."""
        head, self._head = self._head, b""
        if self.request.is_http10:
            self._channel.end_reply(self, head + piece)
        elif piece:
            self._channel.end_reply(self, b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(piece), piece))
        else:
            self._channel.end_reply(self, head + b"0\r\n\r\n")

    def relay(self, data: bytes) -> None:
        """Send bytes of a response that another process has written, head included."""
        self._begun = True
        self._channel.send(data)

    def end_relay(self, status: int) -> None:
        """The relayed response is complete."""
        self.status = status
        self._channel.end_reply(self, b"")

    def abort(self) -> None:
        """Reset the connection, so that the client sees an error and not a complete response."""
        self._channel.abort()

    def release(self) -> None:
        """Drop the callbacks. They refer to the request, which would otherwise wait for the garbage collector."""
        self.on_disconnect = self.on_writable = None

    def probe(self) -> bool:
        """Write bytes without meaning, to learn whether the client still reads; False where none can be written."""
        if self._begun:
            self.write(self.heartbeat)
            return bool(self.heartbeat)
        if not self.request.is_http10:
            self._channel.send(CONTINUE)
        return not self.request.is_http10


def protocol_error_response(status: int, reason: str) -> bytes:
    """The response to bytes that are no valid request. The connection closes after it."""
    body = error_body(InvalidRequest(reason))
    head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (STATUS_LINES[status], len(body)) + body
