"""Where `inferry run-batch` has its requests executed: by a gateway over HTTP, or by workers in this process."""

import asyncio
import contextlib
import http.client
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from inferry.cli.config.schema import Config
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.durable.execute import CallAnswer, Execute, StoredCall

CALL_TIMEOUT_S = 3600.0
CHECK_TIMEOUT_S = 10.0
RECONNECT_S = 1.0
READY_TIMEOUT_S = 600.0


class TargetError(Exception):
    """The gateway or the engine cannot be used. The message is for the user."""


class HttpTarget:
    """A gateway. One connection per thread, kept open."""

    def __init__(self, url: str, key: str | None, concurrency: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError("--url must be of the form http://HOST:PORT")
        self._url = url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        self._is_closed = False
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._pool = ThreadPoolExecutor(concurrency, "run-batch")

    def check(self) -> None:
        """Raises TargetError where the gateway does not answer, or refuses the key."""
        connection = self._kind(self._host, self._port, timeout=CHECK_TIMEOUT_S)
        try:
            connection.request("GET", f"{self._prefix}/v1/models", headers=self._headers({}))
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise TargetError(f"cannot reach {self._url}: {error}") from None
        finally:
            connection.close()
        if status != 200:
            raise TargetError(f"{self._url} answered {status}: set OPENAI_API_KEY to a valid key")

    def paths(self) -> frozenset[str]:
        return frozenset()

    async def call(self, call: StoredCall) -> CallAnswer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, call)

    def close(self) -> None:
        """End the calls in flight."""
        self._is_closed = True
        for connection in list(self._connections):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def _call(self, call: StoredCall) -> CallAnswer:
        given = {"x-inferry-lane": call.lane, "x-inferry-run-id": call.run_id, "x-inferry-step-id": call.step_id}
        named = {name: value for name, value in given.items() if value is not None}
        for is_fresh in (False, True):
            if self._is_closed:
                break
            connection = None if is_fresh else getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._kind(self._host, self._port, timeout=CALL_TIMEOUT_S)
                self._connections.add(connection)
            try:
                connection.request("POST", self._prefix + call.path, call.body, self._headers(named))
                response = connection.getresponse()
                return _answer(response, response.read())
            except (OSError, http.client.HTTPException):
                # A kept connection may have been closed meanwhile; a gateway that is away may come back.
                connection.close()
                self._connections.discard(connection)
                self._local.connection = None
        return CallAnswer(status=503, body=b"", retry_after_s=RECONNECT_S)

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        key = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return {"content-type": "application/json", **key, **more}


def _answer(response: http.client.HTTPResponse, body: bytes) -> CallAnswer:
    after = response.headers.get("retry-after-ms") or ""
    seconds = int(after) / 1000 if after.isdigit() else None
    if seconds is None and (after := response.headers.get("retry-after") or "").isdigit():
        seconds = float(after)
    return CallAnswer(
        status=response.status,
        body=body,
        code=response.headers.get("x-inferry-drop-reason"),
        request_id=response.headers.get("x-request-id"),
        retry_after_s=seconds,
    )


@asynccontextmanager
async def local_target(config: Config) -> AsyncIterator[Execute]:
    """The workers of a configuration, without a server and without a ledger that outlives the process."""
    from inferry.cli import wiring
    from inferry.ingress.stored_calls import StoredCalls

    service = wiring.build(msgspec.structs.replace(config, ledger=IN_MEMORY))
    try:
        service.start()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not service.gateway.is_ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TargetError(f"no worker was ready within {READY_TIMEOUT_S:g} s") from None
        yield StoredCalls(service.app.serve, service.app.inference_paths, service.tenants)
    finally:
        await service.close()
