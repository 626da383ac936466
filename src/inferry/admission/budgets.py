"""Budgets by lease: what is spent and what is leased of an account never exceeds its ceiling.

A job leases its prompt and a first piece of its output when it comes in, further pieces as it writes, and gives back
at its end what it did not use. An account counts in tokens (of prompts and answers) and in billionths of money; it
belongs to a run's tree, or to a tenant's or a key's day or month. Ceilings may change at any time: they hold for what
is leased from then on.
"""

from inferry.admission.values import Line
from inferry.domain.tenants import NANO, Price

UNBOUNDED = 2**63 - 1
"""The ceiling where there is none."""
NEVER = 2**62 - 1
"""An alarm that is never reached. It is compared for every job, and numbers beyond it are slower to compare."""
SHARERS = 64
LEAST_PIECE = 16
"""A job gets one part in so many of what is left at a time, and at least so many tokens while there are any."""
DAY_S = 86_400
_BACKWARDS_S = 3600.0


class Account:
    """`taken` is what is spent and leased together. `kind` and `whose` say in words what it is the account of; `name`
    is the tenant and the run or the key, and `parent` the account of the run above it, which has all of this one's
    spending in it. `token_mark` and `nano_mark` are how far `taken` may go by what the database has (`marks`), and the
    alarms when to raise them: always, for an account without a mark, never where marks are not kept."""

    __slots__ = (
        "asked_nanos",
        "asked_tokens",
        "batch",
        "first_alarm",
        "holders",
        "is_beyond_ledger",
        "is_over",
        "kind",
        "name",
        "nano_alarm",
        "nano_ceiling",
        "nano_mark",
        "parent",
        "period",
        "spent_nanos",
        "spent_tokens",
        "taken_nanos",
        "taken_tokens",
        "token_alarm",
        "token_ceiling",
        "token_mark",
        "touched_at",
        "whose",
    )

    def __init__(
        self, kind: str, whose: str, period: int = 0, name: tuple[str, str] = ("", ""), *, is_marked: bool = False
    ) -> None:
        self.kind = kind
        self.whose = whose
        self.period = period
        self.name = name
        self.parent: Account | None = None
        self.token_ceiling = UNBOUNDED
        self.nano_ceiling = UNBOUNDED
        self.spent_tokens = 0
        self.spent_nanos = 0
        self.taken_tokens = 0
        self.taken_nanos = 0
        self.holders = 0
        self.touched_at = 0.0
        self.is_over = False
        self.first_alarm = -1 if is_marked else NEVER
        self.is_beyond_ledger = False
        self.batch = 0
        self.forget_mark()

    def forget_mark(self) -> None:
        """Nothing in the database covers what is taken from now on."""
        self.token_mark = self.nano_mark = self.asked_tokens = self.asked_nanos = -1
        self.token_alarm = self.nano_alarm = self.first_alarm

    def hold_to(self, tokens: int, nanos: int) -> None:
        """Set the ceilings. What had none has no mark yet; other marks stand, whatever the ceiling."""
        if tokens != self.token_ceiling:
            if self.token_mark == UNBOUNDED:
                self.token_mark = self.asked_tokens = -1
                self.token_alarm = self.first_alarm
            self.token_ceiling = tokens
        if nanos != self.nano_ceiling:
            if self.nano_mark == UNBOUNDED:
                self.nano_mark = self.asked_nanos = -1
                self.nano_alarm = self.first_alarm
            self.nano_ceiling = nanos

    @property
    def leased_tokens(self) -> int:
        return self.taken_tokens - self.spent_tokens

    @property
    def leased_nanos(self) -> int:
        return self.taken_nanos - self.spent_nanos

    def charge(self, tokens: int, nanos: int, leased_tokens: int, leased_nanos: int) -> tuple[int, int]:
        """Turn leases into what was really spent, and return what of it found no room under the ceiling.

        More than was leased is charged as far as there is room: the ceiling holds, whatever an engine does.
        """
        room = max(0, self.token_ceiling - self.taken_tokens) + leased_tokens
        charged = tokens if tokens < room else room
        self.spent_tokens += charged
        self.taken_tokens += charged - leased_tokens
        room = max(0, self.nano_ceiling - self.taken_nanos) + leased_nanos
        paid = nanos if nanos < room else room
        self.spent_nanos += paid
        self.taken_nanos += paid - leased_nanos
        return tokens - charged, nanos - paid

    def note(self, tokens: int, nanos: int) -> None:
        """Count what was spent without a lease, whatever the ceiling."""
        self.spent_tokens += tokens
        self.taken_tokens += tokens
        self.spent_nanos += nanos
        self.taken_nanos += nanos

    def is_at_least(self, tokens: int, nanos: int) -> None:
        """So much is known to have been spent. What is counted already is not counted again."""
        self.note(max(0, tokens - self.spent_tokens), max(0, nanos - self.spent_nanos))

    def says(self, in_money: bool) -> str:
        """The ceiling, what is spent and what is leased, for whoever is refused."""
        if in_money:
            ceiling, spent, leased = self.nano_ceiling, self.spent_nanos, self.leased_nanos
            return (
                f"the {self.whose}'s ceiling of {money(ceiling)}{self.kind} is reached: "
                f"{money(spent)} spent, {money(leased)} leased to calls in flight"
            )
        return (
            f"the {self.whose}'s ceiling of {self.token_ceiling} tokens{self.kind} is reached: "
            f"{self.spent_tokens} spent, {self.leased_tokens} leased to calls in flight"
        )


