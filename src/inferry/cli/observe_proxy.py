"""The proxy of `inferry observe`: passes requests and responses on as they are, and records metadata of each call.

Calls belong to one event loop, without a task per call: a task only opens connections. Rows are made in a thread.
Bodies pass unchanged, piece by piece; of the headers only those that belong to a single connection (RFC 9110, 7.6.1)
and `host` are replaced. Endpoints for operators are refused unless asked for: a gateway without an admin key trusts
clients on its machine, as which the proxy's would appear. A client that disconnects ends its call upstream. What is
recorded of bytes is computed after they were passed on.
"""

import asyncio
import logging
import ssl
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import cast
from urllib.parse import urlsplit

import httptools

from inferry.domain.clock import Clock
from inferry.ingress.admin import is_admin_target
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ledger.recorder import Recorder
from inferry.observe.observed_call import CallDescriber

CONNECT_TIMEOUT_S = 10.0
REST_S = 0.1
MAX_IDLE_S = 4.0
"""Connections that were idle for longer are not reused: servers commonly close theirs after five seconds."""
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_OF_REQUESTS = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_HAVE_BODIES = (b"POST", b"PUT", b"PATCH")
_REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")

_ADMIN_REFUSED = (
    b"inferry observe does not pass the endpoints for operators on; send this to the server itself, or start with "
    b"--forward-admin"
)

log = logging.getLogger("inferry")


class ObserveProxy:
    """Passes requests to one upstream server."""

    def __init__(
        self, url: str, describer: CallDescriber, recorder: Recorder, clock: Clock, *, forwards_admin: bool = False
    ) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = (parts.hostname or "", parts.port or (443 if self._tls else 80))
        self._base = parts.path.rstrip("/").encode()
        self._host = parts.netloc.rpartition("@")[2].encode()
        self.name = f"{parts.scheme}://{self._host.decode()}"
        self._forwards_admin = forwards_admin
        self._is_unreachable = False
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.describer = describer
        self.recorder = recorder
        self.clock = clock
        self.later = LateRecords()

    def serve(self, request: Request, reply: Reply) -> None:
        """Pass a whole request on."""
        if request.protocol_error is not None or request.problem is not None:
            error = request.protocol_error or (413, "the body is too long")
            reply.respond(error[0], b"content-type: text/plain\r\n", error[1].encode())
            return
        if not self._forwards_admin and is_admin_target(request.target):
            reply.respond(403, b"content-type: text/plain\r\n", _ADMIN_REFUSED)
            return
        exchange = Exchange(self, request, reply)
        reply.on_disconnect = exchange.client_disconnected
        self.send(exchange)
        exchange.describe()  # while the server is at work: the request has been written

    def send(self, exchange: "Exchange") -> None:
        now = self.clock.now()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now - connection.idle_since < MAX_IDLE_S:
                connection.start(exchange)
                return
            connection.close()
        task = asyncio.get_running_loop().create_task(self._connect(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def head(self, request: Request) -> bytes:
        """The head of the upstream request."""
        parts = [request.method, b" ", self._base, request.target, b" HTTP/1.1\r\nhost: ", self._host, b"\r\n"]
        for name, value in request.headers.items():
            if name not in _OF_REQUESTS:
                parts += (name, b": ", value, b"\r\n")
        if request.body or request.method in _HAVE_BODIES:
            parts.append(b"content-length: %d\r\n" % len(request.body))
        parts.append(b"\r\n")
        return b"".join(parts)

    def freed(self, connection: "UpstreamConnection") -> None:
        self._idle.append(connection)

    async def _connect(self, exchange: "Exchange") -> None:
        host, port = self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self, self._open), host, port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            if not self._is_unreachable:  # once, and not for every call
                log.warning("the upstream server %s cannot be reached: %s", self.name, str(error) or "timeout")
            self._is_unreachable = True
            exchange.failed(f"the upstream server {self.name} cannot be reached")
        else:
            if self._is_unreachable:
                log.info("the upstream server %s can be reached again", self.name)
            self._is_unreachable = False
            if exchange.is_over:
                self._idle.append(connection)
            else:
                connection.start(exchange)

    def close(self) -> None:
        """Close the connections, and record the calls that have ended."""
        for connection in list(self._open):
            connection.close()
        self.later.close()


class Exchange:
    """One call: its response is relayed, and its row recorded at its end."""

    def __init__(self, proxy: ObserveProxy, request: Request, reply: Reply) -> None:
        self._proxy = proxy
        self.request = request
        self._reply = reply
        self._arrived_at = proxy.clock.now()
        self._is_chunked = False
        self.connection: UpstreamConnection | None = None
        self.status = 0
        self.is_over = False

    @property
    def is_repeatable(self) -> bool:
        """Whether the server may get the request twice (RFC 9110, 9.2.2): a call that runs twice is paid twice."""
        return not self.request.body and self.request.method in _REPEATABLE

    def describe(self) -> None:
        """Find the lane, which has the inter-token latency that a stream is measured against."""
        describer = self._proxy.describer
        self._lane, self._fields = describer.lane_of(self.request.headers, self.request.body)
        self._times = describer.times(self._lane)

    def on_head(self, status: int, reason: bytes, headers: list[bytes], *, has_length: bool) -> bytes:
        """The head for the client. A response of unknown length gets chunks. `headers` are parts of lines."""
        self.status = status
        self._reply.on_writable = self._resume
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason), *headers]
        has_body = status not in (204, 304) and self.request.method != b"HEAD"
        self._is_chunked = has_body and not has_length and not self.request.is_http10
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.request.keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def on_data(self, head: bytes, body: bytes, *, is_complete: bool) -> None:
        """Bytes that have arrived together, in one write."""
        now = self._proxy.clock.now()
        data = head + body
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data = head + chunk + (b"0\r\n\r\n" if is_complete else b"")
        if data:
            self._reply.relay(data)
        if body:
            self._times.arrived(body, now)
        if is_complete:
            self._end(is_aborted=False)
            self._reply.end_relay(self.status)
        elif self._reply.is_paused and self.connection is not None:
            self.connection.pause()

    def failed(self, reason: str) -> None:
        """The server cannot be reached, or was lost before the end: `reason` is for the client."""
        if self.is_over:
            return
        if self.status:
            self._end(is_aborted=True)
            self._reply.abort()
            return
        self.status = 502
        self._end(is_aborted=False)
        self._reply.respond(502, b"content-type: text/plain\r\n", reason.encode())

    def client_disconnected(self) -> None:
        if not self.is_over:
            self._end(is_aborted=True)
            if self.connection is not None:
                self.connection.close()

    def _resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    def _end(self, *, is_aborted: bool) -> None:
        self.is_over = True
        if self.request.method == b"POST" and self._fields.model:
            proxy = self._proxy
            proxy.later.put(partial(self._record, proxy.clock.now(), proxy.clock.wall(), is_aborted))

    def _record(self, ended_at: float, wall: float, is_aborted: bool) -> None:
        """Called in the thread of the records."""
        proxy, request = self._proxy, self.request
        proxy.recorder.record(
            proxy.describer.entry(
                f"observed-{uuid.uuid4().hex}",
                request.headers,
                self._lane,
                self._fields,
                self._times,
                status=self.status,
                is_aborted=is_aborted,
                arrived_at=self._arrived_at,
                ended_at=ended_at,
                wall=wall,
                body_bytes=len(request.body),
            )
        )


