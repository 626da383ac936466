"""Sends the dashboard's snapshots to its viewers, as server-sent events.

One timer serves all viewers: each second the snapshot is encoded once and the same bytes are written to every viewer. A
viewer that reads too slowly misses events. The timer stops with the last viewer. The event loop owns it.
"""

import asyncio
from collections.abc import Callable

from inferry.domain.errors import Draining, RateLimited
from inferry.ingress.dashboard.data import DashboardData
from inferry.ingress.dashboard.sessions import Session
from inferry.ingress.http.reply import Reply

INTERVAL_S = 1.0
MAX_VIEWERS = 100
_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\nx-accel-buffering: no\r\n"
_COMMENT = b": waiting\n\n"


class OverviewFeed:
    """The open streams of viewers."""

    def __init__(
        self, data: DashboardData, is_current: Callable[[Session], bool], is_draining: Callable[[], bool]
    ) -> None:
        self._data = data
        self._is_current = is_current
        self._is_draining = is_draining
        self._viewers: dict[Reply, Session | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sent_version = 0

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def add(self, reply: Reply, session: Session | None) -> None:
        """Send snapshots from now on, until the client disconnects or its session ends.

        A client that does not ask for an event stream gets one snapshot. Raises RateLimited or Draining.
        """
        if self._is_draining():
            raise Draining("the gateway is shutting down", retry_after_s=INTERVAL_S)
        if len(self._viewers) >= MAX_VIEWERS:
            raise RateLimited(f"the dashboard has {MAX_VIEWERS} viewers", retry_after_s=10.0)
        reply.begin(_HEADERS)
        first = _event(b"series", self._data.series()) + _event(b"live", self._data.live())
        if b"text/event-stream" not in reply.request.headers.get(b"accept", b""):
            reply.end(first)
            return
        reply.heartbeat = _COMMENT
        reply.on_disconnect = lambda: self._remove(reply)
        self._viewers[reply] = session
        reply.write(first)
        if self._timer is None:
            self._sent_version = self._data.points.version
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def close(self) -> None:
        """End all streams."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end(list(self._viewers))

    def _tick(self) -> None:
        self._timer = None
        gone = [reply for reply, session in self._viewers.items() if session and not self._is_current(session)]
        self._end(list(self._viewers) if self._is_draining() else gone)
        if not self._viewers:
            return
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)
        events = _event(b"live", self._data.live())
        if self._data.points.version != self._sent_version:
            self._sent_version = self._data.points.version
            events = _event(b"series", self._data.series()) + events
        for reply in list(self._viewers):
            if not reply.is_paused:
                reply.write(events)

    def _end(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._remove(reply)
            reply.end(b"event: end\ndata: {}\n\n")

    def _remove(self, reply: Reply) -> None:
        self._viewers.pop(reply, None)


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)
