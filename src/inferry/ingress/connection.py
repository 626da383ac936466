"""HTTP/1.1 towards clients: parsed by httptools, answered by callbacks, no task and no queue in between.

Everything belongs to one event loop. A `Connection` reads requests and hands each to `House.serve` once it is whole,
one at a time and in their order; the answer goes through the request's `Reply`, at once or later. Reading goes on
meanwhile, because only reading shows that a client has left. What a connection may take is bounded: the size of its
headers and bodies, the time for either, what is pipelined, and how long it may stay idle.
"""

import asyncio
import enum
import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from inferry.domain.errors import BodyTooLarge, GatewayError, InvalidRequest
from inferry.ingress.problems import error_body
from inferry.ingress.reply import CONTINUE, STATUS_LINES, Reply, Request

LARGEST_HEADERS = 65_536
MOST_PIPELINED = 16
MOST_PARTS = 1024
"""A body that comes in more pieces than this is put together as it comes: small pieces cost more than they hold."""
WORTH_A_LOOK = 65_536
"""What comes in one piece of this size may begin a body that is not worth copying once more."""
MOST_DISCARDED = 8
"""A body this many times over the limit is not read to its end before it is refused."""
LINGER_S = 2.0
"""How long the rest of a refused request is read and thrown away, so that its sender sees the answer and no reset."""
PROBES_S = (0.05, 0.25, 1.0, 4.0)
"""When a client that has finished writing is written to again, to learn whether it still reads."""

_RESET = struct.pack("ii", 1, 0)


class _Phase(enum.Enum):
    """What is being read."""

    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"


