"""The limit of stored bytes: exact near the limit, and added up rarely far from it."""

import pytest

from inferry.domain.clock import ManualClock
from inferry.domain.errors import StorageQuotaExceeded
from inferry.durable.storage_quota import RECHECK_S, StorageQuota


class Site:
    def __init__(self, max_bytes: int | None) -> None:
        self.used = 0
        self.sums = 0
        self.clock = ManualClock()
        self.quota = StorageQuota(max_bytes, self.clock.now)

    def store(self, size: int) -> None:
        limit = self.quota.due("a", size)
        left = None
        if limit is not None:
            self.sums += 1
            left = limit - self.used - size
            if left < 0:
                self.quota.exceeded("a")
                raise StorageQuotaExceeded("full")
        self.used += size
        self.quota.stored("a", left)


def test_content_is_stored_up_to_the_limit() -> None:
    site = Site(100_000)
    with pytest.raises(StorageQuotaExceeded):
        for _ in range(2000):
            site.store(100)
    assert site.used == 100_000
    assert site.sums < 100


def test_a_full_tenant_is_refused_until_content_is_deleted_or_time_passes() -> None:
    site = Site(100)
    site.store(100)
    assert not site.quota.has_full_tenants
    with pytest.raises(StorageQuotaExceeded):
        site.store(1)
    with pytest.raises(StorageQuotaExceeded):
        site.quota.require_space("a")
    site.quota.require_space("b")
    site.clock.advance(RECHECK_S)
    site.quota.require_space("a")
    assert not site.quota.has_full_tenants
    with pytest.raises(StorageQuotaExceeded):
        site.store(1)
    site.quota.freed("a")
    site.quota.require_space("a")


def test_without_a_limit_nothing_is_added_up() -> None:
    site = Site(None)
    site.store(10**12)
    assert site.sums == 0
