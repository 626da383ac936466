"""Restores accounts from the database: earlier spending, and the watermarks that a killed process left."""

from inferry.admission.accounts import OwnerAccounts, OwnerRegistry, RunAccounts
from inferry.admission.budgets import Account, Calendar, utc_day, utc_month
from inferry.domain.spending import Spending, Watermark


class AccountRestorer:
    """Maps rows of the database to the gate's accounts. Accounts that do not exist yet are created."""

    def __init__(
        self,
        tenants: OwnerRegistry,
        keys: OwnerRegistry,
        runs: RunAccounts,
        calendar: Calendar,
        run_idle_s: float,
        *,
        uses_watermarks: bool,
    ) -> None:
        self._tenants = tenants
        self._keys = keys
        self._runs = runs
        self._calendar = calendar
        self._run_idle_s = run_idle_s
        self._uses_watermarks = uses_watermarks

    def restore_spending(self, one: Spending, now: float) -> None:
        """Raise the account's spending to at least the given amount."""
        if one.run_id is not None:
            account = self._runs.touch(one.tenant, one.run_id, now)
            account.raise_spent_to(one.tokens, one.nanos)
            if one.parent_run is not None:
                account.parent = self._runs.touch(one.tenant, one.parent_run, now)
            return
        owner = self._owner_accounts(one.tenant, one.key_id, now)
        day = utc_day(one.at)
        if one.period == "day":
            if owner.day is None or owner.day.period < day:
                owner.open_day_account(day)
            period_account, period = owner.day, day
        else:
            period = utc_month(day)
            if owner.month is None or owner.month.period < period:
                owner.open_month_account(period)
            period_account = owner.month
        if period_account is not None and period_account.period == period:
            period_account.raise_spent_to(one.tokens, one.nanos)

    def account_for(self, watermark: Watermark, now: float, wall: float) -> Account | None:
        """The account of the watermark; None if its period or run is over, so that nothing can be charged to it."""
        if watermark.scope == "run":
            return (
                self._runs.touch(watermark.tenant, watermark.name, now)
                if wall - watermark.at < self._run_idle_s
                else None
            )
        day_account = utc_day(wall)
        if watermark.number != (day_account if watermark.period == "day" else utc_month(day_account)):
            return None
        owner = self._owner_accounts(watermark.tenant, watermark.name if watermark.scope == "key" else None, now)
        if watermark.period == "day":
            account = owner.day if owner.day is not None else owner.open_day_account(watermark.number)
        else:
            account = owner.month if owner.month is not None else owner.open_month_account(watermark.number)
        return account if account.period == watermark.number else None

    def all_accounts(self) -> list[Account]:
        """The accounts of all days, months and runs."""
        owner = (*self._tenants.all(), *self._keys.all())
        days = [one.day for one in owner if one.day is not None]
        months = [one.month for one in owner if one.month is not None]
        return [*days, *months, *self._runs.all()]

    def _owner_accounts(self, tenant: str, key_id: str | None, now: float) -> OwnerAccounts:
        registry, name = (self._tenants, tenant) if key_id is None else (self._keys, key_id)
        owner = registry.get(name)
        if owner is None:
            owner_kind = "tenant" if key_id is None else "key"
            owner = OwnerAccounts(tenant, owner_kind, key_id or "", uses_watermarks=self._uses_watermarks)
            registry.add(name, owner, self._calendar, now)
        return owner
