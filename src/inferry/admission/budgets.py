"""Budgets as leases: spent + leased of an account never exceeds its ceiling.

A job leases its prompt and a first part of its output on admission, and further parts while it generates. At its end
the unused rest is returned. An account counts tokens (prompt and output) and money in billionths (nanos). It belongs to
a run tree, or to one day or month of a tenant or key. A changed ceiling applies to later leases.
"""

from typing import Final

from inferry.admission.reports import AccountReport
from inferry.domain.prices import NANOS_PER_UNIT, Price

UNBOUNDED: Final = 2**63 - 1
"""The value of a ceiling that is not set."""
NO_THRESHOLD: Final = 2**62 - 1
"""A threshold that is never reached. Every job is compared with it; larger integers are slower to compare."""
LEASE_DIVISOR: Final = 64
"""One lease is at most this fraction (1/64) of what is left of the budget."""
MIN_LEASE_TOKENS: Final = 16
"""One lease is at least this many tokens, while that many are left."""
DAY_S: Final = 86_400
_MAX_CLOCK_STEP_BACK_S: Final = 3600.0


class Account:
    """What one owner has spent and leased in one period, against its ceilings.

    - `committed_*`: spent + leased.
    - `kind`, `owner_kind`: the words for error messages (" a day", "tenant").
    - `name`: tenant and run id, or tenant and key id.
    - `known_*`: the part of the spending that the ledger had when it was read.
    - `is_shared`: other gateways use the account too, and what this one may use is its watermark (module `grants`).
    - `parent`: the account of the parent run. It includes all spending of this account.
    - `*_watermark`: the highest `committed_*` that the database covers (module `watermarks`); -1 for none.
    - `*_threshold`: the value above which the watermark is raised. An account without a watermark has -1 (always);
      without a database it is `NO_THRESHOLD` (never).
    """

    __slots__ = (
        "active_jobs",
        "committed_nanos",
        "committed_tokens",
        "exceeds_ledger",
        "initial_threshold",
        "is_ended",
        "is_shared",
        "kind",
        "known_nanos",
        "known_tokens",
        "last_used_at",
        "name",
        "nano_ceiling",
        "nano_threshold",
        "nano_watermark",
        "owner_kind",
        "parent",
        "period",
        "requested_nanos",
        "requested_tokens",
        "spent_nanos",
        "spent_tokens",
        "token_ceiling",
        "token_threshold",
        "token_watermark",
        "watermark_batch",
    )

    def __init__(
        self,
        kind: str,
        owner_kind: str,
        period: int = 0,
        name: tuple[str, str] = ("", ""),
        *,
        uses_watermarks: bool = False,
    ) -> None:
        self.kind = kind
        self.owner_kind = owner_kind
        self.period = period
        self.name = name
        self.parent: Account | None = None
        self.token_ceiling = UNBOUNDED
        self.nano_ceiling = UNBOUNDED
        self.spent_tokens = 0
        self.spent_nanos = 0
        self.committed_tokens = 0
        self.committed_nanos = 0
        self.active_jobs = 0
        self.last_used_at = 0.0
        self.is_ended = False
        self.is_shared = False
        self.known_tokens = 0
        self.known_nanos = 0
        self.initial_threshold = -1 if uses_watermarks else NO_THRESHOLD
        self.exceeds_ledger = False
        self.watermark_batch = 0
        self.clear_watermark()

    def clear_watermark(self) -> None:
        """Forget the watermark: the database covers no further lease."""
        self.token_watermark = self.nano_watermark = self.requested_tokens = self.requested_nanos = -1
        self.token_threshold = self.nano_threshold = self.initial_threshold

    def set_ceilings(self, tokens: int, nanos: int) -> None:
        """Set the ceilings. A ceiling that is new starts without a watermark; other watermarks stay valid."""
        if tokens != self.token_ceiling:
            if self.token_watermark == UNBOUNDED:
                self.token_watermark = self.requested_tokens = -1
                self.token_threshold = self.initial_threshold
            self.token_ceiling = tokens
        if nanos != self.nano_ceiling:
            if self.nano_watermark == UNBOUNDED:
                self.nano_watermark = self.requested_nanos = -1
                self.nano_threshold = self.initial_threshold
            self.nano_ceiling = nanos

    @property
    def leased_tokens(self) -> int:
        return self.committed_tokens - self.spent_tokens

    @property
    def leased_nanos(self) -> int:
        return self.committed_nanos - self.spent_nanos

    def charge(self, tokens: int, nanos: int, leased_tokens: int, leased_nanos: int) -> tuple[int, int]:
        """Replace leases by actual usage; return the tokens and nanos that exceed the ceiling and are not charged.

        Usage beyond the lease is charged up to the ceiling, so an engine that overruns cannot break the ceiling.
        """
        token_limit, nano_limit = self.token_ceiling, self.nano_ceiling
        if self.is_shared:
            token_limit, nano_limit = min(token_limit, self.token_watermark), min(nano_limit, self.nano_watermark)
        headroom = max(0, token_limit - self.committed_tokens) + leased_tokens
        charged = tokens if tokens < headroom else headroom
        self.spent_tokens += charged
        self.committed_tokens += charged - leased_tokens
        headroom = max(0, nano_limit - self.committed_nanos) + leased_nanos
        paid = nanos if nanos < headroom else headroom
        self.spent_nanos += paid
        self.committed_nanos += paid - leased_nanos
        return tokens - charged, nanos - paid

    def record_spending(self, tokens: int, nanos: int) -> None:
        """Count spending that had no lease, even beyond the ceiling."""
        self.spent_tokens += tokens
        self.committed_tokens += tokens
        self.spent_nanos += nanos
        self.committed_nanos += nanos

    def raise_spent_to(self, tokens: int, nanos: int) -> None:
        """Raise the spending to at least these totals, which the database has. It never decreases."""
        self.known_tokens = max(self.known_tokens, tokens)
        self.known_nanos = max(self.known_nanos, nanos)
        if self.is_shared:
            return  # the authority's amounts count, which are told these totals
        self.record_spending(max(0, tokens - self.spent_tokens), max(0, nanos - self.spent_nanos))

    def describe_limit(self, in_money: bool) -> str:
        """The text of a refusal: the ceiling, what is spent and what is leased."""
        if in_money:
            ceiling, spent, leased = self.nano_ceiling, self.spent_nanos, self.leased_nanos
            return (
                f"the {self.owner_kind}'s ceiling of {format_money(ceiling)}{self.kind} "
                f"{_how_full(ceiling, spent + leased)}: {format_money(spent)} spent, {format_money(leased)} leased to "
                "calls in flight"
            )
        return (
            f"the {self.owner_kind}'s ceiling of {self.token_ceiling} tokens{self.kind} "
            f"{_how_full(self.token_ceiling, self.spent_tokens + self.leased_tokens)}: {self.spent_tokens} spent, "
            f"{self.leased_tokens} leased to calls in flight"
        )


