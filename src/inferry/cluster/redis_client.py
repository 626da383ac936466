"""The authority over shared limits and ownership, in Redis. Every method raises AuthorityUnavailable where Redis does
not answer in time; its request may have been executed.

Belongs to one event loop. One Redis process decides at a time: a primary with replicas is fine, Redis Cluster is not,
since a script reads several keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from inferry.cluster.kept_cancellation import kept_cancellation
from inferry.cluster.ownership import Claim, Owner
from inferry.cluster.redis_scripts import CLAIM, EXCHANGE, LINKS, PUBLISH, RESIGN
from inferry.cluster.run_links import Link, ReadLinks
from inferry.domain.shared_limits import (
    CONTENTION_MS,
    REBUILD_MS,
    Answer,
    Ask,
    AuthorityUnavailable,
    Exchanged,
    Holding,
    LimitKind,
)

PREFIX = "inferry:"
TIMEOUT_S = 1.0
"""Longest wait for a connection and for an answer."""
READ_BLOCK_S = 1.0
READ_TIMEOUT_S = READ_BLOCK_S + 2.0
"""Longest wait for cancelled runs at Redis, and for its answer."""
RUNS_KEPT = 100_000
"""Cancelled runs in the stream: gateways that were cut off read what they missed."""
LINKS_KEPT = 100_000
"""Parents of runs in the stream."""
LINKS_KEPT_S = 172_800
_CHUNK = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, list[tuple[int, int, int, int, int]] | bool]).decode
_decode_links = msgspec.msgpack.Decoder(tuple[str, list[Link], bool, str]).decode


@contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        with kept_cancellation():
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise AuthorityUnavailable(f"Redis: {type(error).__name__}") from None


class RedisAuthority:
    """Implements `LimitAuthority` and `OwnershipAuthority`, and carries cancelled runs and parents of runs."""

    def __init__(self, url: str, ttl_ms: int, *, prefix: str = PREFIX, timeout_s: float = TIMEOUT_S) -> None:
        self._ttl_ms = ttl_ms
        self._prefix = prefix
        self._redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, max_connections=16
        )
        self._reader = redis.Redis.from_url(url, socket_timeout=READ_TIMEOUT_S, socket_connect_timeout=timeout_s)
        self._exchange = self._redis.register_script(EXCHANGE)
        self._publish = self._redis.register_script(PUBLISH)
        self._claim = self._redis.register_script(CLAIM)
        self._links = self._redis.register_script(LINKS)
        self._resign = self._redis.register_script(RESIGN)

    async def exchange(self, holder: str, number: int, generation: int, asks: Sequence[Ask]) -> Exchanged:
        packed = _encode(asks)
        with _as_unavailable():
            found = await self._exchange(
                args=[self._prefix, holder, number, generation, self._ttl_ms, packed, REBUILD_MS, CONTENTION_MS]
            )
        current, answers = _decode(found)
        return Exchanged(current, None if isinstance(answers, bool) else [Answer(*one) for one in answers])

    async def rebuild(
        self, generation: int, spending: Sequence[tuple[str, int, int]], holdings: Sequence[Holding]
    ) -> None:
        """See `LimitAuthority`. Writes under the new generation's own keys, then makes it the current one."""
        with _as_unavailable():
            run_id = (await self._redis.info("server"))["run_id"]
            keep = {account: keep_s for account, _, keep_s in spending}
            fields = [(account, "s", amount) for account, amount, _ in spending]
            fields += [(one.account, f"h{one.holder}", one.amount) for one in holdings if one.amount > 0]
            for start in range(0, len(fields), _CHUNK):
                pipeline = self._redis.pipeline(transaction=False)
                for account, field, amount in fields[start : start + _CHUNK]:
                    key = f"{self._prefix}{generation}:{int(LimitKind.BUDGET)}:{account}"
                    pipeline.hset(key, field, str(amount))
                    pipeline.expire(key, keep.get(account, 172_800))
                await pipeline.execute()
            await self._publish(args=[self._prefix, generation, run_id])

    async def claim(self, claim: Claim) -> Owner:
        with _as_unavailable():
            gateway, address, epoch = await self._claim(args=[self._prefix, *claim, self._ttl_ms])
        return Owner(gateway.decode(), address.decode(), int(epoch))

    async def resign(self, domain: str, gateway: str, epoch: int) -> None:
        with _as_unavailable():
            await self._resign(args=[self._prefix, domain, gateway, epoch])

    # -- cancelled runs ----------------------------------------------------------------------------------------------

    async def announce_cancelled(self, gateway: str, tenant: str, run_id: str) -> None:
        """Tell all gateways, also those that are cut off now, that a run was cancelled."""
        fields: dict[Any, Any] = {"by": gateway, "tenant": tenant, "run": run_id}
        with _as_unavailable():
            await self._redis.xadd(f"{self._prefix}cancelled", fields, maxlen=RUNS_KEPT, approximate=True)

    async def last_cancelled(self) -> str:
        """The position in the stream of cancelled runs."""
        with _as_unavailable():
            found: Any = await self._redis.xrevrange(f"{self._prefix}cancelled", count=1)
        return str(found[0][0].decode()) if found else "0-0"

    async def next_cancelled(self, position: str) -> tuple[str, list[tuple[str, str, str]]]:
        """Wait up to a second for runs cancelled after the position: (gateway, tenant, run); and the new position."""
        with _as_unavailable():
            block_ms = int(READ_BLOCK_S * 1000)
            found: Any = await self._reader.xread({f"{self._prefix}cancelled": position}, block=block_ms, count=1000)
        entries = found[0][1] if found else []
        runs = [(row[b"by"].decode(), row[b"tenant"].decode(), row[b"run"].decode()) for _, row in entries]
        return (entries[-1][0].decode() if entries else position), runs

    # -- parents of runs ---------------------------------------------------------------------------------------------

    async def exchange_links(self, position: str, links: Sequence[Link]) -> ReadLinks:
        """Append links to the stream in chunks; returns the first ones after the position."""
        with _as_unavailable():
            chunks = [links[start : start + _CHUNK] for start in range(0, len(links), _CHUNK)]
            for chunk in chunks or [[]]:
                packed = _encode(chunk)
                found = await self._links(args=[self._prefix, position, packed, _CHUNK, LINKS_KEPT, LINKS_KEPT_S])
        return ReadLinks(*_decode_links(found))

    async def close(self) -> None:
        await self._redis.aclose()
        await self._reader.aclose()
