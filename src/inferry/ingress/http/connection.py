"""HTTP/1.1 towards clients: heads parsed by httptools, answers written by callbacks, no task and no queue in between.

Everything belongs to one event loop. A `Connection` reads requests and hands each to `Server.serve` once it is whole,
one at a time and in their order; the answer goes through the request's `Reply`, at once or later. Reading goes on
meanwhile, because only reading shows that a client has left. What a connection may take is bounded: the size of its
heads and bodies, the time for either, what is pipelined, what it does not read, and how long it may stay idle. Whether
a body is read at all is asked when its head has come (`Server.accepts_body`).
"""

import asyncio
import enum
import math
from collections import deque
from typing import cast

from inferry.domain.errors import BodyTooLarge, GatewayError, InvalidRequest
from inferry.ingress.http.reply import CONTINUE, Reply, Request, protocol_error_response
from inferry.ingress.http.request_body import MAX_DISCARD_BYTES, RequestBody
from inferry.ingress.http.request_head import (
    CHUNKED,
    MAX_HEADER_BYTES,
    DelimitedBuffer,
    HttpProtocolError,
    check_partial_head,
)
from inferry.ingress.http.server import Server
from inferry.ingress.http.sockets import peer_has_closed, reset

MAX_PIPELINED_REQUESTS = 16
"""Requests that wait behind the one being answered. While there are so many, nothing more is read."""
REFUSED_BODY_DRAIN_S = 2.0
"""How long the rest of a refused request is read and thrown away, so that its sender sees the answer and no reset."""
LARGE_HEAD = 16_384
"""A connection ends with a request whose head is larger: parsing them one after another would keep others waiting."""
LARGE_READ = 65_536
"""After so many bytes at once other connections are read first, unless these belong to a body that is kept."""
HALF_CLOSED_PROBE_DELAYS_S = (0.05, 0.25, 1.0, 4.0)
"""When a client that has finished writing is written to again, to learn whether it still reads."""


class _Phase(enum.Enum):
    """What is being read."""

    IDLE = "between"
    HEAD = "head"
    BODY = "body"


