"""HTTP/1.1 towards clients: heads parsed by httptools, answers written by callbacks, no task and no queue in between.

Everything belongs to one event loop. A `Connection` reads requests and hands each to `House.serve` once it is whole,
one at a time and in their order; the answer goes through the request's `Reply`, at once or later. Reading goes on
meanwhile, because only reading shows that a client has left. What a connection may take is bounded: the size of its
heads and bodies, the time for either, what is pipelined, what it does not read, and how long it may stay idle. Whether
a body is read at all is asked when its head has come (`House.admits`).
"""

import asyncio
import enum
import math
from collections import deque
from typing import cast

from inferry.domain.errors import BodyTooLarge, GatewayError, InvalidRequest
from inferry.ingress.bodies import MOST_UNWANTED, Body
from inferry.ingress.heads import CHUNKED, LARGEST_HEADERS, Held, Refused, flaw
from inferry.ingress.house import House
from inferry.ingress.reply import CONTINUE, Reply, Request, refusal
from inferry.ingress.sockets import has_finished, reset

MOST_PIPELINED = 16
"""Requests that wait behind the one being answered. While there are so many, nothing more is read."""
LINGER_S = 2.0
"""How long the rest of a refused request is read and thrown away, so that its sender sees the answer and no reset."""
LARGE_HEAD = 16_384
"""A connection ends with a request whose head is larger: parsing them one after another would keep others waiting."""
LARGE_READ = 65_536
"""After so many bytes at once other connections are read first, unless these belong to a body that is kept."""
PROBES_S = (0.05, 0.25, 1.0, 4.0)
"""When a client that has finished writing is written to again, to learn whether it still reads."""


class _Phase(enum.Enum):
    """What is being read."""

    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"


