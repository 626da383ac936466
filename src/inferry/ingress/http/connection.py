"""HTTP/1.1 towards clients, written in callbacks: no task and no queue per connection.

Everything belongs to one event loop. A `RequestReader` turns the bytes into requests; the connection hands them to
`Server.serve` one at a time, in their order. The response goes through the request's `Reply`, at once or later. Reading
continues meanwhile, because only reading shows that a client has disconnected. Every resource of a connection is
bounded: the size of heads and bodies, the time for either, the number of pipelined requests, the unread response data,
and the idle time.
"""

import asyncio
import math
from typing import Final, cast

from inferry.domain.errors import InvalidRequest
from inferry.ingress.http.reply import CONTINUE, Reply, protocol_error_response
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_head import HttpProtocolError
from inferry.ingress.http.request_reader import MAX_PIPELINED_REQUESTS, ReadPhase, RequestReader
from inferry.ingress.http.server import ServedConnection, Server
from inferry.ingress.http.sockets import peer_has_closed, reset
from inferry.observe.request_counts import CLIENT_CLOSED

REFUSED_BODY_DRAIN_S: Final = 2.0
"""How long the rest of a refused request is read and discarded, so that its sender sees the response and no reset."""
LARGE_READ: Final = 65_536
"""Bytes. After a read of this size other connections are read first, unless it belongs to a body that is kept."""
HALF_CLOSED_PROBE_DELAYS_S = (0.05, 0.25, 1.0, 4.0)
"""Delays between writes to a client that has finished sending, to learn whether it still reads."""