class Tariff:
    """A model's price as leases count it: never less than what it will be."""

    __slots__ = ("input_nanos", "is_charged", "is_per_token", "output_nanos", "price")

    def __init__(self, price: Price | None) -> None:
        self.price = price
        self.is_per_token = price is not None and price.is_per_token
        self.is_charged = self.is_per_token or (price is not None and price.gpu_hour is not None)
        self.input_nanos = 0.0
        self.output_nanos = 0.0
        if price is not None and self.is_per_token:
            self.input_nanos = 1000 * max(price.input, price.cached_input or 0.0)
            self.output_nanos = 1000 * price.output

    def prompt(self, tokens: int) -> int:
        """What the prompt may cost. GPU time costs what nobody knows before; then something at least must be left."""
        return int(tokens * self.input_nanos) + 1 if self.is_charged and tokens else 0

    def output(self, tokens: int) -> int:
        return int(tokens * self.output_nanos) + 1 if self.output_nanos else 0

    def affordable(self, nanos: int) -> int:
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


def room(
    accounts: list[Account], tariff: Tariff, prompt_tokens: int = 0, prompt_nanos: int = 0
) -> tuple[int, Account | None, bool]:
    """For how many output tokens all the accounts have room beside the prompt, which one binds, and whether in money.

    Less than zero: not even for the prompt.
    """
    tokens = nanos = UNBOUNDED
    scarce: Account | None = None
    dear: Account | None = None
    for account in accounts:
        left = account.token_ceiling - account.taken_tokens
        if left < tokens:
            tokens, scarce = left, account
        left = account.nano_ceiling - account.taken_nanos
        if left < nanos:
            nanos, dear = left, account
    if scarce is not None:
        tokens -= prompt_tokens
    if dear is not None and tariff.is_charged:
        nanos -= prompt_nanos
        if nanos <= tokens * tariff.output_nanos and (affordable := tariff.affordable(nanos)) < tokens:
            return affordable, dear, True
    return tokens, scarce, False


def piece(left: int, most: int) -> int:
    """How much of what is left a job gets at a time: little where little is left, so that many share it."""
    if left > LEAST_PIECE:
        share = left // SHARERS
        left = share if share > LEAST_PIECE else LEAST_PIECE
    return left if left < most else most


class Calendar:
    """UTC's day and month, told from seconds since the Unix epoch. It does not go back over a mere correction."""

    __slots__ = ("begins", "day", "ends", "month")

    def __init__(self) -> None:
        self.begins = self.ends = 0.0
        self.day = self.month = 0

    def turn(self, wall: float) -> None:
        """Make it the day that `wall` is in."""
        if self.begins - _BACKWARDS_S <= wall < self.ends:
            return
        self.day = day_of(wall)
        self.month = month_of(self.day)
        self.begins = float(self.day * DAY_S)
        self.ends = self.begins + DAY_S


def day_of(wall: float) -> int:
    return int(wall // DAY_S)


def month_of(day: int) -> int:
    """Months since the year 0 of a day since 1970."""
    # Years that begin in March put the leap day last, so that the months' lengths repeat every five of them.
    era, day_of_era = divmod(day + 719_468, 146_097)
    year = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year + year // 4 - year // 100)
    return 12 * (era * 400 + year) + (5 * day_of_year + 2) // 153 + 2


def money(nanos: int) -> str:
    whole, part = divmod(nanos, NANO)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".")


def nanos_of(amount: float | None) -> int:
    """A ceiling in money, as it is written, in billionths."""
    return UNBOUNDED if amount is None else round(amount * NANO)


def line(account: Account, *, key_id: str | None = None, run_id: str | None = None) -> Line:
    return Line(
        kind=account.kind.removeprefix(" a ") or account.whose,
        spent_tokens=account.spent_tokens,
        leased_tokens=account.leased_tokens,
        token_ceiling=None if account.token_ceiling == UNBOUNDED else account.token_ceiling,
        spent_nanos=account.spent_nanos,
        leased_nanos=account.leased_nanos,
        nano_ceiling=None if account.nano_ceiling == UNBOUNDED else account.nano_ceiling,
        key_id=key_id,
        run_id=run_id,
    )
