"""What the connections of one server have in common."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from inferry.ingress.http.reply import Reply, Request
from inferry.ingress.http.request_head import RequestHeadParser

if TYPE_CHECKING:
    from inferry.ingress.http.connection import Connection


class Server:
    """What all connections of a server share: whom to hand requests to, the limits, and who is connected.

    `accepts_body` is asked when a head has come and a body is to follow, with the request and the address it comes
    from: False where that body is not worth keeping. It may set the request's `caller`, or its `problem`.
    """

    def __init__(
        self,
        serve: Callable[[Request, Reply], None],
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        idle_timeout_s: float,
        accepts_body: Callable[[Request, str], bool] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.serve = serve
        self.accepts_body = accepts_body
        self.head_parser = RequestHeadParser()
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.connections: set[Connection] = set()
        self.held: set[Connection] = set()  # from whom nothing is read now
        self.active_replies = 0
        self._loop = loop or asyncio.get_running_loop()
        self._activity = asyncio.Event()
        self._is_closing = False
        # One timer for all connections: moving one for every request of each would cost more than the look-around.
        self._sweep_interval_s = min(1.0, body_timeout_s / 4, idle_timeout_s / 4)
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)

    def notify(self) -> None:
        """An answer is complete or a connection has ended."""
        self._activity.set()

    async def wait_until_idle(self) -> None:
        """Until every request has been answered, or its client has gone."""
        while self.active_replies:
            self._activity.clear()
            await self._activity.wait()

    async def close(self) -> None:
        """Close every connection as soon as what was written to it has left; return when all have ended."""
        self._is_closing = True
        for connection in list(self.connections):
            connection.close_when_answered()
        while self.connections:
            self._activity.clear()
            await self._activity.wait()

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
        for connection in [one for one in self.connections if one.timeout_at <= now]:
            connection.expire()
        for connection in list(self.held):
            connection.check_peer()
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)