def _how_full(ceiling: int, used: int) -> str:
    if used >= ceiling:
        return "is reached"
    return "leaves too little for this call's prompt and one output token"


class Tariff:
    """A model's price for leases: an upper bound of the price that is charged at the end."""

    __slots__ = ("input_nanos", "is_per_token", "is_priced", "output_nanos", "price")

    def __init__(self, price: Price | None) -> None:
        self.price = price
        self.is_per_token = price is not None and price.is_per_token
        self.is_priced = self.is_per_token or (price is not None and price.gpu_hour is not None)
        self.input_nanos = 0.0
        self.output_nanos = 0.0
        if price is not None and self.is_per_token:
            self.input_nanos = 1000 * max(price.input, price.cached_input or 0.0)
            self.output_nanos = 1000 * price.output

    def prompt(self, tokens: int) -> int:
        """The most that the prompt may cost. GPU time has no price in advance: 1 nano, so that some budget is left."""
        return int(tokens * self.input_nanos) + 1 if self.is_priced and tokens else 0

    def output(self, tokens: int) -> int:
        return int(tokens * self.output_nanos) + 1 if self.output_nanos else 0

    def affordable_tokens(self, nanos: int) -> int:
        """The number of output tokens that `nanos` pay for; -1 where `nanos` is negative."""
        rate = self.output_nanos
        if nanos < 0 or not rate:
            return -1 if nanos < 0 else UNBOUNDED
        tokens = int((nanos - 1) / rate) if nanos else 0
        while tokens and int(tokens * rate) + 1 > nanos:
            tokens -= 1
        return tokens

    def cost(self, prompt: int, cached: int, output: int, gpu_seconds: float | None) -> int | None:
        return None if self.price is None else self.price.nanos(prompt, cached, output, gpu_seconds)


