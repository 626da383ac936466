"""Quotas, ceilings and accounts of tenants, keys and runs, by name.

An account belongs to its owner's name and not to its limits: changed limits keep what was spent. An account is opened
when a ceiling first applies. The number of owners and runs is bounded, because unauthenticated callers choose names.
"""

from collections.abc import Callable
from itertools import islice
from typing import Final

from inferry.admission.budgets import UNBOUNDED, Account, Calendar, to_nanos
from inferry.admission.kv_quota import KvQuota
from inferry.admission.quotas import MINUTE_S, Quotas
from inferry.domain.tenants import Limits

_TOUCH_INTERVAL_S: Final = 10.0


class OwnerAccounts:
    """The quotas, ceilings and accounts of one tenant or one key."""

    __slots__ = (
        "day",
        "day_nanos",
        "day_tokens",
        "kv",
        "limits",
        "limits_runs",
        "month",
        "month_nanos",
        "month_tokens",
        "name",
        "quotas",
        "run_nanos",
        "run_tokens",
        "tenant",
        "uses_watermarks",
    )

    def __init__(self, tenant: str, owner_kind: str, key_id: str = "", *, uses_watermarks: bool = False) -> None:
        self.tenant = tenant
        self.name = (tenant, key_id)
        self.uses_watermarks = uses_watermarks
        self.quotas = Quotas(owner_kind)
        self.kv = KvQuota()
        self.limits: Limits | None = None
        self.limits_runs = False
        self.run_tokens = self.run_nanos = UNBOUNDED
        self.day_tokens = self.day_nanos = UNBOUNDED
        self.month_tokens = self.month_nanos = UNBOUNDED
        self.day: Account | None = None
        self.month: Account | None = None

    def set_limits(self, limits: Limits, now: float) -> None:
        """Replace the limits. They apply to calls in flight too."""
        self.limits = limits
        self.quotas.set_limits(limits, now)
        self.kv.set_limits(limits)
        self.run_tokens, self.run_nanos = _ceiling_values(limits.run_token_ceiling, limits.run_money_ceiling)
        self.limits_runs = limits.run_token_ceiling is not None or limits.run_money_ceiling is not None
        self.day_tokens, self.day_nanos = _ceiling_values(limits.day_token_ceiling, limits.day_money_ceiling)
        self.month_tokens, self.month_nanos = _ceiling_values(limits.month_token_ceiling, limits.month_money_ceiling)
        if self.day is not None:
            self.day.set_ceilings(self.day_tokens, self.day_nanos)
        if self.month is not None:
            self.month.set_ceilings(self.month_tokens, self.month_nanos)

    def day_account(self, calendar: Calendar) -> Account | None:
        """The account of the current day; None if there is no daily ceiling."""
        account = self.day
        if account is not None and account.period == calendar.day:
            return account
        if self.day_tokens == UNBOUNDED == self.day_nanos:
            return None
        return self.open_day_account(calendar.day)

    def month_account(self, calendar: Calendar) -> Account | None:
        """The account of the current month; None if there is no monthly ceiling."""
        account = self.month
        if account is not None and account.period == calendar.month:
            return account
        if self.month_tokens == UNBOUNDED == self.month_nanos:
            return None
        return self.open_month_account(calendar.month)

    def open_day_account(self, day: int) -> Account:
        account = self.day = Account(
            " a day", self.quotas.owner_kind, day, self.name, uses_watermarks=self.uses_watermarks
        )
        account.token_ceiling, account.nano_ceiling = self.day_tokens, self.day_nanos
        return account

    def open_month_account(self, month: int) -> Account:
        account = self.month = Account(
            " a month", self.quotas.owner_kind, month, self.name, uses_watermarks=self.uses_watermarks
        )
        account.token_ceiling, account.nano_ceiling = self.month_tokens, self.month_nanos
        return account

    def is_unused(self, calendar: Calendar, now: float) -> bool:
        """Whether eviction loses no state: buckets are full again, and nothing was spent this day and month."""
        if self.quotas.in_flight or now - self.quotas.last_change_at < MINUTE_S:
            return False
        day, month = self.day, self.month
        return (day is None or day.period != calendar.day or not day.committed_tokens) and (
            month is None or month.period != calendar.month or not month.committed_tokens
        )


