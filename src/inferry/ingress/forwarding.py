"""Requests that the owner of the workers answers: an ingress process hands it all but inference calls.

A forwarded request has a connection of its own to the owner's HTTP server, so that no endpoint needs anything for it.
Its body is sent on as it arrives, and the owner's response is relayed as bytes. Either side is slowed down by the
other. A client that disconnects ends its request at the owner.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidApiKey, ModelNotFound, NoWorker
from inferry.ingress.app import App
from inferry.ingress.http.body_sink import BodySink
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_head import CHUNKED
from inferry.ingress.responses.endpoint import RESPONSES
from inferry.ingress.wire_format import ClientRequest
from inferry.observe.request_counts import RequestCounts

MAX_PENDING_BYTES: Final = 1024 * 1024
"""Bytes of a body that wait for the connection to the owner."""
MAX_HEAD_BYTES: Final = 65_536
"""A longer response head is an error of the owner."""
RETRY_AFTER_S: Final = 1.0
_OWN_HEADERS = frozenset({b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding"})
"""Headers that belong to a connection and not to its request."""
_CLOSE: Final = b"connection: close\r\n"

OpenHttp = Callable[[str, Callable[[], asyncio.Protocol]], Awaitable[asyncio.Transport]]
"""Opens a connection to the owner's HTTP server for a client at an address."""


