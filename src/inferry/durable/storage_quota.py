"""Limits per tenant on what is stored often. Adding up what a tenant has stored takes time that grows with it, so this
is done again only when a sixteenth of what was left has been stored.
"""

from collections.abc import Callable

from inferry.domain.errors import StorageQuotaExceeded

RECHECK_S = 10.0
"""A tenant that has reached the limit is refused for this long before its content is added up again."""


class Headroom:
    """What tenants may store before their use is added up again. `limit` None: no limit. Belongs to one event loop."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._left: dict[str, int] = {}

    def due(self, tenant: str, amount: int) -> int | None:
        """Count what is about to be stored. Returns the limit where the store must check it, else None."""
        if self._limit is None:
            return None
        left = self._left[tenant] = self._left.get(tenant, 0) - amount
        return self._limit if left < 0 else None

    def checked(self, tenant: str, left: int) -> None:
        """The store has added up the tenant's use: it may still store this much."""
        self._left[tenant] = left // 16

    def forget(self, tenant: str) -> None:
        self._left.pop(tenant, None)


class StorageQuota:
    """`max_bytes` None: no limit. `now` is any clock in seconds. Belongs to one event loop.

    Content is stored between `due` and one of `stored` and `exceeded`.
    """

    def __init__(self, max_bytes: int | None, now: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._now = now
        self._headroom = Headroom(max_bytes)
        self._full_until: dict[str, float] = {}

    @property
    def has_full_tenants(self) -> bool:
        """Whether `require_space` may refuse."""
        return bool(self._full_until)

    def require_space(self, tenant: str) -> None:
        """Raises StorageQuotaExceeded where the tenant reached the limit a moment ago."""
        if self._full_until.get(tenant, 0.0) > self._now():
            raise StorageQuotaExceeded(f"the tenant may store {self._max_bytes} bytes; delete what it does not need")
        self._full_until.pop(tenant, None)

    def due(self, tenant: str, size: int) -> int | None:
        """Count bytes that are about to be stored. Returns the limit where the store must check it, else None."""
        return self._headroom.due(tenant, size)

    def stored(self, tenant: str, left: int | None) -> None:
        """Content was stored. `left`: bytes that the tenant may still store, None where that was not checked."""
        if left is not None:
            self._headroom.checked(tenant, left)

    def exceeded(self, tenant: str) -> None:
        """The store has refused content because of the limit."""
        self._full_until[tenant] = self._now() + RECHECK_S

    def freed(self, tenant: str) -> None:
        """Content of the tenant was deleted."""
        self._headroom.forget(tenant)
        self._full_until.pop(tenant, None)