class OwnerRegistry:
    """Accounts by owner. At `max_entries`, unused ones are evicted first, then the least recently used.

    `on_new` is called with every new owner.
    """

    def __init__(self, max_entries: int, on_new: Callable[[OwnerAccounts], None] | None = None) -> None:
        self._max_entries = max_entries
        self._on_new = on_new
        self._owners: dict[str, OwnerAccounts] = {}
        self.get: Callable[[str], OwnerAccounts | None] = self._owners.get

    def __len__(self) -> int:
        return len(self._owners)

    def all(self) -> list[OwnerAccounts]:
        return list(self._owners.values())

    def entries_of_tenant(self, tenant: str) -> list[tuple[str, OwnerAccounts]]:
        return [(name, owner) for name, owner in self._owners.items() if owner.tenant == tenant]

    def add(self, name: str, owner: OwnerAccounts, calendar: Calendar, now: float) -> OwnerAccounts:
        if len(self._owners) >= self._max_entries:
            self._evict(calendar, now)
        if self._on_new is not None:
            self._on_new(owner)
        self._owners[name] = owner
        return owner

    def _evict(self, calendar: Calendar, now: float) -> None:
        """Evict down to three quarters of the limit, so that the cost of the scan is spread over many additions."""
        owner = self._owners
        for name in [name for name, one in owner.items() if one.is_unused(calendar, now)]:
            del owner[name]
        surplus = len(owner) - self._max_entries * 3 // 4
        if surplus > 0:
            idle = [(one.quotas.last_change_at, name) for name, one in owner.items() if not one.quotas.in_flight]
            for _, name in sorted(idle)[:surplus]:
                del owner[name]


class RunAccounts:
    """Accounts of runs, least recently used first. An account that is idle for `idle_s` is dropped."""

    def __init__(
        self, max_entries: int, idle_s: float, *, owner_kind: str = "run", uses_watermarks: bool = False
    ) -> None:
        self._max_entries = max_entries
        self._owner_kind = owner_kind
        self._uses_watermarks = uses_watermarks
        self._idle_s = idle_s
        self._accounts: dict[tuple[str, str], Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, tenant: str, run_id: str) -> Account | None:
        return self._accounts.get((tenant, run_id))

    def get_or_new(self, tenant: str, run_id: str) -> Account:
        """The run's account, or a new one that is stored by `acquire`."""
        name = (tenant, run_id)
        account = self._accounts.get(name)
        if account is None:
            account = Account("", self._owner_kind, 0, name, uses_watermarks=self._uses_watermarks)
        return account

    def all(self) -> list[Account]:
        return list(self._accounts.values())

    def newest(self, limit: int) -> list[Account]:
        """The accounts used most recently."""
        return list(islice(reversed(self._accounts.values()), limit))

    def acquire(self, account: Account, now: float) -> None:
        """Count a job that charges the account, and store the account as the most recently used one."""
        account.active_jobs += 1
        account.is_ended = False
        if now - account.last_used_at < _TOUCH_INTERVAL_S and account.name in self._accounts:
            return
        accounts, name = self._accounts, account.name
        if accounts.pop(name, None) is None:
            self.forget_idle(now, 2)
        account.last_used_at = now
        accounts[name] = account

    def touch(self, tenant: str, run_id: str, now: float) -> Account:
        """The run's account, stored and marked as used, without a job that charges it."""
        account = self.get_or_new(tenant, run_id)
        self.acquire(account, now)
        account.active_jobs -= 1
        return account

    def release(self, account: Account) -> None:
        """A job that charged the account has ended."""
        account.active_jobs -= 1
        if account.is_ended and not account.active_jobs:
            self._accounts.pop(account.name, None)

    def end(self, tenant: str, run_id: str) -> None:
        """The run has ended: drop its account once its last job has ended."""
        account = self._accounts.get((tenant, run_id))
        if account is not None:
            account.is_ended = True
            if not account.active_jobs:
                del self._accounts[account.name]

    def forget_idle(self, now: float, limit: int) -> int:
        """Drop up to `limit` idle or surplus accounts; return how many."""
        accounts = self._accounts
        found: list[tuple[str, str]] = []
        for name, account in accounts.items():
            is_due = len(accounts) - len(found) >= self._max_entries or now - account.last_used_at >= self._idle_s
            if len(found) == limit or not (is_due or account.is_ended):
                break
            if not account.active_jobs:
                found.append(name)
        for name in found:
            del accounts[name]
        return len(found)


def _ceiling_values(tokens: int | None, money: float | None) -> tuple[int, int]:
    return UNBOUNDED if tokens is None else tokens, to_nanos(money)
