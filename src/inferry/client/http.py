"""A small HTTP/1.1 client on asyncio. Connections are reused; a cancelled exchange closes its connection.

Everything belongs to one event loop. A connection carries one exchange at a time.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httptools

from inferry.client.errors import ConnectionFailed

MAX_IDLE_S = 4.0
"""Connections that were idle for longer are not reused: servers commonly close theirs after five seconds."""
_READ_BYTES = 65_536


class HttpClient:
    """Connections to one server. `timeout_s` is the longest wait for the next bytes of a response."""

    def __init__(self, url: str, *, timeout_s: float, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the URL must be http://HOST[:PORT] or https://HOST[:PORT]")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self.timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> "Response":
        """The response, once its head has arrived. It must be read to its end or closed. Raises ConnectionFailed."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"host: {self._netloc}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header contains a line break")
        request = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
        connection = self._free() or await self._connect()
        response = Response(self, connection)
        try:
            connection.writer.write(request)
            await connection.writer.drain()
            await response.read_head()
        except OSError as error:
            response.close()
            raise ConnectionFailed(f"the connection was lost: {error}") from error
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def release(self, connection: "_Connection") -> None:
        """Keep the connection for the next exchange. For responses only."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _free(self) -> "_Connection | None":
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()  # the one used last is the least likely to be closed
            if connection.is_usable and now - connection.idle_since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise ConnectionFailed(f"no connection to {self._netloc} in {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionFailed(f"no connection to {self._netloc}: {error}") from error
        return _Connection(reader, writer)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        return not self.reader.at_eof() and not self.writer.transport.is_closing()

    def close(self) -> None:
        self.writer.transport.abort()


class Response:
    """One response. `headers` have names in small letters."""

    def __init__(self, client: HttpClient, connection: _Connection) -> None:
        self._client = client
        self._connection: _Connection | None = connection
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = False
        self._is_complete = False
        self._can_keep_alive = False
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def read_head(self) -> None:
        while not self._has_head:
            await self._receive()

    async def read(self) -> bytes:
        """The whole body."""
        found = []
        while data := await self.read_some():
            found.append(data)
        return b"".join(found)

    async def read_some(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises ConnectionFailed where the body is cut."""
        while not self._pieces and not self._is_complete:
            await self._receive()
        data = b"".join(self._pieces)
        self._pieces.clear()
        if not data:
            self._end()
        return data

    def close(self) -> None:
        """Close the connection, unless the response is complete. The gateway then cancels the call."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._can_keep_alive:
            self._client.release(connection)
        else:
            connection.close()

    async def _receive(self) -> None:
        if self._connection is None:
            raise ConnectionFailed("the response was closed")
        try:
            async with asyncio.timeout(self._client.timeout_s):
                data = await self._connection.reader.read(_READ_BYTES)
        except TimeoutError:
            raise self._lost(f"no bytes arrived for {self._client.timeout_s:g} s") from None
        except OSError as error:
            raise self._lost(f"the connection was lost: {error}") from error
        if not data:
            raise self._lost("the connection ended before the answer was complete")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise self._lost(f"the answer is not HTTP: {error}") from error

    def _lost(self, cause: str) -> ConnectionFailed:
        self.close()
        return ConnectionFailed(cause, request_id=self.headers.get("x-request-id"))

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
        self._can_keep_alive = self._parser.should_keep_alive()
        if not self._has_head:  # an interim response, as 100 Continue
            self.headers.clear()
