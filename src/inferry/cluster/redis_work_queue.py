"""The work queue in Redis Streams. Belongs to one event loop. Scripts use several keys, which Redis Cluster refuses."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from inferry.cluster.kept_cancellation import kept_cancellation
from inferry.cluster.work_scripts import ADD, CLAIM, DONE, PUT_BACK, RENEW, TAKE
from inferry.domain.work_queue import MAX_DELIVERIES, NewWork, QueueEntry, QueueUnavailable, Renewal, Wanted, quoted

PREFIX = "inferry:work:"
TIMEOUT_S = 2.0
"""Longest wait for a connection and for an answer."""
MAX_CONNECTIONS = 8
WORKER_TTL_S = 10
"""A pull-worker that has not renewed for longer does not count as alive."""
_CHUNK = 500
"""Ids of one script: Redis serves no other client while it runs."""

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.decode


class OutageLog:
    """Counts failures of operations, and logs the first and the last moment of an outage: from the first failure until
    every operation that failed has succeeded again.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._failing: set[str] = set()

    def failed(self, operation: str, problem: str) -> None:
        self.failures += 1
        if not self._failing:
            log.error("the work queue does not answer: %s: %s", operation, problem)
        self._failing.add(operation)

    def succeeded(self, operation: str) -> None:
        if operation in self._failing:
            self._failing.discard(operation)
            if not self._failing:
                log.warning("the work queue answers again (%d failures so far)", self.failures)


class RedisWorkQueue:
    """Implements `WorkQueue`."""

    def __init__(self, url: str, *, prefix: str = PREFIX, timeout_s: float = TIMEOUT_S) -> None:
        self._prefix = prefix
        self._outages = OutageLog()
        self._timeout_s = timeout_s
        # Requests wait for a connection: without that, those above the limit would fail while Redis answers.
        self._redis = redis.Redis.from_pool(
            redis.BlockingConnectionPool.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
            )
        )
        self._reader = redis.Redis.from_url(url, socket_timeout=10 * timeout_s, socket_connect_timeout=timeout_s)
        self._add = self._redis.register_script(ADD)
        self._take = self._redis.register_script(TAKE)
        self._claim = self._redis.register_script(CLAIM)
        self._renew = self._redis.register_script(RENEW)
        self._done = self._redis.register_script(DONE)
        self._put_back = self._redis.register_script(PUT_BACK)

    @property
    def failures(self) -> int:
        return self._outages.failures

    async def add(self, work: Sequence[NewWork]) -> int:
        added = 0
        with self._answering("add"):
            for start in range(0, len(work), _CHUNK):
                rows = [(one.stream, one.id) for one in work[start : start + _CHUNK]]
                added += int(await self._add(args=[self._prefix, "", _encode(rows)]))
        return added

    async def take(self, consumer: str, wanted: Wanted) -> list[QueueEntry]:
        with self._answering("take"):
            return _entries(await self._take(args=[self._prefix, consumer, _packed(wanted)]))

    async def wait(self, position: str, timeout_s: float) -> str:
        with self._answering("wait"):
            found: Any = await self._reader.xread(
                {f"{self._prefix}bell": position}, block=max(1, int(timeout_s * 1000))
            )
        return str(found[0][1][-1][0].decode()) if found else position

    async def renew(self, consumer: str, entries: Sequence[QueueEntry], *, is_pull_worker: bool = False) -> Renewal:
        rows = [(one.stream, one.entry) for one in entries]
        args: list[Any] = [self._prefix, consumer, _encode(rows), int(is_pull_worker), WORKER_TTL_S]
        with self._answering("renew"):
            lost, depth, pull_workers = _decode(await self._renew(args=args))
        return Renewal(frozenset(map(tuple, lost)), depth, pull_workers)

    async def claim(self, consumer: str, wanted: Wanted, idle_s: float, *, is_dead: bool = False) -> list[QueueEntry]:
        args: list[Any] = [self._prefix, consumer, _packed(wanted), int(idle_s * 1000), MAX_DELIVERIES, int(is_dead)]
        with self._answering("claim"):
            return _entries(await self._claim(args=args))

    async def done(self, entries: Sequence[QueueEntry]) -> None:
        await self._remove("done", self._done, "", entries)

    async def put_back(self, consumer: str, entries: Sequence[QueueEntry]) -> None:
        await self._remove("put_back", self._put_back, consumer, entries)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._reader.aclose()

    async def _remove(self, name: str, script: Any, consumer: str, entries: Sequence[QueueEntry]) -> None:
        with self._answering(name):
            for start in range(0, len(entries), _CHUNK):
                rows = [(one.stream, one.entry, one.id) for one in entries[start : start + _CHUNK]]
                await script(args=[self._prefix, consumer, _encode(rows)])

    @contextmanager
    def _answering(self, operation: str) -> Iterator[None]:
        try:
            with kept_cancellation():
                yield
        except (RedisError, OSError, TimeoutError) as error:
            problem = f"Redis: {type(error).__name__}"
            self._outages.failed(operation, problem)
            raise QueueUnavailable(problem) from None
        self._outages.succeeded(operation)


def _packed(wanted: Wanted) -> bytes:
    return _encode(
        {
            "lanes": wanted.lanes,
            "models": False if wanted.models is None else [quoted(model) for model in wanted.models],
            "skipped": [quoted(model) for model in wanted.skipped],
            "busy": wanted.busy,
        }
    )


def _entries(packed: bytes) -> list[QueueEntry]:
    return [QueueEntry(*row) for row in _decode(packed)]
