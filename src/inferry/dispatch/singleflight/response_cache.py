"""Answers that are kept after their end, for calls that are made again. Pure: time is an argument.

Bounded in time and in bytes. Where not all responses fit, the tenant that holds most loses its oldest.
"""

import heapq
from collections import OrderedDict

from inferry.dispatch.values import CachedResponse

RepeatKey = tuple[str, str]
"""The tenant, and what the call goes by there."""


class ResponseCache:
    """The kept answers, by tenant and call."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._by_tenant: dict[str, OrderedDict[str, CachedResponse]] = {}
        self._bytes_by_tenant: dict[str, int] = {}
        self._due: list[tuple[float, str, str]] = []
        self.used = 0

    def __len__(self) -> int:
        return sum(len(cached) for cached in self._by_tenant.values())

    def find(self, key: RepeatKey, now: float) -> CachedResponse | None:
        cached = self._get(*key)
        return cached if cached is not None and cached.until > now else None

    def keep(self, key: RepeatKey, cached: CachedResponse) -> None:
        """Keep the answer in place of an earlier one to the same call."""
        tenant, name = key
        self._drop(tenant, name)
        if cached.size > self._limit:
            return
        self._by_tenant.setdefault(tenant, OrderedDict())[name] = cached
        self._bytes_by_tenant[tenant] = self._bytes_by_tenant.get(tenant, 0) + cached.size
        self.used += cached.size
        heapq.heappush(self._due, (cached.until, tenant, name))
        while self.used > self._limit:
            largest = max(self._bytes_by_tenant, key=self._bytes_by_tenant.__getitem__)
            self._drop(largest, next(iter(self._by_tenant[largest])))

    def expire(self, now: float) -> float | None:
        """Forget what has been kept long enough; returns when to come again."""
        while self._due and self._due[0][0] <= now:
            _, tenant, name = heapq.heappop(self._due)
            cached = self._get(tenant, name)
            if cached is not None and cached.until <= now:  # else another answer has taken its place
                self._drop(tenant, name)
        return self._due[0][0] if self._due else None

    def _get(self, tenant: str, name: str) -> CachedResponse | None:
        tenant_entries = self._by_tenant.get(tenant)
        return None if tenant_entries is None else tenant_entries.get(name)

    def _drop(self, tenant: str, name: str) -> None:
        tenant_entries = self._by_tenant.get(tenant)
        cached = None if tenant_entries is None else tenant_entries.pop(name, None)
        if tenant_entries is None or cached is None:
            return
        self.used -= cached.size
        self._bytes_by_tenant[tenant] -= cached.size
        if not tenant_entries:
            del self._by_tenant[tenant], self._bytes_by_tenant[tenant]