class Connection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_at_eof",
        "_body",
        "_held",
        "_house",
        "_is_blank",
        "_is_held",
        "_is_last",
        "_is_shut",
        "_is_yielding",
        "_loop",
        "_phase",
        "_reading",
        "_reply",
        "_timed",
        "_transport",
        "_unread",
        "_unread_at",
        "_waiting",
        "_waiting_bytes",
        "_waiting_heads",
        "due_at",
        "is_paused",
        "peer",
    )

    def __init__(self, house: House, loop: asyncio.AbstractEventLoop) -> None:
        self._house = house
        self._loop = loop
        self._transport: asyncio.Transport
        self._phase = _Phase.BETWEEN
        self._timed: _Phase | None = None
        self._held: Held | None = None  # a head that has begun
        self._is_blank = False  # an empty line has come before it
        self._reading = Request(b"", b"", {})
        self._body: Body | None = None
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._waiting_heads = 0
        self._unread = b""  # has come, and waits for those before it to be answered
        self._unread_at = 0
        self._is_held = False  # nothing is read meanwhile
        self._is_yielding = False  # until the event loop has looked at the others
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
        """Reset the connection: the client cannot mistake that for a complete answer."""
        reset(self._transport)

    def expire(self) -> None:
        self.due_at = math.inf
        if self._phase is _Phase.BETWEEN or self._is_shut or self._waiting:
            self._transport.abort()
        elif self._phase is _Phase.BODY:
            self._refuse_rest(InvalidRequest(f"the body did not arrive within {self._house.body_timeout_s:g} s"))
            self._serve_next()
        else:
            self._refuse(Refused(408, f"the head did not arrive within {self._house.idle_timeout_s:g} s"))
            self._serve_next()

    def look(self) -> None:
        """Reading does not show now whether the client has left, so look at the socket."""
        finished = has_finished(self._transport)
        if finished is None:
            self._transport.abort()
        elif finished and self._reply is not None:
            self._house.held.discard(self)
            self._probe(0)  # many that have finished writing go on reading

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        self._house.connections.add(self)
        self._expect_more()

    def data_received(self, data: bytes) -> None:
        if len(data) >= LARGE_READ and self._body is None:
            self._yield()
        if self._is_shut or self._is_last:
            return  # the rest of something that was refused
        if self._unread:
            data = self._unread[self._unread_at :] + data
            self._unread, self._unread_at = b"", 0
            if self._is_held:
                self._unread = data
                return
        self._take(data, 0)
        if self._waiting:
            self._serve_next()
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
        house.held.discard(self)
        self._is_shut = True
        self._waiting.clear()
        self._unread = b""
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
        if self._reply is None:
            self._serve_next()
        elif self._reply.on_writable is not None:
            self._reply.on_writable()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _take(self, data: bytes, at: int) -> None:
        """Read what has come. Requests that are whole wait to be served; what is refused ends the connection."""
        size = len(data)
        try:
            while at < size and not self._is_last:
                if self._body is not None:
                    at = self._take_body(self._body, data, at)
                elif self._phase is _Phase.HEAD:
                    at = self._take_head(data, at)
                elif not self._reading.keeps_alive:
                    self._is_last = True  # the request before this was the last one
                elif self._waiting and self._is_full():
                    self._hold(data, at)
                    return
                else:
                    at = self._take_head(data, at)
        except Refused as refused:
            refused.__traceback__ = None  # it leads to frames with all that has been read, and those lead back to it
            self._refuse(refused)

    def _take_head(self, data: bytes, at: int) -> int:
        if self._held is None:
            if data[at] == 13:
                return self._take_blank(data, at)
            end = data.find(b"\r\n\r\n", at, at + LARGEST_HEADERS) + 4
            if end > 3:
                return self._begin(data if at == 0 and end == len(data) else data[at:end], data, end)
            self._phase = _Phase.HEAD
            self._held = Held(b"\r\n\r\n", LARGEST_HEADERS)
        held = self._held
        at = held.take(data, at)
        if held.is_whole:
            self._held = None
            return self._begin(bytes(held.text), data, at)
        wrong = flaw(held)
        if wrong is not None:
            raise wrong
        if held.is_over:
            raise Refused(431, f"the headers are larger than {LARGEST_HEADERS} bytes")
        return at

    def _take_blank(self, data: bytes, at: int) -> int:
        """One empty line before a request is ignored, as RFC 9112 asks for."""
        if at + 1 == len(data):
            self._unread, self._unread_at = b"\r", 0
            return at + 1
        if data[at + 1] != 10 or self._is_blank:
            raise Refused(400, "this is not a well-formed HTTP/1.1 request")
        self._is_blank = True
        return at + 2

    def _begin(self, head: bytes, data: bytes, at: int) -> int:
        """A head is complete, and `data` goes on at `at` behind it."""
        house = self._house
        request = self._reading = house.heads.read(head)
        request.head_bytes = len(head)
        if len(head) > LARGE_HEAD:
            request.keeps_alive = False
        self._is_blank = False
        length = request.length
        if not length:
            self._complete()
            return at
        if house.admits is not None and not house.admits(request, self.peer):
            return self._begin_unwanted(at)
        if 0 < length <= min(len(data) - at, house.max_body_bytes):
            request.body = data[at : at + length]  # all of it has come: most bodies are short
            self._complete()
            return at + length
        self._phase = _Phase.BODY
        body = self._body = Body(length, house.max_body_bytes)
        if body.is_hopeless or (body.is_too_large and self._asks_first()):
            self._refuse_rest(_too_large(body))
        return at

    def _begin_unwanted(self, at: int) -> int:
        """The body is not kept. A short one is read past, so that the connection can go on; others are not read."""
        length = self._reading.length
        self._phase = _Phase.BODY
        if length == CHUNKED or length > MOST_UNWANTED or self._asks_first():
            self._refuse_rest(self._reading.problem)
        else:
            self._body = Body(length, 0)
        return at

    def _take_body(self, body: Body, data: bytes, at: int) -> int:
        at = body.take(data, at)
        request = self._reading
        if body.is_whole:
            if not body.is_too_large:
                request.body = body.kept()
            elif body.wanted:
                request.problem = _too_large(body)
            self._complete()
        elif body.is_hopeless:
            self._refuse_rest(_too_large(body))
        return at

    def _complete(self) -> None:
        """A request is whole."""
        request = self._reading
        self._body = None
        self._phase = _Phase.BETWEEN
        if self._reply is not None or self._waiting:
            request.caller = None  # its key may have been revoked when it is served: it is checked again then
        self._waiting.append(request)
        self._waiting_bytes += len(request.body)
        self._waiting_heads += request.head_bytes

    def _asks_first(self) -> bool:
        request = self._reading
        return not request.is_http10 and request.headers.get(b"expect", b"").lower() == b"100-continue"

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        """Whether so much waits that no further request is read."""
        return (
            len(self._waiting) >= MOST_PIPELINED
            or self._waiting_heads > LARGEST_HEADERS
            or self._waiting_bytes > self._house.max_body_bytes
        )

    def _hold(self, data: bytes, at: int) -> None:
        """Read nothing more until some of what waits has been answered."""
        self._unread, self._unread_at = data, at
        if not self._is_held and not self._transport.is_closing():
            self._is_held = True
            self._house.held.add(self)
            self._transport.pause_reading()

    def _yield(self) -> None:
        """The event loop would read a connection that always has more up to 32 times before it looks at another."""
        if not self._is_yielding and not self._is_held and not self._transport.is_closing():
            self._is_yielding = True
            self._transport.pause_reading()
            self._loop.call_soon(self._yielded)

    def _yielded(self) -> None:
        self._is_yielding = False
        if not self._is_held and not self._transport.is_closing():
            self._transport.resume_reading()

    def _go_on(self) -> None:
        """There is room again for what has come meanwhile."""
        self._is_held = False
        data, at = self._unread, self._unread_at
        self._unread, self._unread_at = b"", 0
        self._take(data, at)
        if not self._is_held:
            self._house.held.discard(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _serve_next(self) -> None:
        if not self._waiting or self._reply is not None or self._is_shut:
            return
        if self.is_paused:
            # The client does not read its answers: no more of them until it does, which has to be in time.
            if self.due_at == math.inf:
                self.due_at = self._loop.time() + self._house.idle_timeout_s
            return
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        self._waiting_heads -= request.head_bytes
        self.due_at = math.inf
        self._timed = None
        if request.refused is not None:
            self.send(refusal(request.refused[0], request.refused[1]))
            self._shut()
            return
        self._house.answering += 1
        reply = self._reply = Reply(self, request)
        if self._is_held and 2 * len(self._waiting) <= MOST_PIPELINED and not self._is_full():
            self._go_on()
        self._house.serve(request, reply)

    def _expect_more(self) -> None:
        """Nothing is being answered: the next request has to begin, or to go on, in time."""
        if self._phase is self._timed:
            return  # trickling does not help
        self._timed = self._phase
        is_body = self._phase is _Phase.BODY
        self.due_at = self._loop.time() + (self._house.body_timeout_s if is_body else self._house.idle_timeout_s)
        if is_body and self._asks_first():
            self.send(CONTINUE)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _refuse_rest(self, problem: GatewayError | None) -> None:
        """Answer the request that is being read although the rest of it is missing, and nothing after it."""
        self._reading.problem = problem
        self._body = None
        self._is_last = True
        self._waiting.append(self._reading)

    def _refuse(self, refused: Refused) -> None:
        """What came cannot be taken for a request. It is answered when those before it have been."""
        self._is_last = True
        self._held = self._body = None
        request = Request(b"", b"", {})
        request.refused = refused.status, refused.why
        self._waiting.append(request)

    def _shut(self) -> None:
        """The last answer is written: close once it has left."""
        self._is_shut = True
        self._waiting.clear()
        if self._at_eof or (self._phase is _Phase.BETWEEN and not self._is_last and not self._is_held):
            self._transport.close()
            return
        # The client is still sending: closing now would reset the connection under the answer.
        self.due_at = self._loop.time() + LINGER_S
        if self._is_held:
            self._is_held = False
            self._unread = b""
            self._house.held.discard(self)
            if not self._transport.is_closing():
                self._transport.resume_reading()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _probe(self, number: int) -> None:
        if self._reply is None or self._transport.is_closing():
            return
        if not self._reply.probe():
            self._transport.abort()
        elif number < len(PROBES_S):
            self._loop.call_later(PROBES_S[number], self._probe, number + 1)


def _too_large(body: Body) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {body.wanted} bytes")
