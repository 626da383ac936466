"""Sends callbacks: one POST on a connection of its own, to an address that was checked.

The host is resolved once per attempt, and the connection is made to one of the addresses that were checked, so that a
name whose address changes in between (DNS rebinding) gains nothing. Redirects are not followed. Only the head of the
response is read, within a limit. Belongs to one event loop.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

from inferry.durable.callback_policy import (
    Address,
    CallbackForbidden,
    CallbackPolicy,
    CallbackTarget,
    check_addresses,
    parse_target,
)

MAX_HEAD_BYTES = 16 * 1024
MAX_ADDRESSES = 4
"""Addresses of a host that are tried. Each has an equal share of the time."""
MAX_INTERIM_RESPONSES = 4
RESOLVER_THREADS = 4

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])[ \r]")

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) → its addresses. Raises OSError."""


class CallbackFailed(Exception):
    """No response. `code` says why: `forbidden`, `dns`, `connect`, `tls`, `timeout` or `response`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class SystemResolver:
    """The resolver of the operating system. It blocks, so it has threads of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(RESOLVER_THREADS, "inferry-resolver")

    async def __call__(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._resolve, host, port)
        return list(dict.fromkeys(found))

    def _resolve(self, host: str, port: int) -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class CallbackClient:
    def __init__(self, policy: CallbackPolicy, resolve: Resolve, tls: ssl.SSLContext) -> None:
        self._policy = policy
        self._resolve = resolve
        self._tls = tls

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """The status of the response. Raises CallbackFailed."""
        try:
            target = parse_target(url, self._policy)
            async with asyncio.timeout(self._policy.timeout_s):
                addresses = await self._addresses(target)
                reader, writer = await self._connect(target, addresses)
                try:
                    writer.write(_request(target, headers, body))
                    return await _read_status(reader)
                finally:
                    writer.transport.abort()
        except CallbackForbidden:
            raise CallbackFailed("forbidden") from None
        except TimeoutError:
            raise CallbackFailed("timeout") from None
        except ssl.SSLError:
            raise CallbackFailed("tls") from None
        except OSError:
            raise CallbackFailed("connect") from None

    async def _addresses(self, target: CallbackTarget) -> list[Address]:
        try:
            found = [ip_address(text) for text in await self._resolve(target.host, target.port)]
        except (socket.gaierror, UnicodeError):
            raise CallbackFailed("dns") from None
        if not found:
            raise CallbackFailed("dns")
        # All of them: a host with one forbidden address could be chosen until that one is used.
        check_addresses(found, self._policy)
        return found[:MAX_ADDRESSES]

    async def _connect(
        self, target: CallbackTarget, addresses: list[Address]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        failure: OSError = ConnectionError()
        for address in addresses:
            try:
                async with asyncio.timeout(self._policy.timeout_s / len(addresses)):
                    return await asyncio.open_connection(
                        str(address),
                        target.port,
                        ssl=self._tls if target.is_https else None,
                        server_hostname=target.host if target.is_https else None,
                        limit=MAX_HEAD_BYTES,
                    )
            except OSError as error:  # TimeoutError included
                failure = error
        raise failure


def _request(target: CallbackTarget, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = {
        "host": target.host_header,
        "user-agent": "inferry",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **headers,
    }
    head = f"POST {target.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("ascii") + b"\r\n" + body


async def _read_status(reader: asyncio.StreamReader) -> int:
    try:
        for _ in range(1 + MAX_INTERIM_RESPONSES):
            head = await reader.readuntil(b"\r\n\r\n")
            found = _STATUS.match(head)
            if found is None:
                break
            if (status := int(found[1])) >= 200:
                return status
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    raise CallbackFailed("response")
