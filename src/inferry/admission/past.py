"""Accounts as the database has them: what was spent before, and what a process that was killed may have used."""

from inferry.admission.books import Books, RunAccounts, Shelf
from inferry.admission.budgets import Account, Calendar, day_of, month_of
from inferry.domain.spending import Mark, Spent


class Past:
    """Finds the gate's accounts by what the database calls them, and makes those that are not there yet."""

    def __init__(
        self, tenants: Shelf, keys: Shelf, runs: RunAccounts, calendar: Calendar, run_idle_s: float, *, is_marked: bool
    ) -> None:
        self._tenants = tenants
        self._keys = keys
        self._runs = runs
        self._calendar = calendar
        self._run_idle_s = run_idle_s
        self._is_marked = is_marked

    def count(self, one: Spent, now: float) -> None:
        """So much was spent, at least."""
        if one.run_id is not None:
            account = self._runs.keep(one.tenant, one.run_id, now)
            account.is_at_least(one.tokens, one.nanos)
            if one.parent_run is not None:
                account.parent = self._runs.keep(one.tenant, one.parent_run, now)
            return
        books = self._books(one.tenant, one.key_id, now)
        day = day_of(one.at)
        if one.period == "day":
            if books.day is None or books.day.period < day:
                books.begin_day(day)
            kept, period = books.day, day
        else:
            period = month_of(day)
            if books.month is None or books.month.period < period:
                books.begin_month(period)
            kept = books.month
        if kept is not None and kept.period == period:
            kept.is_at_least(one.tokens, one.nanos)

    def account_of(self, mark: Mark, now: float, wall: float) -> Account | None:
        """The account that the mark is of; None where nothing is charged to it any more."""
        if mark.scope == "run":
            return self._runs.keep(mark.tenant, mark.name, now) if wall - mark.at < self._run_idle_s else None
        today = day_of(wall)
        if mark.number != (today if mark.period == "day" else month_of(today)):
            return None
        books = self._books(mark.tenant, mark.name if mark.scope == "key" else None, now)
        if mark.period == "day":
            account = books.day if books.day is not None else books.begin_day(mark.number)
        else:
            account = books.month if books.month is not None else books.begin_month(mark.number)
        return account if account.period == mark.number else None

    def all_accounts(self) -> list[Account]:
        """Those of days, months and runs."""
        books = (*self._tenants.all(), *self._keys.all())
        days = [one.day for one in books if one.day is not None]
        months = [one.month for one in books if one.month is not None]
        return [*days, *months, *self._runs.all()]

    def _books(self, tenant: str, key_id: str | None, now: float) -> Books:
        shelf, name = (self._tenants, tenant) if key_id is None else (self._keys, key_id)
        books = shelf.get(name)
        if books is None:
            whose = "tenant" if key_id is None else "key"
            books = Books(tenant, whose, key_id or "", is_marked=self._is_marked)
            shelf.add(name, books, self._calendar, now)
        return books
