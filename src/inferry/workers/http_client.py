"""A small HTTP/1.1 client for streams: httptools parses, callbacks deliver, without tasks or queues.

Everything belongs to one event loop. A connection carries one exchange at a time. The exchange gets `on_head`,
`on_body` once per read, and then exactly one of `on_end` and `on_lost`.
"""

import asyncio
import ssl
import time
from collections import deque
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

MAX_IDLE_S = 4.0
"""Connections that were idle for longer are not reused: servers commonly close theirs after five seconds."""
DISCARD_TIMEOUT_S: Final = 1.0
"""How long the rest of a discarded response may take before its connection is closed."""
ZERO_COPY_MIN_BYTES: Final = 16_384
"""Longer bodies are written separately instead of being copied behind their head."""


Request = tuple[bytes | memoryview, ...]


class Exchange(Protocol):
    """Receives one response."""

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, cause: str) -> None:
        """The connection was lost, or the response was not HTTP."""


class _Discard:
    """Reads and discards the rest of a response."""

    def on_head(self, status: int) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, cause: str) -> None: ...


_discard: Final = _Discard()


class Client:
    """Connections to one server."""

    def __init__(self, url: str, headers: dict[str, str], connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").encode()
        lines = {"host": parts.netloc.rpartition("@")[2], **headers}
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()

    def free(self) -> "Connection | None":
        """An idle connection, or None."""
        if not self._idle:
            return None
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()  # the one used last is the least likely to be closed
            if connection.is_usable and now - connection.idle_since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def connect(self) -> "Connection":
        """A new connection. Raises OSError or TimeoutError."""
        async with asyncio.timeout(self._connect_timeout_s):
            _, protocol = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), self._host, self._port, ssl=self._tls
            )
        return protocol

    def request(self, method: bytes, path: bytes, headers: bytes, *body: bytes | memoryview) -> Request:
        """A request as parts to write. `headers` are complete lines."""
        length = 0
        for part in body:
            length += len(part)
        head = b"%b %b%b HTTP/1.1\r\ncontent-length: %d\r\n%b%b\r\n" % (
            method,
            self._base,
            path,
            length,
            headers,
            self._fixed,
        )
        return (head, *body) if length > ZERO_COPY_MIN_BYTES else (b"".join((head, *body)),)

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    # For connections only.

    def opened(self, connection: "Connection") -> None:
        self._open.add(connection)

    def closed(self, connection: "Connection") -> None:
        self._open.discard(connection)

    def freed(self, connection: "Connection") -> None:
        self._idle.append(connection)


class Connection(asyncio.Protocol):
    """One connection. `start` begins an exchange; `close` also abandons it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._body: list[bytes] = []
        self._has_framing = False
        self._has_head = False
        self._can_keep_alive = False
        self._discard_timer: asyncio.TimerHandle | None = None
        self.rate_limit_headers: dict[bytes, bytes] = {}  # rate limit and retry headers of the response
        self.is_complete = False  # the whole response has arrived
        self.idle_since = 0.0
        self.was_used = False

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def start(self, exchange: Exchange, request: Request) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._has_framing = self._has_head = self.is_complete = False
        if self.rate_limit_headers:
            self.rate_limit_headers = {}
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)

    def transfer(self, exchange: Exchange) -> None:
        """Deliver the rest of the response to another exchange."""
        self._exchange = exchange

    def discard_rest(self) -> None:
        """Detach the exchange. The connection is reused if the response ends within the limit."""
        self._exchange = _discard
        self._discard_timer = asyncio.get_running_loop().call_later(DISCARD_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Close the connection without a callback to the exchange."""
        self._exchange = None
        self._cancel_discard_timer()
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, so this cannot be checked.
        self._transport = cast(asyncio.Transport, transport)
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        is_http = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            is_http = self._can_keep_alive = False  # what was parsed before the error counts
        exchange = self._exchange
        if exchange is None:
            self.close()  # data without a request
            return
        if self._body:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            exchange.on_body(body)
        if self.is_complete and self._exchange is not None:
            self._finish(self._exchange)
        elif not is_http:
            self._lose("invalid HTTP response")

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.closed(self)
        self._cancel_discard_timer()
        self._parser = None  # breaks a reference cycle
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and self._has_head and not self._has_framing:
            exchange.on_end()  # a response without a length ends with its connection
        else:
            exchange.on_lost(type(exc).__name__ if exc is not None else "closed by the server")

    # -- httptools' callbacks ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_framing = True
        elif name.startswith((b"x-ratelimit-", b"retry-after")):
            self.rate_limit_headers[name] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.is_complete:
            self._can_keep_alive = False  # a second response behind the first
        elif status >= 200 and self._exchange is not None:
            self._has_head = True
            self._exchange.on_head(status)

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if not self.is_complete and self._parser.get_status_code() >= 200:
            self.is_complete = True
            self._can_keep_alive = self._parser.should_keep_alive()

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = None
        self._cancel_discard_timer()
        if self._can_keep_alive and self.is_usable:
            self.was_used = True
            self.idle_since = time.monotonic()
            self._client.freed(self)
        else:
            self.close()
        exchange.on_end()

    def _cancel_discard_timer(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _lose(self, cause: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.close()
        if exchange is not None:
            exchange.on_lost(cause)
