"""State that the connections of one server share."""

import asyncio
import math
from collections.abc import Callable

from inferry.ingress.http.descriptors import DescriptorMonitor
from inferry.ingress.http.reply import Reply, ReplyChannel
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_head import RequestHeadParser
from inferry.observe.request_counts import RequestCounts


class ServedConnection(ReplyChannel):
    """What the server needs of a connection. The server calls `expire` once `timeout_at` has passed."""

    __slots__ = ("timeout_at",)

    def __init__(self) -> None:
        super().__init__()
        self.timeout_at = math.inf

    def close_when_answered(self) -> None:
        """Close the connection now if no response is under way, else after that response."""
        raise NotImplementedError

    def expect_last_request(self) -> None:
        """The server retires: bound the time until the next request, if no response is under way."""
        raise NotImplementedError

    def expire(self) -> None:
        """Handle a client that did not continue in time."""
        raise NotImplementedError

    def check_peer(self) -> None:
        """Check on the socket whether the client has disconnected, because nothing is read from it now."""
        raise NotImplementedError


class Server:
    """Request handler, limits, and the set of open connections.

    `accepts_body(request, peer)` is called when a head has arrived and a body follows. It returns False where the body
    is not to be kept, and may set the request's `caller` or `problem`.
    """

    def __init__(
        self,
        serve: Callable[[Request, Reply], None],
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        idle_timeout_s: float,
        accepts_body: Callable[[Request, str], bool] | None = None,
        requests: RequestCounts | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.serve = serve
        self.accepts_body = accepts_body
        self.requests = requests or RequestCounts({})
        self.head_parser = RequestHeadParser()
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.connections: set[ServedConnection] = set()
        self.held: set[ServedConnection] = set()  # reading is paused
        self.active_replies = 0
        self._loop = loop or asyncio.get_running_loop()
        self._activity = asyncio.Event()
        self._is_closing = False
        self.is_retiring = False
        self._descriptors = DescriptorMonitor()
        # One timer for all connections: rescheduling one per request would cost more than the sweep.
        self._sweep_interval_s = min(1.0, body_timeout_s / 4, idle_timeout_s / 4)
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)

    def notify(self) -> None:
        """Wake the waiters: a response is complete or a connection has ended."""
        self._activity.set()

    async def wait_until_idle(self) -> None:
        """Wait until every request was answered or its client has disconnected."""
        while self.active_replies:
            self._activity.clear()
            await self._activity.wait()

    async def retire(self, grace_s: float) -> None:
        """Serve the open connections to their end: every response closes its connection from now on, and says so.

        A connection whose last response did not say so stays open for `grace_s` seconds, for a request that may be on
        its way. Returns when all connections have ended.
        """
        self._is_closing = self.is_retiring = True
        self.idle_timeout_s = grace_s
        self._sweeper.cancel()
        self._sweep_interval_s = min(self._sweep_interval_s, grace_s / 2)
        for connection in list(self.connections):
            connection.expect_last_request()
        self._sweep()
        await self._wait_until_closed()

    async def close(self) -> None:
        """Close every connection once its written data was sent; return when all have ended."""
        self._is_closing, self.is_retiring = True, False
        for connection in list(self.connections):
            connection.close_when_answered()
        await self._wait_until_closed()

    async def _wait_until_closed(self) -> None:
        while self.connections:
            self._activity.clear()
            await self._activity.wait()

    def abort(self) -> None:
        """Reset the remaining connections."""
        self._sweeper.cancel()
        for connection in list(self.connections):
            connection.abort()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in [one for one in self.connections if one.timeout_at <= now]:
            connection.expire()
        for connection in list(self.held):
            connection.check_peer()
        self._descriptors.check(now)
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)
