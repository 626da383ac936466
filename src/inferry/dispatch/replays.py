"""Answers that are kept after their end, for calls that are made again. Pure: time is an argument.

Bounded in time and in bytes. Where there is not room for all, the tenant that holds most loses its oldest.
"""

import heapq
from collections import OrderedDict

from inferry.dispatch.values import Kept

Key = tuple[str, str]
"""The tenant, and what the call goes by there."""


class Replays:
    """The kept answers, by tenant and call."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._of: dict[str, OrderedDict[str, Kept]] = {}
        self._bytes_of: dict[str, int] = {}
        self._due: list[tuple[float, str, str]] = []
        self.used = 0

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._of.values())

    def find(self, key: Key, now: float) -> Kept | None:
        kept = self._get(*key)
        return kept if kept is not None and kept.until > now else None

    def keep(self, key: Key, kept: Kept) -> None:
        """Keep the answer in place of an earlier one to the same call."""
        tenant, name = key
        self._drop(tenant, name)
        if kept.size > self._limit:
            return
        self._of.setdefault(tenant, OrderedDict())[name] = kept
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + kept.size
        self.used += kept.size
        heapq.heappush(self._due, (kept.until, tenant, name))
        while self.used > self._limit:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._drop(largest, next(iter(self._of[largest])))

    def expire(self, now: float) -> float | None:
        """Forget what has been kept long enough; returns when to come again."""
        while self._due and self._due[0][0] <= now:
            _, tenant, name = heapq.heappop(self._due)
            kept = self._get(tenant, name)
            if kept is not None and kept.until <= now:  # else another answer has taken its place
                self._drop(tenant, name)
        return self._due[0][0] if self._due else None

    def _get(self, tenant: str, name: str) -> Kept | None:
        of = self._of.get(tenant)
        return None if of is None else of.get(name)

    def _drop(self, tenant: str, name: str) -> None:
        of = self._of.get(tenant)
        kept = None if of is None else of.pop(name, None)
        if of is None or kept is None:
            return
        self.used -= kept.size
        self._bytes_of[tenant] -= kept.size
        if not of:
            del self._of[tenant], self._bytes_of[tenant]
