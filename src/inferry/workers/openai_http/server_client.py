"""Small requests to a server with non-streaming responses."""

import asyncio
from typing import Final

from inferry.domain.errors import WorkerLost
from inferry.workers.http_client import Client

MAX_RESPONSE_BYTES: Final = 16 * 1024 * 1024


class ServerClient:
    """Sends requests over the connections of one client."""

    def __init__(self, http: Client, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._http = http
        self._max_bytes = max_bytes

    async def get(self, path: bytes, headers: bytes, timeout_s: float) -> tuple[int, bytes]:
        return await self._request(b"GET", path, headers, b"", timeout_s)

    async def post(self, path: bytes, headers: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return await self._request(b"POST", path, headers, body, timeout_s)

    async def post_once(self, path: bytes, headers: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Like `post` on a new connection: the request is never repeated, so it arrives at most once."""
        return await self._request(b"POST", path, headers, body, timeout_s, reuses=False)

    async def _request(
        self, method: bytes, path: bytes, headers: bytes, body: bytes, timeout_s: float, *, reuses: bool = True
    ) -> tuple[int, bytes]:
        """Status and body. Raises WorkerLost."""
        request = self._http.request(method, path, headers, body)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = (self._http.free() if reuses else None) or await self._http.connect()
                    response = _ResponseCollector(self._max_bytes)
                    try:
                        connection.start(response, request)
                        return await response.complete
                    except ConnectionError:
                        if not connection.was_used or response.has_started:
                            raise
                        # The server had closed an idle connection: it has not seen the request.
                    except BaseException:
                        connection.close()
                        raise
        except (OSError, TimeoutError) as error:
            raise WorkerLost(f"the server cannot be reached: {type(error).__name__}") from None


class _ResponseCollector:
    """Collects a response to its end, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.complete: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self.has_started = False
        self._status = 0
        self._size = 0
        self._parts: list[bytes] = []

    def on_head(self, status: int) -> None:
        self._status = status
        self.has_started = True

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size <= self._max_bytes:
            self._parts.append(body)
        else:
            self.on_lost("the response is too large")

    def on_end(self) -> None:
        if not self.complete.done():
            self.complete.set_result((self._status, b"".join(self._parts)))

    def on_lost(self, cause: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(ConnectionError(cause))