class LateRecords:
    """Makes the rows of ended calls in a thread of its own: hashing a prompt takes longer than passing it on.

    The thread rests for `REST_S` after every batch, so that most calls never meet it. `close` ends it. `failed` counts
    rows that could not be made.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._maker = threading.Thread(target=self._run, name="inferry-observed", daemon=True)
        self._maker.start()

    def put(self, make: Callable[[], None]) -> None:
        self._queue.put(make)

    def close(self) -> None:
        """Make all rows that are left, then end."""
        self._queue.put(None)
        self._maker.join(30.0)

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                make()
            except Exception:
                self.failed += 1
                log.exception("the metadata of a call was not recorded (%d since the start)", self.failed)
            if self._queue.empty():
                time.sleep(REST_S)


class UpstreamConnection(asyncio.Protocol):
    """One connection to the server. It carries one exchange at a time."""

    def __init__(self, proxy: ObserveProxy, connections: "set[UpstreamConnection]") -> None:
        self._proxy = proxy
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: list[bytes] = []
        self._reason = b""
        self._head = b""
        self._pieces: list[bytes] = []
        self._has_length = self._is_chunked = self._has_head = False
        self._is_complete = self._can_keep_alive = self._was_used = False
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def start(self, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange = exchange
        exchange.connection = self
        self._headers, self._reason, self._head, self._pieces = [], b"", b"", []
        self._has_length = self._is_chunked = self._has_head = self._is_complete = False
        self._transport.writelines([self._proxy.head(exchange.request), exchange.request.body])

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_usable and self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
            is_http = True
        except httptools.HttpParserError:
            is_http = False
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        is_complete = self._is_complete or (self._has_head and exchange.request.method == b"HEAD")
        head, pieces, self._head, self._pieces = self._head, self._pieces, b"", []
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if is_complete:
            self._exchange = exchange.connection = None
            if is_http and self._is_complete and self._can_keep_alive:
                self._was_used = True
                self.idle_since = self._proxy.clock.now()
                self._proxy.freed(self)
            else:
                self.close()
        if head or body or is_complete:
            exchange.on_data(head, body, is_complete=is_complete)
        if not is_http and not is_complete:
            self.close()
            exchange.failed(f"the upstream server {self._proxy.name} does not answer in HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._parser = None  # breaks a reference cycle
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.is_over:
            return
        exchange.connection = None
        if exc is None and self._has_head and not (self._has_length or self._is_chunked):
            exchange.on_data(b"", b"", is_complete=True)  # a response without a length ends with its connection
        elif self._was_used and not self._has_head and exchange.is_repeatable:
            self._proxy.send(exchange)  # most likely the server closed an idle connection, and has read nothing
        else:
            exchange.failed(f"the upstream server {self._proxy.name} closed the connection too early")

    # -- httptools' callbacks ----------------------------------------------------------------------------------------

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered not in _HOP_BY_HOP:
            self._headers += (name, b": ", value, b"\r\n")
        if lowered == b"content-length":
            self._has_length = True
        elif lowered == b"transfer-encoding":
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers, reason, self._reason = self._headers, [], self._reason, b""
        if status < 200 or self._exchange is None:
            self._has_length = self._is_chunked = False
            return
        self._has_head = True
        self._head = self._exchange.on_head(status, reason, headers, has_length=self._has_length)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._is_complete = True
            self._can_keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this call