class Connection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_at_eof",
        "_body",
        "_buffer",
        "_has_blank_line",
        "_is_last_request",
        "_is_read_paused",
        "_is_shut_down",
        "_is_yielding",
        "_loop",
        "_partial_request",
        "_pending_data",
        "_pending_offset",
        "_phase",
        "_pipelined",
        "_pipelined_bytes",
        "_pipelined_head_bytes",
        "_reply",
        "_server",
        "_timed_phase",
        "_transport",
        "is_paused",
        "peer",
        "timeout_at",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport
        self._phase = _Phase.IDLE
        self._timed_phase: _Phase | None = None
        self._buffer: DelimitedBuffer | None = None  # a head that has begun
        self._has_blank_line = False  # an empty line has come before it
        self._partial_request = Request(b"", b"", {})
        self._body: RequestBody | None = None
        self._pipelined: deque[Request] = deque()
        self._pipelined_bytes = 0
        self._pipelined_head_bytes = 0
        self._pending_data = b""  # has come, and waits for those before it to be answered
        self._pending_offset = 0
        self._is_read_paused = False  # nothing is read meanwhile
        self._is_yielding = False  # until the event loop has looked at the others
        self._reply: Reply | None = None
        self._at_eof = False  # the client has finished writing
        self._is_last_request = False  # nothing that comes after what was read so far is understood
        self._is_shut_down = False  # the last answer has been written
        self.is_paused = False
        self.peer = ""
        self.timeout_at = math.inf  # when the client has to have gone on: the house calls `expire` then

    # -- for replies and the house -----------------------------------------------------------------------------------

    def keeps_alive_after(self, request: Request) -> bool:
        if not request.keeps_alive or self._server.is_closing:
            return False
        return bool(self._pipelined) or not (self._is_last_request or self._at_eof)

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def end_reply(self, reply: Reply, data: bytes) -> None:
        """The last bytes of an answer."""
        if reply is not self._reply:
            return  # its client had gone
        self.send(data)
        self._reply = None
        reply.release()
        server = self._server
        server.active_replies -= 1
        server.notify()
        if not self.keeps_alive_after(reply._request):
            self._shut_down()
        elif self._pipelined:
            self._loop.call_soon(self._serve_next)  # not from within the end of another's answer
        else:
            self._timed_phase = None
            self._arm_timeout()

    def close_when_answered(self) -> None:
        if self._reply is None and not self._is_shut_down:
            self._shut_down()

    def abort(self) -> None:
        """Reset the connection: the client cannot mistake that for a complete answer."""
        reset(self._transport)

    def expire(self) -> None:
        self.timeout_at = math.inf
        if self._phase is _Phase.IDLE or self._is_shut_down or self._pipelined:
            self._transport.abort()
        elif self._phase is _Phase.BODY:
            self._refuse_incomplete(InvalidRequest(f"the body did not arrive within {self._server.body_timeout_s:g} s"))
            self._serve_next()
        else:
            self._refuse(HttpProtocolError(408, f"the head did not arrive within {self._server.idle_timeout_s:g} s"))
            self._serve_next()

    def check_peer(self) -> None:
        """Reading does not show now whether the client has left, so look at the socket."""
        finished = peer_has_closed(self._transport)
        if finished is None:
            self._transport.abort()
        elif finished and self._reply is not None:
            self._server.held.discard(self)
            self._probe(0)  # many that have finished writing go on reading

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        self._server.connections.add(self)
        self._arm_timeout()

    def data_received(self, data: bytes) -> None:
        if len(data) >= LARGE_READ and self._body is None:
            self._yield()
        if self._is_shut_down or self._is_last_request:
            return  # the rest of something that was refused
        if self._pending_data:
            data = self._pending_data[self._pending_offset :] + data
            self._pending_data, self._pending_offset = b"", 0
            if self._is_read_paused:
                self._pending_data = data
                return
        self._receive(data, 0)
        if self._pipelined:
            self._serve_next()
        elif self._reply is None:
            self._arm_timeout()

    def eof_received(self) -> bool:
        """The client has finished writing. Whether it has left altogether shows only when it is written to."""
        self._at_eof = True
        if self._reply is None and not self._pipelined:
            return False
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.connections.discard(self)
        server.held.discard(self)
        self._is_shut_down = True
        self._pipelined.clear()
        self._pending_data = b""
        reply, self._reply = self._reply, None
        if reply is not None:
            server.active_replies -= 1
            reply.is_disconnected = True
            if reply.on_disconnect is not None:
                reply.on_disconnect()
            reply.release()
        server.notify()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._reply is None:
            self._serve_next()
        elif self._reply.on_writable is not None:
            self._reply.on_writable()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes, at: int) -> None:
        """Read what has come. Requests that are whole wait to be served; what is refused ends the connection."""
        size = len(data)
        try:
            while at < size and not self._is_last_request:
                if self._body is not None:
                    at = self._read_body(self._body, data, at)
                elif self._phase is _Phase.HEAD:
                    at = self._read_head(data, at)
                elif not self._partial_request.keeps_alive:
                    self._is_last_request = True  # the request before this was the last one
                elif self._pipelined and self._is_pipeline_full():
                    self._pause_reading(data, at)
                    return
                else:
                    at = self._read_head(data, at)
        except HttpProtocolError as protocol_error:
            protocol_error.__traceback__ = (
                None  # it leads to frames with all that has been read, and those lead back to it
            )
            self._refuse(protocol_error)

    def _read_head(self, data: bytes, at: int) -> int:
        if self._buffer is None:
            if data[at] == 13:
                return self._read_blank_line(data, at)
            end = data.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES) + 4
            if end > 3:
                return self._begin_request(data if at == 0 and end == len(data) else data[at:end], data, end)
            self._phase = _Phase.HEAD
            self._buffer = DelimitedBuffer(b"\r\n\r\n", MAX_HEADER_BYTES)
        held = self._buffer
        at = held.feed(data, at)
        if held.is_complete:
            self._buffer = None
            return self._begin_request(bytes(held.text), data, at)
        wrong = check_partial_head(held)
        if wrong is not None:
            raise wrong
        if held.is_over:
            raise HttpProtocolError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        return at

    def _read_blank_line(self, data: bytes, at: int) -> int:
        """One empty line before a request is ignored, as RFC 9112 asks for."""
        if at + 1 == len(data):
            self._pending_data, self._pending_offset = b"\r", 0
            return at + 1
        if data[at + 1] != 10 or self._has_blank_line:
            raise HttpProtocolError(400, "this is not a well-formed HTTP/1.1 request")
        self._has_blank_line = True
        return at + 2

    def _begin_request(self, head: bytes, data: bytes, at: int) -> int:
        """A head is complete, and `data` goes on at `at` behind it."""
        server = self._server
        request = self._partial_request = server.head_parser.parse(head)
        request.head_bytes = len(head)
        self._has_blank_line = False
        length = request.length
        if not length:
            self._complete()
            return at
        if server.accepts_body is not None and not server.accepts_body(request, self.peer):
            return self._discard_body(at)
        if 0 < length <= min(len(data) - at, server.max_body_bytes):
            request.body = data[at : at + length]  # all of it has come: most bodies are short
            self._complete()
            return at + length
        self._phase = _Phase.BODY
        body = self._body = RequestBody(length, server.max_body_bytes)
        if body.exceeds_discard_limit or (body.is_too_large and self._expects_continue()):
            self._refuse_incomplete(_too_large(body))
        return at

    def _discard_body(self, at: int) -> int:
        """The body is not kept. A short one is read past, so that the connection can go on; others are not read."""
        length = self._partial_request.length
        self._phase = _Phase.BODY
        if length == CHUNKED or length > MAX_DISCARD_BYTES or self._expects_continue():
            self._refuse_incomplete(self._partial_request.problem)
        else:
            self._body = RequestBody(length, 0)
        return at

    def _read_body(self, body: RequestBody, data: bytes, at: int) -> int:
        at = body.feed(data, at)
        request = self._partial_request
        if body.is_complete:
            if not body.is_too_large:
                request.body = body.content()
            elif body.max_bytes:
                request.problem = _too_large(body)
            self._complete()
        elif body.exceeds_discard_limit:
            self._refuse_incomplete(_too_large(body))
        return at

    def _complete(self) -> None:
        """A request is whole."""
        request = self._partial_request
        self._body = None
        self._phase = _Phase.IDLE
        if self._reply is not None or self._pipelined:
            request.caller = None  # its key may have been revoked when it is served: it is checked again then
        if request.head_bytes > LARGE_HEAD:
            self._is_last_request = True
        self._pipelined.append(request)
        self._pipelined_bytes += len(request.body)
        self._pipelined_head_bytes += request.head_bytes

    def _expects_continue(self) -> bool:
        request = self._partial_request
        return not request.is_http10 and request.headers.get(b"expect", b"").lower() == b"100-continue"

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def _is_pipeline_full(self) -> bool:
        """Whether so much waits that no further request is read."""
        return (
            len(self._pipelined) >= MAX_PIPELINED_REQUESTS
            or self._pipelined_head_bytes > MAX_HEADER_BYTES
            or self._pipelined_bytes > self._server.max_body_bytes
        )

    def _pause_reading(self, data: bytes, at: int) -> None:
        """Read nothing more until some of what waits has been answered."""
        self._pending_data, self._pending_offset = data, at
        if not self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = True
            self._server.held.add(self)
            self._transport.pause_reading()

    def _yield(self) -> None:
        """The event loop would read a connection that always has more up to 32 times before it looks at another."""
        if not self._is_yielding and not self._is_read_paused and not self._transport.is_closing():
            self._is_yielding = True
            self._transport.pause_reading()
            self._loop.call_soon(self._yielded)

    def _yielded(self) -> None:
        self._is_yielding = False
        if not self._is_read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _resume_reading(self) -> None:
        """There is room again for what has come meanwhile."""
        self._is_read_paused = False
        data, at = self._pending_data, self._pending_offset
        self._pending_data, self._pending_offset = b"", 0
        self._receive(data, at)
        if not self._is_read_paused:
            self._server.held.discard(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _serve_next(self) -> None:
        if not self._pipelined or self._reply is not None or self._is_shut_down:
            return
        if self.is_paused:
            # The client does not read its answers: no more of them until it does, which has to be in time.
            if self.timeout_at == math.inf:
                self.timeout_at = self._loop.time() + self._server.idle_timeout_s
            return
        request = self._pipelined.popleft()
        self._pipelined_bytes -= len(request.body)
        self._pipelined_head_bytes -= request.head_bytes
        self.timeout_at = math.inf
        self._timed_phase = None
        if request.protocol_error is not None:
            self.send(protocol_error_response(request.protocol_error[0], request.protocol_error[1]))
            self._shut_down()
            return
        self._server.active_replies += 1
        reply = self._reply = Reply(self, request)
        if self._is_read_paused and 2 * len(self._pipelined) <= MAX_PIPELINED_REQUESTS and not self._is_pipeline_full():
            self._resume_reading()
        self._server.serve(request, reply)

    def _arm_timeout(self) -> None:
        """Nothing is being answered: the next request has to begin, or to go on, in time."""
        if self._phase is self._timed_phase:
            return  # trickling does not help
        self._timed_phase = self._phase
        is_body = self._phase is _Phase.BODY
        self.timeout_at = self._loop.time() + (self._server.body_timeout_s if is_body else self._server.idle_timeout_s)
        if is_body and self._expects_continue():
            self.send(CONTINUE)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _refuse_incomplete(self, problem: GatewayError | None) -> None:
        """Answer the request that is being read although the rest of it is missing, and nothing after it."""
        self._partial_request.problem = problem
        self._body = None
        self._is_last_request = True
        self._pipelined.append(self._partial_request)

    def _refuse(self, protocol_error: HttpProtocolError) -> None:
        """What came cannot be taken for a request. It is answered when those before it have been."""
        self._is_last_request = True
        self._buffer = self._body = None
        request = Request(b"", b"", {})
        request.protocol_error = protocol_error.status, protocol_error.reason
        self._pipelined.append(request)

    def _shut_down(self) -> None:
        """The last answer is written: close once it has left."""
        self._is_shut_down = True
        self._pipelined.clear()
        if self._at_eof or (self._phase is _Phase.IDLE and not self._is_last_request and not self._is_read_paused):
            self._transport.close()
            return
        # The client is still sending: closing now would reset the connection under the answer.
        self.timeout_at = self._loop.time() + REFUSED_BODY_DRAIN_S
        if self._is_read_paused:
            self._is_read_paused = False
            self._pending_data = b""
            self._server.held.discard(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _probe(self, number: int) -> None:
        if self._reply is None or self._transport.is_closing():
            return
        if not self._reply.probe():
            self._transport.abort()
        elif number < len(HALF_CLOSED_PROBE_DELAYS_S):
            self._loop.call_later(HALF_CLOSED_PROBE_DELAYS_S[number], self._probe, number + 1)


def _too_large(body: RequestBody) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {body.max_bytes} bytes")
