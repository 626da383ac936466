"""Whether budgets are spent faster than their periods pass."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.budgets import DAY_S, UNBOUNDED, Account, Calendar

MIN_ELAPSED = 0.1
"""The elapsed part of a period counts as at least this much: a few calls at its beginning are no burn."""


class BudgetBurn(NamedTuple):
    """The account that is furthest ahead: its ratio, and its name (tenant, and key or run)."""

    ratio: float = 0.0
    tenant: str = ""
    name: str = ""


def burn_by_period(
    owners: list[OwnerAccounts], runs: list[Account], calendar: Calendar, wall: float
) -> dict[str, BudgetBurn]:
    """The highest burn of the current day, of the current month, and of runs."""
    days = [one.day for one in owners if one.day is not None and one.day.period == calendar.day]
    months = [one.month for one in owners if one.month is not None and one.month.period == calendar.month]
    return {
        "day": highest_burn(days, elapsed_day(wall)),
        "month": highest_burn(months, elapsed_month(wall)),
        "run": highest_burn(runs, 1.0),
    }


def highest_burn(accounts: Iterable[Account], elapsed: float) -> BudgetBurn:
    """The highest ratio of spent part of a ceiling to `elapsed` part of the period."""
    highest = BudgetBurn()
    for account in accounts:
        spent = 0.0
        if 0 < account.token_ceiling < UNBOUNDED:
            spent = account.spent_tokens / account.token_ceiling
        if 0 < account.nano_ceiling < UNBOUNDED:
            spent = max(spent, account.spent_nanos / account.nano_ceiling)
        if spent / elapsed > highest.ratio:
            highest = BudgetBurn(spent / elapsed, *account.name)
    return highest


def elapsed_day(wall: float) -> float:
    """The part of the UTC day that has passed, at least MIN_ELAPSED."""
    return max(MIN_ELAPSED, wall % DAY_S / DAY_S)


def elapsed_month(wall: float) -> float:
    """The part of the UTC month that has passed, at least MIN_ELAPSED."""
    now = datetime.fromtimestamp(wall, UTC)
    begin = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end = begin.replace(year=now.year + now.month // 12, month=now.month % 12 + 1)
    return max(MIN_ELAPSED, (now - begin) / (end - begin))