class OwnerForwarding(App):
    """What apps share that forward requests to the owner of the workers."""

    _open_http: OpenHttp | None = None

    def use_owner(self, open_http: OpenHttp | None) -> None:
        """Forward requests through this from now on; None: this process is the owner, and answers everything."""
        self._open_http = open_http

    def start(self, work: Any) -> None:
        """Run a coroutine; the app holds its task."""
        self._start_task(work)

    async def open_http(self, peer: str, make_protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A connection to the owner's HTTP server. Raises OSError."""
        if self._open_http is None:
            raise ConnectionError("there is no other owner")
        return await self._open_http(peer, make_protocol)

    def refuse(self, error: GatewayError, request: Request, reply: Reply) -> None:
        self._refuse(error, request, reply)

    def _forward(self, request: Request, reply: Reply) -> None:
        """Have the owner answer a request whose body was read."""
        forwarded = ForwardedRequest(self, request, reply.peer)
        forwarded.start()
        if request.body:
            forwarded.feed(request.body)
        forwarded.end()
        forwarded.respond(reply)


class ForwardingApp(OwnerForwarding):
    """Answers inference calls itself and forwards everything else, while another process is the owner."""

    _counts: "LocalRequests | None" = None
    stored_posts: frozenset[bytes] = frozenset({RESPONSES})
    """Inference calls that the owner answers, since they need stored content."""

    def use_owner(self, open_http: OpenHttp | None) -> None:
        OwnerForwarding.use_owner(self, open_http)
        self._local = frozenset(self._posts) - self.stored_posts

    def report_requests(self) -> None:
        """Count requests for the owner, and none that it answers itself."""
        self._counts = LocalRequests(self._local)

    def count_requests(self) -> RequestCounts:
        return super().count_requests() if self._counts is None else self._counts

    def take_counts(self) -> list[tuple[str, int, int]]:
        """Path, status and number of the local requests since the last call."""
        return [] if self._counts is None else self._counts.take()

    def accepts_body(self, request: Request, peer: str) -> bool:
        if self._open_http is None:
            return App.accepts_body(self, request, peer)
        if request.target in self._local and request.method == b"POST":
            try:
                request.caller = self._auth.caller(request.headers, peer)
                return True
            except InvalidApiKey as error:
                error.__traceback__ = None  # its frames refer to the request
            except GatewayError as error:
                error.__traceback__ = None
                request.problem = error
                return False
        # Also a key that is not known here: it may have been created a moment ago.
        forwarded = ForwardedRequest(self, request, peer)
        request.sink = forwarded
        forwarded.start()
        return True

    def serve(self, request: Request, reply: Reply) -> None:
        sink = request.sink
        if isinstance(sink, ForwardedRequest):
            sink.respond(reply)
        elif (
            self._open_http is None
            or (request.target in self._local and request.method == b"POST")
            or request.target == b"/health"
            or request.problem is not None
            or request.is_internal
        ):
            App.serve(self, request, reply)
        else:
            self._forward(request, reply)

    def _compose(
        self, error: GatewayError, decoded: ClientRequest | None, request: Request, reply: Reply, caller: Caller
    ) -> bool:
        """The owner answers calls of composed models: it writes their rows to the ledger. It also knows those that were
        applied since this process has read the configuration."""
        composed = self._composed
        if self._open_http is None or composed is None or request.is_internal:
            return App._compose(self, error, decoded, request, reply, caller)
        if not isinstance(error, ModelNotFound) and composed.name_of(error, request) is None:
            return False
        self._forward(request, reply)
        return True


class LocalRequests(RequestCounts):
    """Requests that this process has answered itself, by path and class of status; the owner counts the others."""

    def __init__(self, paths: frozenset[bytes]) -> None:
        super().__init__({})
        self._paths = paths
        self._found: dict[tuple[bytes, int], int] = {}

    def count(self, target: bytes, status: int) -> None:
        if target in self._paths:
            key = target, 200 if status < 400 else 400 if status < 500 else 500
            self._found[key] = self._found.get(key, 0) + 1

    def take(self) -> list[tuple[str, int, int]]:
        found, self._found = self._found, {}
        return [(path.decode(), status, number) for (path, status), number in found.items()]


class ForwardedRequest(BodySink):
    """One request on its way to the owner, and the response on its way back."""

    def __init__(self, app: OwnerForwarding, request: Request, peer: str) -> None:
        super().__init__(1 << 62)  # the owner enforces the limits
        self._app = app
        self._request = request
        self._peer = peer
        self._is_chunked = request.length == CHUNKED
        self._pending: list[bytes] = [_request_head(request)]
        self._pending_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._is_aborted = False
        self._response = RelayedResponse(request)
        self._unsent: list[bytes] = []
        self._is_over = False

    def start(self) -> None:
        self._app.start(self._open())

    async def _open(self) -> None:
        try:
            transport = await self._app.open_http(self._peer, lambda: OwnerResponse(self))
        except (OSError, TimeoutError):
            self.lost()
            return
        if self._is_aborted:
            transport.abort()

    def connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        pending, self._pending = self._pending, []
        transport.write(b"".join(pending))
        self._set_full(False)

    # -- the body ----------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> None:
        if self._is_chunked:
            self._send(b"0\r\n\r\n")

    def abort(self) -> None:
        """The rest of the body will not come. A response that the owner has sent before is relayed nevertheless."""
        if self._response.size == 0:
            self._is_aborted = True
            if self._transport is not None:
                self._transport.abort()

    def set_writable(self, is_writable: bool) -> None:
        """Whether the owner reads as fast as the client sends."""
        self._set_full(not is_writable)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        self.is_full = self._pending_bytes > MAX_PENDING_BYTES

    def _set_full(self, is_full: bool) -> None:
        was_full, self.is_full = self.is_full, is_full
        if was_full and not is_full and self.on_change is not None:
            self.on_change()

    # -- the response ------------------------------------------------------------------------------------------------

    def respond(self, reply: Reply) -> None:
        """The client waits for the response."""
        if self._is_aborted and self._request.problem is not None:
            self._app.refuse(self._request.problem, self._request, reply)
            return
        self._reply = reply
        reply.on_disconnect = self._disconnect
        reply.on_writable = self._resume
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            reply.relay(data)
        if self._is_over:
            self._finish(reply)
        elif unsent:
            self._resume()

    def received(self, data: bytes) -> None:
        """Bytes of the owner's response."""
        data = self._response.feed(data)
        reply = self._reply
        if reply is None:
            # The owner has answered before the end of the body: the rest of it is not read.
            if data:
                self._unsent.append(data)
            if self.problem is None:
                self.problem = InvalidApiKey("the owner has refused the request")
                if self.on_change is not None:
                    self.on_change()
        elif data:
            reply.relay(data)
            if reply.is_paused and self._transport is not None:
                self._transport.pause_reading()

    def lost(self) -> None:
        """The connection to the owner has ended: the response is complete, or never will be."""
        if self._is_over:
            return
        self._is_over = True
        if self._reply is not None:
            self._finish(self._reply)

    def _finish(self, reply: Reply) -> None:
        reply.on_disconnect = reply.on_writable = None
        response = self._response
        if response.is_complete:
            reply.end_relay(response.status)
        elif response.size:
            reply.abort()
        else:
            error = NoWorker("the process that owns the workers is away", retry_after_s=RETRY_AFTER_S)
            self._app.refuse(error, self._request, reply)

    def _disconnect(self) -> None:
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class OwnerResponse(asyncio.Protocol):
    """The connection to the owner's HTTP server."""

    def __init__(self, forwarded: ForwardedRequest) -> None:
        self._forwarded = forwarded

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._forwarded.connected(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._forwarded.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forwarded.lost()

    def pause_writing(self) -> None:
        self._forwarded.set_writable(False)

    def resume_writing(self) -> None:
        self._forwarded.set_writable(True)


class RelayedResponse:
    """Follows a response that is relayed, to know its status and whether it is complete.

    The owner closes its connection after each response. The client's stays open where the response tells its length.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head = b""
        self._body_bytes: int | None = None
        self._is_chunked = False
        self._tail = b""
        self._received = 0
        self.status = 0
        self.size = 0

    def feed(self, data: bytes) -> bytes:
        """Bytes of the response; returns what to relay."""
        self.size += len(data)
        if self.status:
            self._follow(data)
            return data
        head, mark, rest = (self._head + data).partition(b"\r\n\r\n")
        if not mark:
            self._head = head
            if len(head) > MAX_HEAD_BYTES:
                raise ValueError("the owner's response head is too long")
            return b""
        self._read_head(head.lower())
        self._follow(rest)
        lines = head + b"\r\n"
        if not self._request.is_http10 and self._request.keeps_alive:
            lines = lines.replace(_CLOSE, b"")
        return lines + b"\r\n" + rest

    @property
    def is_complete(self) -> bool:
        if not self.status:
            return False
        if self._is_chunked:
            return self._tail == b"0\r\n\r\n"
        return self._body_bytes is None or self._received == self._body_bytes

    def _read_head(self, head: bytes) -> None:
        self.status = int(head[9:12])
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self._body_bytes = 0 if self._request.method == b"HEAD" else int(value)
            elif name == b"transfer-encoding":
                self._is_chunked = True

    def _follow(self, data: bytes) -> None:
        self._received += len(data)
        if self._is_chunked:
            self._tail = (self._tail + data[-5:])[-5:]


def _request_head(request: Request) -> bytes:
    """The head of the request on a connection that ends after it."""
    version = b"1.0" if request.is_http10 else b"1.1"
    lines = [b"%b %b HTTP/%b\r\n" % (request.method, request.target, version)]
    lines += [b"%b: %b\r\n" % (name, value) for name, value in request.headers.items() if name not in _OWN_HEADERS]
    if request.length == CHUNKED:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif request.length:
        lines.append(b"content-length: %d\r\n" % request.length)
    return b"".join(lines) + b"connection: close\r\n\r\n"
