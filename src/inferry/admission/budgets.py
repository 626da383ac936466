"""Budgets by lease: what is spent and what is leased of an account never exceeds its ceiling.

A job leases its prompt and a first piece of its output when it comes in, further pieces as it writes, and gives back
at its end what it did not use. An account counts in tokens (of prompts and answers) and in billionths of money; it
belongs to a run's tree, or to a tenant's or a key's day or month. Ceilings may change at any time: they hold for what
is leased from then on.
"""

from inferry.admission.reports import AccountReport
from inferry.domain.tenants import NANOS_PER_UNIT, Price

UNBOUNDED = 2**63 - 1
"""The ceiling where there is none."""
NO_THRESHOLD = 2**62 - 1
"""An alarm that is never reached. It is compared for every job, and numbers beyond it are slower to compare."""
LEASE_DIVISOR = 64
MIN_LEASE_TOKENS = 16
"""A job gets one part in so many of what is left at a time, and at least so many tokens while there are any."""
DAY_S = 86_400
_MAX_CLOCK_STEP_BACK_S = 3600.0


class Account:
    """`taken` is what is spent and leased together. `kind` and `owner_kind` say in words what it is the account of;
    `name` is the tenant and the run or the key, and `parent` the account of the run above it, which has all of this
    one's spending in it. `token_watermark` and `nano_watermark` are how far `taken` may go by what the database has
    (`watermarks`), and the alarms when to raise them: always, for an account without a mark, never where marks are not
    kept."""

    __slots__ = (
        "active_jobs",
        "committed_nanos",
        "committed_tokens",
        "exceeds_ledger",
        "initial_threshold",
        "is_ended",
        "kind",
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
        self.initial_threshold = -1 if uses_watermarks else NO_THRESHOLD
        self.exceeds_ledger = False
        self.watermark_batch = 0
        self.clear_watermark()

    def clear_watermark(self) -> None:
        """Nothing in the database covers what is taken from now on."""
        self.token_watermark = self.nano_watermark = self.requested_tokens = self.requested_nanos = -1
        self.token_threshold = self.nano_threshold = self.initial_threshold

    def set_ceilings(self, tokens: int, nanos: int) -> None:
        """Set the ceilings. What had none has no mark yet; other marks stand, whatever the ceiling."""
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
        """Turn leases into what was really spent, and return what of it found no room under the ceiling.

        More than was leased is charged as far as there is room: the ceiling holds, whatever an engine does.
        """
        headroom = max(0, self.token_ceiling - self.committed_tokens) + leased_tokens
        charged = tokens if tokens < headroom else headroom
        self.spent_tokens += charged
        self.committed_tokens += charged - leased_tokens
        headroom = max(0, self.nano_ceiling - self.committed_nanos) + leased_nanos
        paid = nanos if nanos < headroom else headroom
        self.spent_nanos += paid
        self.committed_nanos += paid - leased_nanos
        return tokens - charged, nanos - paid

    def record_spending(self, tokens: int, nanos: int) -> None:
        """Count what was spent without a lease, whatever the ceiling."""
        self.spent_tokens += tokens
        self.committed_tokens += tokens
        self.spent_nanos += nanos
        self.committed_nanos += nanos

    def raise_spent_to(self, tokens: int, nanos: int) -> None:
        """So much is known to have been spent. What is counted already is not counted again."""
        self.record_spending(max(0, tokens - self.spent_tokens), max(0, nanos - self.spent_nanos))

    def describe_limit(self, in_money: bool) -> str:
        """The ceiling, what is spent and what is leased, for whoever is refused."""
        if in_money:
            ceiling, spent, leased = self.nano_ceiling, self.spent_nanos, self.leased_nanos
            return (
                f"the {self.owner_kind}'s ceiling of {format_money(ceiling)}{self.kind} is reached: "
                f"{format_money(spent)} spent, {format_money(leased)} leased to calls in flight"
            )
        return (
            f"the {self.owner_kind}'s ceiling of {self.token_ceiling} tokens{self.kind} is reached: "
            f"{self.spent_tokens} spent, {self.leased_tokens} leased to calls in flight"
        )


class Tariff:
    """A model's price as leases count it: never less than what it will be."""

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
        """What the prompt may cost. GPU time costs what nobody knows before; then something at least must be left."""
        return int(tokens * self.input_nanos) + 1 if self.is_priced and tokens else 0

    def output(self, tokens: int) -> int:
        return int(tokens * self.output_nanos) + 1 if self.output_nanos else 0

    def affordable_tokens(self, nanos: int) -> int:
        """The most output tokens that cost no more than this; -1 where not even none do."""
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
    """For how many output tokens all the accounts have room beside the prompt, which one binds, and whether in money.

    Less than zero: not even for the prompt.
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
    """How much of what is left a job gets at a time: little where little is left, so that many share it."""
    if left > MIN_LEASE_TOKENS:
        share = left // LEASE_DIVISOR
        left = share if share > MIN_LEASE_TOKENS else MIN_LEASE_TOKENS
    return left if left < most else most


class Calendar:
    """UTC's day and month, told from seconds since the Unix epoch. It does not go back over a mere correction."""

    __slots__ = ("day", "day_ends_at", "day_starts_at", "month")

    def __init__(self) -> None:
        self.day_starts_at = self.day_ends_at = 0.0
        self.day = self.month = 0

    def advance_to(self, wall: float) -> None:
        """Make it the day that `wall` is in."""
        if self.day_starts_at - _MAX_CLOCK_STEP_BACK_S <= wall < self.day_ends_at:
            return
        self.day = utc_day(wall)
        self.month = utc_month(self.day)
        self.day_starts_at = float(self.day * DAY_S)
        self.day_ends_at = self.day_starts_at + DAY_S


def utc_day(wall: float) -> int:
    return int(wall // DAY_S)


def utc_month(day: int) -> int:
    """Months since the year 0 of a day since 1970."""
    # Years that begin in March put the leap day last, so that the months' lengths repeat every five of them.
    era, day_of_era = divmod(day + 719_468, 146_097)
    year = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year + year // 4 - year // 100)
    return 12 * (era * 400 + year) + (5 * day_of_year + 2) // 153 + 2


def format_money(nanos: int) -> str:
    whole, part = divmod(nanos, NANOS_PER_UNIT)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".")


def to_nanos(amount: float | None) -> int:
    """A ceiling in money, as it is written, in billionths."""
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