class Connection(ServedConnection):
    """One client's connection."""

    __slots__ = (
        "_at_eof",
        "_is_read_paused",
        "_is_shut_down",
        "_is_yielding",
        "_loop",
        "_pending_data",
        "_pending_offset",
        "_reader",
        "_reply",
        "_server",
        "_timed_phase",
        "_timed_progress",
        "_transport",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport
        self._reader = RequestReader(server)
        self._timed_phase: ReadPhase | None = None
        self._timed_progress = 0
        self._pending_data = b""  # received and not read yet
        self._pending_offset = 0
        self._is_read_paused = False  # until waiting requests have been answered
        self._is_yielding = False  # until the event loop has served other connections
        self._reply: Reply | None = None
        self._at_eof = False  # the client has finished sending
        self._is_shut_down = False  # the last response has been written

    # -- for replies and the server ----------------------------------------------------------------------------------

    def keeps_alive_after(self, request: Request) -> bool:
        if not request.keeps_alive or self._server.is_closing:
            return False
        return bool(self._reader.requests) or not (self._reader.is_finished or self._at_eof)

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def end_reply(self, reply: Reply, data: bytes) -> None:
        if reply is not self._reply:
            return  # its client has disconnected
        self.send(data)
        self._reply = None
        reply.release()
        server = self._server
        server.requests.count(reply.request.target, reply.status)
        server.active_replies -= 1
        server.notify()
        if not self.keeps_alive_after(reply.request) and not self._may_send_another(reply.request):
            self._shut_down()
        elif self._reader.requests:
            self._loop.call_soon(self._serve_next)  # not from within the end of another response
        else:
            self._timed_phase = None
            self._arm_timeout()

    def _may_send_another(self, request: Request) -> bool:
        """Whether the server retires and this response may have begun before, so that it did not say so."""
        return self._server.is_retiring and request.keeps_alive and not (self._reader.is_finished or self._at_eof)

    def expect_last_request(self) -> None:
        if self._reply is None and not self._is_shut_down and self._reader.phase is not ReadPhase.BODY:
            self._timed_phase = None
            self._arm_timeout()

    def close_when_answered(self) -> None:
        if self._reply is None and not self._is_shut_down:
            self._shut_down()

    def abort(self) -> None:
        reset(self._transport)

    def expire(self) -> None:
        self.timeout_at = math.inf
        reader = self._reader
        if reader.phase is ReadPhase.IDLE or self._is_shut_down or reader.requests:
            self._transport.abort()
            return
        if reader.phase is ReadPhase.BODY:
            timeout_s = self._server.body_timeout_s
            reader.refuse_incomplete(InvalidRequest(f"the body did not arrive within {timeout_s:g} s"))
        else:
            timeout_s = self._server.idle_timeout_s
            reader.refuse(HttpProtocolError(408, f"the request head did not arrive within {timeout_s:g} s"))
        self._serve_next()

    def check_peer(self) -> None:
        finished = peer_has_closed(self._transport)
        if finished is None:
            self._transport.abort()
        elif finished and self._reply is not None:
            self._server.held.discard(self)
            self._probe(0)  # a client that has finished sending may still read

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = self._reader.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        self._server.connections.add(self)
        self._arm_timeout()

    def set_peer(self, peer: str) -> None:
        """The client's address, where another process forwards its connection."""
        self.peer = self._reader.peer = peer

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if len(data) >= LARGE_READ and not reader.is_reading_body:
            self._yield()
        if self._is_shut_down or reader.is_finished:
            return  # the rest of a refused request
        if self._pending_data:
            data = self._pending_data[self._pending_offset :] + data
            self._pending_data, self._pending_offset = b"", 0
            if self._is_read_paused:
                self._pending_data = data
                return
        is_first = self._reply is None and not reader.requests
        self._read(data, 0)
        if reader.requests:
            self._serve_next(is_first)
        elif self._reply is None:
            self._arm_timeout()

    def eof_received(self) -> bool:
        """Handle a client that has finished sending. Only a write shows whether it has disconnected altogether."""
        self._at_eof = True
        if self._reply is None and not self._reader.requests:
            return False
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        server = self._server
        server.connections.discard(self)
        server.held.discard(self)
        self._is_shut_down = True
        self._reader.abort()
        self._pending_data = b""
        reply, self._reply = self._reply, None
        if reply is not None:
            server.requests.count(reply.request.target, CLIENT_CLOSED)
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

    def _read(self, data: bytes, at: int) -> None:
        reader = self._reader
        at = reader.read(data, at)
        if at < len(data):
            self._pending_data, self._pending_offset = data, at
            if reader.is_full:
                self._pause_reading()
        sink = reader.sink
        if sink is not None:
            sink.on_change = self._sink_changed
            if reader.is_blocked:
                self._pause_reading()

    def _sink_changed(self) -> None:
        """The sink of the body being read takes more, or refuses the rest."""
        reader = self._reader
        sink = reader.sink
        if sink is None or self._is_shut_down:
            return
        if sink.problem is not None:
            reader.refuse_incomplete(sink.problem)
            self._serve_next()
        elif not sink.is_full and self._is_read_paused:
            self._timed_progress = -1
            self._resume_reading()
            if self._reply is None:
                self._arm_timeout()

    def _pause_reading(self) -> None:
        """Read nothing more until some of the waiting requests have been answered."""
        if not self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = True
            if self._reader.sink is not None and self._reply is None:
                self.timeout_at = math.inf  # the gateway is slow, not the client
            self._server.held.add(self)
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Read the data received while reading was paused, then from the socket."""
        self._is_read_paused = False
        data, at = self._pending_data, self._pending_offset
        self._pending_data, self._pending_offset = b"", 0
        self._read(data, at)
        if not self._is_read_paused:
            self._server.held.discard(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _yield(self) -> None:
        """Let the event loop serve other connections: it may read one with much data 32 times in a row."""
        if not self._is_yielding and not self._is_read_paused and not self._transport.is_closing():
            self._is_yielding = True
            self._transport.pause_reading()
            self._loop.call_soon(self._yielded)

    def _yielded(self) -> None:
        self._is_yielding = False
        if not self._is_read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve_next(self, is_first: bool = False) -> None:
        """Serve the next request if none is being answered. `is_first`: it has not waited since its head arrived."""
        reader = self._reader
        if not reader.requests or self._reply is not None or self._is_shut_down:
            return
        if self.is_paused:
            # The client does not read its responses: the next request waits until it does, for a bounded time.
            if self.timeout_at == math.inf:
                self.timeout_at = self._loop.time() + self._server.idle_timeout_s
            return
        request = reader.take()
        if not is_first:
            request.caller = None  # the key may have been revoked while the request waited: authenticate again
        if self._server.is_closing:
            request.keeps_alive = False  # the response says so
        self.timeout_at = math.inf
        self._timed_phase = None
        if request.protocol_error is not None:
            self._server.requests.count(b"", request.protocol_error[0])
            self.send(protocol_error_response(request.protocol_error[0], request.protocol_error[1]))
            self._shut_down()
            return
        self._server.active_replies += 1
        reply = self._reply = Reply(self, request)
        is_full = 2 * len(reader.requests) > MAX_PIPELINED_REQUESTS or reader.is_full or reader.is_blocked
        if self._is_read_paused and not is_full:
            self._resume_reading()
        self._server.serve(request, reply)

    def _arm_timeout(self) -> None:
        """No response is under way: bound the time until the next request begins, or continues."""
        phase, progress = self._reader.phase, self._reader.body_progress
        if phase is self._timed_phase and progress == self._timed_progress:
            return  # a trickle of bytes does not extend the time
        is_begun = phase is not self._timed_phase
        self._timed_phase, self._timed_progress = phase, progress
        is_body = phase is ReadPhase.BODY
        self.timeout_at = self._loop.time() + (self._server.body_timeout_s if is_body else self._server.idle_timeout_s)
        if is_body and is_begun and self._reader.expects_continue:
            self.send(CONTINUE)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Close the connection once the last response was sent."""
        self._is_shut_down = True
        reader = self._reader
        reader.requests.clear()
        is_idle = reader.phase is ReadPhase.IDLE and not reader.is_finished and not self._is_read_paused
        if self._at_eof or is_idle:
            self._transport.close()
            return
        # The client is still sending: closing now would reset the connection before it has read the response.
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
