"""What the gate keeps of one tenant, one key, and of runs: quotas, ceilings and accounts, by name.

Accounts belong to names, not to the limits they are held against: who gets other limits keeps what was spent. An
account begins when a ceiling first names it. Books are bounded: who calls without authentication may be anybody.
"""

from collections.abc import Callable

from inferry.admission.budgets import UNBOUNDED, Account, Calendar, nanos_of
from inferry.admission.quotas import MINUTE_S, Quotas
from inferry.domain.tenants import Limits

_MOVES_AFTER_S = 10.0


class Books:
    """Those of one tenant, or of one key of it."""

    __slots__ = (
        "bounds_runs",
        "day",
        "day_nanos",
        "day_tokens",
        "is_marked",
        "limits",
        "month",
        "month_nanos",
        "month_tokens",
        "name",
        "quotas",
        "run_nanos",
        "run_tokens",
        "tenant",
    )

    def __init__(self, tenant: str, whose: str, key_id: str = "", *, is_marked: bool = False) -> None:
        self.tenant = tenant
        self.name = (tenant, key_id)
        self.is_marked = is_marked
        self.quotas = Quotas(whose)
        self.limits: Limits | None = None
        self.bounds_runs = False
        self.run_tokens = self.run_nanos = UNBOUNDED
        self.day_tokens = self.day_nanos = UNBOUNDED
        self.month_tokens = self.month_nanos = UNBOUNDED
        self.day: Account | None = None
        self.month: Account | None = None

    def use(self, limits: Limits, now: float) -> None:
        """The limits from now on, for calls in flight too."""
        self.limits = limits
        self.quotas.use(limits, now)
        self.run_tokens, self.run_nanos = _ceilings(limits.run_token_ceiling, limits.run_money_ceiling)
        self.bounds_runs = limits.run_token_ceiling is not None or limits.run_money_ceiling is not None
        self.day_tokens, self.day_nanos = _ceilings(limits.day_token_ceiling, limits.day_money_ceiling)
        self.month_tokens, self.month_nanos = _ceilings(limits.month_token_ceiling, limits.month_money_ceiling)
        if self.day is not None:
            self.day.hold_to(self.day_tokens, self.day_nanos)
        if self.month is not None:
            self.month.hold_to(self.month_tokens, self.month_nanos)

    def today(self, calendar: Calendar) -> Account | None:
        """The account of the day, where it has a ceiling."""
        account = self.day
        if account is not None and account.period == calendar.day:
            return account
        if self.day_tokens == UNBOUNDED == self.day_nanos:
            return None
        return self.begin_day(calendar.day)

    def this_month(self, calendar: Calendar) -> Account | None:
        """The account of the month, where it has a ceiling."""
        account = self.month
        if account is not None and account.period == calendar.month:
            return account
        if self.month_tokens == UNBOUNDED == self.month_nanos:
            return None
        return self.begin_month(calendar.month)

    def begin_day(self, day: int) -> Account:
        account = self.day = Account(" a day", self.quotas.whose, day, self.name, is_marked=self.is_marked)
        account.token_ceiling, account.nano_ceiling = self.day_tokens, self.day_nanos
        return account

    def begin_month(self, month: int) -> Account:
        account = self.month = Account(" a month", self.quotas.whose, month, self.name, is_marked=self.is_marked)
        account.token_ceiling, account.nano_ceiling = self.month_tokens, self.month_nanos
        return account

    def is_blank(self, calendar: Calendar, now: float) -> bool:
        """Nothing would be lost with them: the buckets are full again, and nothing was spent in this day and month."""
        if self.quotas.in_flight or now - self.quotas.quiet_since < MINUTE_S:
            return False
        day, month = self.day, self.month
        return (day is None or day.period != calendar.day or not day.taken_tokens) and (
            month is None or month.period != calendar.month or not month.taken_tokens
        )


class Shelf:
    """Books by name, so many at most: where there are more, the blank ones go, then those longest unused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._books: dict[str, Books] = {}
        self.get: Callable[[str], Books | None] = self._books.get

    def __len__(self) -> int:
        return len(self._books)

    def all(self) -> list[Books]:
        return list(self._books.values())

    def of_tenant(self, tenant: str) -> list[tuple[str, Books]]:
        return [(name, books) for name, books in self._books.items() if books.tenant == tenant]

    def add(self, name: str, books: Books, calendar: Calendar, now: float) -> Books:
        if len(self._books) >= self._most:
            self._clear(calendar, now)
        self._books[name] = books
        return books

    def _clear(self, calendar: Calendar, now: float) -> None:
        """Make room for many at once, so that the search is paid for by all who come after it."""
        books = self._books
        for name in [name for name, one in books.items() if one.is_blank(calendar, now)]:
            del books[name]
        surplus = len(books) - self._most * 3 // 4
        if surplus > 0:
            idle = [(one.quotas.quiet_since, name) for name, one in books.items() if not one.quotas.in_flight]
            for _, name in sorted(idle)[:surplus]:
                del books[name]


class RunAccounts:
    """Accounts of runs, those longest unused first. One that nobody has used for `idle_s` is forgotten."""

    def __init__(self, most: int, idle_s: float, *, is_marked: bool = False) -> None:
        self._most = most
        self._is_marked = is_marked
        self._idle_s = idle_s
        self._accounts: dict[tuple[str, str], Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, tenant: str, run_id: str) -> Account | None:
        return self._accounts.get((tenant, run_id))

    def peek(self, tenant: str, run_id: str) -> Account:
        """The run's account, or a new one that `use` will keep."""
        name = (tenant, run_id)
        account = self._accounts.get(name)
        if account is None:
            account = Account("", "run", 0, name, is_marked=self._is_marked)
        return account

    def all(self) -> list[Account]:
        return list(self._accounts.values())

    def use(self, account: Account, now: float) -> None:
        """A job comes in that charges it. It is now among those used last."""
        account.holders += 1
        account.is_over = False
        if now - account.touched_at < _MOVES_AFTER_S and account.name in self._accounts:
            return
        accounts, name = self._accounts, account.name
        if accounts.pop(name, None) is None:
            self.forget_idle(now, 2)
        account.touched_at = now
        accounts[name] = account

    def keep(self, tenant: str, run_id: str, now: float) -> Account:
        """The run's account, without a job that charges it."""
        account = self.peek(tenant, run_id)
        self.use(account, now)
        account.holders -= 1
        return account

    def leave(self, account: Account) -> None:
        """A job that charged it is over."""
        account.holders -= 1
        if account.is_over and not account.holders:
            self._accounts.pop(account.name, None)

    def end(self, tenant: str, run_id: str) -> None:
        """The run is over: forget its account, once nobody holds leases on it."""
        account = self._accounts.get((tenant, run_id))
        if account is not None:
            account.is_over = True
            if not account.holders:
                del self._accounts[account.name]

    def forget_idle(self, now: float, at_most: int) -> int:
        """Forget up to so many that have been idle for long, or are too many; returns how many."""
        accounts = self._accounts
        found: list[tuple[str, str]] = []
        for name, account in accounts.items():
            is_due = len(accounts) - len(found) >= self._most or now - account.touched_at >= self._idle_s
            if len(found) == at_most or not (is_due or account.is_over):
                break
            if not account.holders:
                found.append(name)
        for name in found:
            del accounts[name]
        return len(found)


def _ceilings(tokens: int | None, money: float | None) -> tuple[int, int]:
    return UNBOUNDED if tokens is None else tokens, nanos_of(money)