class House:
    """What all connections of a server share: whom to hand requests to, the limits, and who is connected."""

    def __init__(
        self,
        serve: Callable[[Request, Reply], None],
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self.serve = serve
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.connections: set[Connection] = set()
        self.answering = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_closing = False
        # One timer for all connections: moving one for every request of each would cost more than the look-around.
        self._every_s = min(1.0, body_timeout_s / 4, idle_timeout_s / 4)
        self._sweeper = self._loop.call_later(self._every_s, self._sweep)

    def changed(self) -> None:
        """An answer is complete or a connection has ended."""
        self._changed.set()

    async def wait_until_answered(self) -> None:
        """Until every request has been answered, or its client has gone."""
        while self.answering:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Close every connection as soon as what was written to it has left; return when all have ended."""
        self._is_closing = True
        for connection in list(self.connections):
            connection.close_when_answered()
        while self.connections:
            self._changed.clear()
            await self._changed.wait()

    def abort(self) -> None:
        """End what is left, at once."""
        self._sweeper.cancel()
        for connection in list(self.connections):
            connection.abort()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in [one for one in self.connections if one.due_at <= now]:
            connection.expire()
        self._sweeper = self._loop.call_later(self._every_s, self._sweep)


class Connection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_announced",
        "_at_eof",
        "_head_bytes",
        "_house",
        "_is_last",
        "_is_shut",
        "_loop",
        "_parser",
        "_parts",
        "_phase",
        "_reading",
        "_reply",
        "_size",
        "_timed",
        "_transport",
        "_waiting",
        "_waiting_bytes",
        "due_at",
        "is_paused",
        "peer",
    )

    def __init__(self, house: House, loop: asyncio.AbstractEventLoop) -> None:
        self._house = house
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _Phase.BETWEEN
        self._timed: _Phase | None = None
        self._head_bytes = 0
        self._reading = Request(b"", b"", {})
        self._parts: list[bytes | bytearray | memoryview] = []
        self._size = 0
        self._announced = 0  # of a long body, which is read past the parser
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._reply: Reply | None = None
        self._at_eof = False  # the client has finished writing
        self._is_last = False  # nothing that comes after what was read so far is understood
        self._is_shut = False  # the last answer has been written
        self.is_paused = False
        self.peer = ""
        self.due_at = math.inf  # when the client has to have gone on: the house calls `expire` then

    # -- for replies and the house -----------------------------------------------------------------------------------

    def is_kept_after(self, request: Request) -> bool:
        if not request.keeps_alive or self._house.is_closing:
            return False
        return bool(self._waiting) or not (self._is_last or self._at_eof)

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def answered(self, reply: Reply, data: bytes) -> None:
        """The last bytes of an answer."""
        if reply is not self._reply:
            return  # its client had gone
        self.send(data)
        self._reply = None
        reply.forget()
        house = self._house
        house.answering -= 1
        house.changed()
        if not self.is_kept_after(reply._request):
            self._shut()
        elif self._waiting:
            self._loop.call_soon(self._serve_next)  # not from within the end of another's answer
        else:
            self._timed = None
            self._expect_more()

    def close_when_answered(self) -> None:
        if self._reply is None and not self._is_shut:
            self._shut()

    def abort(self) -> None:
        """Reset the connection: an end that nobody can take for a good one, whatever the answer's framing."""
        if not self._transport.is_closing():
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def expire(self) -> None:
        self.due_at = math.inf
        if self._phase is _Phase.BODY and not self._is_shut:
            self._refuse_rest(InvalidRequest(f"the body did not arrive within {self._house.body_timeout_s:g} s"))
            self._serve_next()
        else:
            self._transport.abort()

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        self._house.connections.add(self)
        self._expect_more()

    def data_received(self, data: bytes) -> None:
        if self._is_shut or self._is_last:
            return  # the rest of something that was refused
        is_long = self._announced or len(data) > WORTH_A_LOOK
        if not (self._read_long(data) if is_long else self._read(data, data)):
            return
        if self._phase is _Phase.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEADERS:
                self._refuse_head(431, f"the headers are larger than {LARGEST_HEADERS} bytes")
                return
        if self._waiting:
            self._serve_next()
            if len(self._waiting) > MOST_PIPELINED or self._waiting_bytes > self._house.max_body_bytes:
                self.abort()
        elif self._reply is None:
            self._expect_more()

    def eof_received(self) -> bool:
        """The client has finished writing. Whether it has left altogether shows only when it is written to."""
        self._at_eof = True
        if self._reply is None and not self._waiting:
            return False
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        house = self._house
        house.connections.discard(self)
        self._is_shut = True
        self._waiting.clear()
        self._parser = None  # it holds this connection in turn, and the collector comes seldom
        reply, self._reply = self._reply, None
        if reply is not None:
            house.answering -= 1
            reply.is_gone = True
            if reply.on_gone is not None:
                reply.on_gone()
            reply.forget()
        house.changed()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._reply is not None and self._reply.on_writable is not None:
            self._reply.on_writable()

    # -- httptools' callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._phase = _Phase.HEAD
        self._head_bytes = 0
        self._reading = Request(b"", b"", {})

    def on_url(self, url: bytes) -> None:
        self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers, name = self._reading.headers, name.lower()
        given = headers.get(name)
        # What comes twice is one list, as HTTP has it: two keys, tenants or runs are then none that anybody knows.
        headers[name] = value if given is None else given + b", " + value

    def on_headers_complete(self) -> None:
        request, parser = self._reading, self._parser
        request.method = parser.get_method()
        request.keeps_alive = parser.should_keep_alive()
        if parser.get_http_version() != "1.1":
            request.is_http10, request.keeps_alive = True, False
        self._phase = _Phase.BODY
        self._parts = []
        self._size = 0
        if len(request.headers.get(b"content-length", b"")) > 5:  # not worth a thought for what is small
            announced, limit = int(request.headers[b"content-length"]), self._house.max_body_bytes
            if announced > limit * (1 if b"expect" in request.headers else MOST_DISCARDED):
                self._refuse_rest(self._too_large())
            elif announced <= limit and b"upgrade" not in request.headers:
                self._announced = announced

    def on_body(self, body: bytes | memoryview) -> None:
        self._size += len(body)
        limit = self._house.max_body_bytes
        if self._size <= limit:
            self._parts.append(body)
            if len(self._parts) > MOST_PARTS:
                whole = self._parts[0]
                if not isinstance(whole, bytearray):
                    whole = self._parts[0] = bytearray(whole)
                whole += b"".join(self._parts[1:])
                del self._parts[1:]
            return
        # Keep reading for a while, without keeping it: a client that is still sending when its connection closes
        # would see a reset instead of the answer.
        self._parts.clear()
        if self._size > limit * MOST_DISCARDED and not self._is_last:
            self._refuse_rest(self._too_large())

    def on_message_complete(self) -> None:
        if self._is_last:
            return  # refused already
        request = self._reading
        if self._size > self._house.max_body_bytes:
            request.problem = self._too_large()
        else:
            first = self._parts[0] if len(self._parts) == 1 else None
            request.body = first if isinstance(first, bytes) else b"".join(self._parts)
        self._parts = []
        self._announced = 0
        self._phase = _Phase.BETWEEN
        self._waiting.append(request)
        self._waiting_bytes += len(request.body)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _read(self, piece: bytes | memoryview, data: bytes | memoryview) -> bool:
        """Have the parser read a piece, with which `data` begins. False where that has led elsewhere."""
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(bytes(data[upgrade.args[0] :]))
            return False
        except httptools.HttpParserError:
            self._refuse_head(400, "this is not HTTP")
            return False
        return True

    def _read_long(self, data: bytes) -> bool:
        """The same for what is, or begins, a long body: that is kept as it came, where the parser would copy it."""
        rest = memoryview(data)
        if self._phase is _Phase.BETWEEN:
            head = data.find(b"\r\n\r\n", 0, LARGEST_HEADERS) + 4
            if head > 3:
                if not self._read(data[:head], data):
                    return False
                rest = rest[head:]
        if self._announced:
            part = rest[: self._announced - self._size]
            self.on_body(part)
            if self._size < self._announced:
                return True
            self._parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
            self.on_message_complete()
            rest = rest[len(part) :]
        return not len(rest) or self._read(rest, rest)

    def _serve_next(self) -> None:
        if self._waiting and self._reply is None:
            request = self._waiting.popleft()
            self._waiting_bytes -= len(request.body)
            self.due_at = math.inf
            self._timed = None
            self._house.answering += 1
            reply = self._reply = Reply(self, request)
            self._house.serve(request, reply)

    def _expect_more(self) -> None:
        """Nothing is being answered: the next request has to begin, or to go on, in time."""
        if self._phase is self._timed:
            return  # trickling does not help
        self._timed = self._phase
        is_body = self._phase is _Phase.BODY
        self.due_at = self._loop.time() + (self._house.body_timeout_s if is_body else self._house.idle_timeout_s)
        if is_body and self._reading.headers.get(b"expect", b"").lower() == b"100-continue":
            self.send(CONTINUE)

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Read the last request again as if it had not asked for a protocol that is not spoken here.

        The parser has left out its body, taking it for something in that protocol.
        """
        request = self._waiting.pop()
        if request.method == b"CONNECT":
            self._is_last = True
            self._waiting.append(request)
            self._serve_next()
            return
        fields = [field for field in request.headers.items() if field[0] != b"upgrade"]
        lines = [b"%b %b HTTP/1.1" % (request.method, request.target), *(b"%b: %b" % field for field in fields)]
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse_rest(self, problem: GatewayError) -> None:
        """Answer the request that is being read although the rest of it is missing, and nothing after it."""
        self._reading.problem = problem
        self._parts = []
        self._is_last = True
        self._waiting.append(self._reading)

    def _refuse_head(self, status: int, why: str) -> None:
        """What came cannot be taken for a request."""
        self._is_last = True
        if self._reply is None and not self._waiting:
            body = error_body(InvalidRequest(why))
            head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.send(head % (STATUS_LINES[status], len(body)) + body)
            self._shut()
        elif self._reply is None:
            self._serve_next()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._house.max_body_bytes} bytes")

    def _shut(self) -> None:
        """The last answer is written: close once it has left."""
        self._is_shut = True
        if self._at_eof or (self._phase is _Phase.BETWEEN and not self._is_last):
            self._transport.close()
            return
        # The client is still sending: closing now would reset the connection under the answer.
        self.due_at = self._loop.time() + LINGER_S
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _probe(self, number: int) -> None:
        if self._reply is None or self._transport.is_closing():
            return
        if not self._reply.probe():
            self._transport.abort()
        elif number < len(PROBES_S):
            self._loop.call_later(PROBES_S[number], self._probe, number + 1)