def headroom(
    accounts: list[Account], tariff: Tariff, prompt_tokens: int = 0, prompt_nanos: int = 0
) -> tuple[int, Account | None, bool]:
    """Output tokens that all accounts allow beside the prompt, the account that binds, and whether it binds in money.

    A negative number of tokens means that the prompt itself does not fit.
    """
    tokens = nanos = UNBOUNDED
    token_account: Account | None = None
    money_account: Account | None = None
    for account in accounts:
        left = account.token_ceiling - account.committed_tokens
        if left < tokens:
            tokens, token_account = left, account
        left = account.nano_ceiling - account.committed_nanos
        if left < nanos:
            nanos, money_account = left, account
    if token_account is not None:
        tokens -= prompt_tokens
    if money_account is not None and tariff.is_priced:
        nanos -= prompt_nanos
        if nanos <= tokens * tariff.output_nanos and (affordable_tokens := tariff.affordable_tokens(nanos)) < tokens:
            return affordable_tokens, money_account, True
    return tokens, token_account, False


def lease_size(left: int, most: int) -> int:
    """Tokens of one lease, at most `most`. Leases shrink with what is left, so that concurrent jobs share the rest."""
    if left > MIN_LEASE_TOKENS:
        share = left // LEASE_DIVISOR
        left = share if share > MIN_LEASE_TOKENS else MIN_LEASE_TOKENS
    return left if left < most else most


class Calendar:
    """The current UTC day and month, from Unix time. A clock set back by up to an hour does not change the day back."""

    __slots__ = ("day", "day_ends_at", "day_starts_at", "month")

    def __init__(self) -> None:
        self.day_starts_at = self.day_ends_at = 0.0
        self.day = self.month = 0

    def advance_to(self, wall: float) -> None:
        """Set day and month to those of `wall`."""
        if self.day_starts_at - _MAX_CLOCK_STEP_BACK_S <= wall < self.day_ends_at:
            return
        self.day = utc_day(wall)
        self.month = utc_month(self.day)
        self.day_starts_at = float(self.day * DAY_S)
        self.day_ends_at = self.day_starts_at + DAY_S


def utc_day(wall: float) -> int:
    return int(wall // DAY_S)


def utc_month(day: int) -> int:
    """The month, counted from year 0, of a day counted from 1970-01-01."""
    # With years that begin in March the leap day is the last day, and month lengths repeat every five months.
    era, day_of_era = divmod(day + 719_468, 146_097)
    year = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year + year // 4 - year // 100)
    return 12 * (era * 400 + year) + (5 * day_of_year + 2) // 153 + 2


def format_money(nanos: int) -> str:
    whole, part = divmod(nanos, NANOS_PER_UNIT)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".")


def to_nanos(amount: float | None) -> int:
    """A ceiling in currency units as nanos."""
    return UNBOUNDED if amount is None else round(amount * NANOS_PER_UNIT)


def account_report(account: Account, *, key_id: str | None = None, run_id: str | None = None) -> AccountReport:
    return AccountReport(
        kind=account.kind.removeprefix(" a ") or account.owner_kind,
        spent_tokens=account.spent_tokens,
        leased_tokens=account.leased_tokens,
        token_ceiling=None if account.token_ceiling == UNBOUNDED else account.token_ceiling,
        spent_nanos=account.spent_nanos,
        leased_nanos=account.leased_nanos,
        nano_ceiling=None if account.nano_ceiling == UNBOUNDED else account.nano_ceiling,
        key_id=key_id,
        run_id=run_id,
    )


def charge_ancestors(runs: list[Account], tokens: int, nanos: int) -> None:
    """Charge the ancestors of a run that got its parent while the job was in flight."""
    seen = list(runs)
    ancestor = runs[-1].parent
    while ancestor is not None and ancestor not in seen:  # a run forgotten and created again may form a cycle
        ancestor.charge(tokens, nanos, 0, 0)
        seen.append(ancestor)
        ancestor = ancestor.parent
