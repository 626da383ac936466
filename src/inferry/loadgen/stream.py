"""One attempt at a call: a streamed exchange, with the time of every event that carries tokens."""

import asyncio
import time
from array import array

from inferry.loadgen.events import EventReader, error_name
from inferry.loadgen.server import error_message
from inferry.workers.http_client import Connection, Request

_MAX_ERROR_BODY_BYTES = 8192
RETRIED_STATUSES = frozenset({408, 409, 429})
"""Statuses that the official SDKs retry, besides 5xx."""


class Counters:
    """Counters for the progress bar."""

    __slots__ = ("done", "failed", "in_flight", "sent", "tokens")

    def __init__(self) -> None:
        self.sent = self.in_flight = self.done = self.failed = self.tokens = 0


class Exchange:
    """An exchange of `http_client`. Once `finished`, `failure` is the error, if there was one."""

    __slots__ = (
        "_connection",
        "_counters",
        "_refusal",
        "_status",
        "finished",
        "lost",
        "reader",
        "retry_after_s",
        "times",
    )

    def __init__(self, counters: Counters) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reader = EventReader()
        self.times = array("d")
        self.lost: str | None = None
        self.retry_after_s: float | None = None
        self._connection: Connection | None = None
        self._counters = counters
        self._status = 0
        self._refusal = b""

    def send(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        connection.start(self, request)

    def on_head(self, status: int) -> None:
        self._status = status
        if status != 200 and self._connection is not None:
            self.retry_after_s = _seconds(self._connection.rate_limit_headers.get(b"retry-after"))

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        if self._status != 200:
            self._refusal = (self._refusal + body)[:_MAX_ERROR_BODY_BYTES]
            return
        events = self.reader.feed(body)
        if events == 1:
            self.times.append(now)
        elif events:
            self.times.extend([now] * events)
        self._counters.tokens += events

    def on_end(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def on_lost(self, cause: str) -> None:
        self.lost = cause
        self.on_end()

    @property
    def failure(self) -> str | None:
        if self._status not in (0, 200):
            return f"http {self._status} {error_name(self._refusal)}".rstrip()
        if self._status == 0:
            return "reset" if self.lost is not None else None
        if self.lost is not None and self.reader.error is None:
            return "lost mid-stream"
        return self.reader.failure

    @property
    def detail(self) -> str:
        """The server's message, one line."""
        return error_message(self._refusal) if self._refusal else self.lost or self.reader.message

    @property
    def is_refusal(self) -> bool:
        """Whether the server's answer permits a retry."""
        return self._status in RETRIED_STATUSES or self._status >= 500

    @property
    def is_reset(self) -> bool:
        """The connection broke before the first byte."""
        return self._status == 0 and self.lost is not None


def _seconds(header: bytes | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None  # a date
