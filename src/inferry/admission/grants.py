"""Budgets shared by several gateways: an account is spent up to what the authority has granted to this gateway.

A grant takes the place of a watermark (module `watermarks`): a job that exceeds it waits for the next exchange.

    spent     = settled at the authority + own spending that is not settled yet
    committed = spent + own leases
    watermark = settled + what this gateway holds

What other gateways hold is not counted here, because it may be returned at any time: the authority decides, and a job
that it grants nothing is refused. Before that the job waits for a moment while others hold something, since gateways
return what they do not use as soon as another one was granted too little.

Own spending is settled once its rows are in the ledger, because what is rebuilt after a loss of the authority's state
is the ledger's spending and the holdings in the database.

Pure: the owner calls `take_exchange`, sends the asks, writes the holdings to the database, then calls `answered`. At
most one exchange is in flight.
"""

from collections.abc import Iterable
from typing import Final

from inferry.admission.budgets import NO_THRESHOLD, UNBOUNDED, Account, utc_day, utc_month
from inferry.admission.permits import Permit
from inferry.admission.refusals import Refusal
from inferry.admission.shared_quotas import QuotaGrants, shared_quotas
from inferry.admission.watermarks import BLOCKS_PER_CEILING, WatermarkTracker
from inferry.domain.errors import GatewayError
from inferry.domain.shared_limits import MAX_AMOUNT, Answer, Ask, LimitKind, account_name, keep_s
from inferry.domain.spending import Spending

GRANT_IDLE_S: Final = 2.0
"""A grant is returned this long after its account was last leased from."""
CONTENTION_WAIT_S: Final = 1.5
"""A job waits this long for what other gateways hold and do not use."""
SWEEP_BATCH: Final = 1000
"""Accounts settled and refreshed by one exchange."""
MIN_EXTRA_TOKENS: Final = 256
MIN_EXTRA_NANOS: Final = 100_000
"""A gateway asks for at least this much more than it needs."""


class SharedAmount:
    """Tokens or nanos of one account, as the authority has them, and what this gateway holds.

    - `others`: what other gateways hold; `is_wanted`: another one was granted too little, so only what is needed is
      asked for and kept.
    - `returning`: the part of what is held that the exchange in flight returns. Nothing more is leased from it.
    - `ledger_spent`: own unsettled spending that is in the ledger; `marked`: the same once awaited rows are in it.
    """

    __slots__ = ("held", "is_money", "is_wanted", "ledger_spent", "marked", "others", "returning", "settled")

    def __init__(self, is_money: bool, settled: int) -> None:
        self.is_money = is_money
        self.is_wanted = False
        self.settled = settled
        self.others = self.held = self.returning = self.ledger_spent = self.marked = 0

    def own(self, account: Account) -> int:
        """What this gateway has spent without settling it, and has leased."""
        return (account.committed_nanos if self.is_money else account.committed_tokens) - self.settled

    def unsettled(self, account: Account) -> int:
        return (account.spent_nanos if self.is_money else account.spent_tokens) - self.settled

    def ceiling(self, account: Account) -> int:
        return account.nano_ceiling if self.is_money else account.token_ceiling

    def name(self, account: Account) -> str:
        """The authority's name of it."""
        unit = "nanos" if self.is_money else "tokens"
        return account_name(account.owner_kind, *account.name, _period(account), account.period, unit)

    def ask(self, account: Account, *, is_released: bool) -> Ask:
        """Settle what is in the ledger, and ask for what is missing; or return what is not needed."""
        spent = min(self.ledger_spent, self.held)
        held, own, ceiling = self.held - spent, self.own(account) - spent, min(self.ceiling(account), MAX_AMOUNT)
        extra = max(MIN_EXTRA_NANOS if self.is_money else MIN_EXTRA_TOKENS, ceiling // BLOCKS_PER_CEILING)
        if is_released or self.is_wanted:
            extra, self.returning = 0, max(self.returning, held - own)
        self.returning = min(self.returning, held)
        held -= self.returning
        is_low = not is_released and (held < own or held - own < extra // 2)
        return Ask(
            self.name(account),
            LimitKind.BUDGET,
            ceiling,
            base=account.known_nanos if self.is_money else account.known_tokens,
            spent=spent,
            returned=self.returning,
            need=max(0, own - held),
            want=own + extra - held if is_low else 0,
            keep_s=keep_s(_period(account)),
        )

    def answered(self, account: Account, ask: Ask, answer: Answer) -> None:
        """Move the account to the authority's amounts."""
        settled_by = answer.settled - self.settled - ask.spent
        if self.is_money:
            account.spent_nanos += settled_by
            account.committed_nanos += settled_by
        else:
            account.spent_tokens += settled_by
            account.committed_tokens += settled_by
        self.settled, self.others, self.held = answer.settled, answer.others, answer.held
        self.is_wanted = bool(answer.is_wanted)
        self.returning = 0
        self.ledger_spent -= ask.spent
        self.marked -= ask.spent

    def rebuilt(self, held: int) -> None:
        """This holding is in the database. What the void exchange returned may have been granted to others: it stays
        unused until it is returned again, unless the database has its return already."""
        self.returning = min(self.returning, max(0, held - (self.held - self.returning)))
        self.held = held

    def set_watermark(self, account: Account, *, is_valid: bool) -> None:
        """Let the account be spent up to the grant; without a valid grant, no further."""
        own, ceiling, usable = self.own(account), self.ceiling(account), self.held - self.returning
        if ceiling == UNBOUNDED:
            watermark, threshold = UNBOUNDED, NO_THRESHOLD
        elif is_valid:
            watermark = self.settled + usable
            threshold = watermark if watermark >= ceiling else watermark - max(0, usable - own) // 2
        else:
            watermark, threshold = self.settled + min(usable, own), -1
        if self.is_money:
            account.nano_watermark, account.nano_threshold = watermark, threshold
        else:
            account.token_watermark, account.token_threshold = watermark, threshold


class AccountGrants:
    """The grants of one account.

    `rows`: once the ledger has this many rows, it has all that was marked. `short_since`: when the authority first
    granted less than was needed; None if it has granted all.
    """

    __slots__ = ("account", "amounts", "rows", "short_since", "used_at")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.amounts = (SharedAmount(False, account.known_tokens), SharedAmount(True, account.known_nanos))
        account.is_shared = True
        self.rows = -1
        self.short_since: float | None = None
        self.used_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is leased and all spending is in the ledger."""
        account = self.account
        return all(one.own(account) == one.unsettled(account) == one.ledger_spent for one in self.amounts)


class ExchangeLine:
    """One ask of an exchange, with what it is for."""

    __slots__ = ("amount", "ask", "grants")

    def __init__(self, grants: AccountGrants, amount: SharedAmount, ask: Ask) -> None:
        self.grants = grants
        self.amount = amount
        self.ask = ask


class GrantTracker(WatermarkTracker):
    """The budgets of one gateway of several. Takes the place of `WatermarkTracker` at the quota gate."""

    def __init__(self) -> None:
        super().__init__()
        self.is_valid = True
        self._grants: dict[str, AccountGrants] = {}
        self._swept: dict[str, AccountGrants] = {}
        self._lines: list[ExchangeLine] = []
        self._quotas = QuotaGrants()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def is_due(self) -> bool:
        return bool(self._due or self._swept or self._quotas.is_due)

    def held(self) -> int:
        """Tokens that this gateway holds, over all accounts."""
        return sum(one.amounts[0].held for one in self._grants.values())

    def request_raise(self, account: Account) -> int:
        name = _name(account)
        grants = self._grants.get(name)
        if grants is None:
            self._grants[name] = AccountGrants(account)
        elif grants.account is not account:
            # The run was forgotten and is used again: its new account continues the grants of the old one.
            _continue_account(grants, account)
        return super().request_raise(account)

    def request_quotas(self, permit: Permit, *, waits: bool) -> None:
        """Have quotas that are used beyond their grants raised; the job `waits` for the exchange that does."""
        for quotas in shared_quotas(permit):
            if quotas.is_short:
                self._quotas.request(quotas)
                if waits:
                    permit.watermark_batch = self._next_batch

    def uncovered(self, permits: list[Permit]) -> set[int]:
        """Of jobs whose exchange was answered, in the order of their admission, those that it does not cover.

        Where an account was granted too little, its last jobs are not covered.
        """
        found: set[int] = set()
        excess: dict[Account, list[int]] = {}
        for permit in permits:
            for account in permit.leased_accounts:
                if account not in excess and self._is_short(account):
                    tokens = account.committed_tokens - account.token_watermark
                    excess[account] = [tokens, account.committed_nanos - account.nano_watermark]
        for number in range(len(permits) - 1, -1, -1) if excess else ():
            permit = permits[number]
            short = [excess[account] for account in permit.leased_accounts if account in excess]
            if any(tokens > 0 or nanos > 0 for tokens, nanos in short):
                found.add(number)
                for amounts in short:
                    amounts[0] -= permit.leased_tokens
                    amounts[1] -= permit.leased_nanos
        self._quotas.uncovered(permits, found)
        return found

    def _is_short(self, account: Account) -> bool:
        grants = self._grants.get(_name(account))
        return grants is not None and grants.short_since is not None

    def uncovered_error(self, permit: Permit) -> GatewayError | None:
        for account in permit.leased_accounts:
            grants = self._grants.get(_name(account))
            if grants is None or grants.short_since is None:
                continue
            is_short_of_money = account.committed_nanos >= account.nano_watermark
            amount = grants.amounts[1] if is_short_of_money else grants.amounts[0]
            if not amount.others or self._now - grants.short_since >= CONTENTION_WAIT_S:
                return Refusal(account=account, in_money=is_short_of_money).error()
        return self._quotas.refusal(permit)

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def take_exchange(self, now: float) -> tuple[int, list[Ask]]:
        """The number of the next exchange, and what it asks."""
        number, self._next_batch = self._next_batch, self._next_batch + 1
        self._lines = []
        for account in self._due:
            grants = self._grants[_name(account)]
            grants.used_at = now
            self._swept.pop(_name(account), None)
            self._add_lines(grants, number, is_released=False)
        for grants in self._swept.values():
            self._add_lines(grants, number, is_released=grants.is_idle and now - grants.used_at >= GRANT_IDLE_S)
        self._due, self._swept = {}, {}
        return number, [line.ask for line in self._lines] + self._quotas.take(now)

    def _add_lines(self, grants: AccountGrants, number: int, *, is_released: bool) -> None:
        account = grants.account
        account.watermark_batch = number
        account.requested_tokens = account.requested_nanos = UNBOUNDED
        for amount in grants.amounts:
            if amount.ceiling(account) != UNBOUNDED or amount.held:
                self._lines.append(ExchangeLine(grants, amount, amount.ask(account, is_released=is_released)))
                if amount.is_money:
                    account.requested_nanos = account.committed_nanos
                else:
                    account.requested_tokens = account.committed_tokens
        self._set_watermarks(grants)

    def answered(self, number: int, answers: list[Answer], now: float) -> None:
        """The exchange was answered and its holdings are in the database: its grants apply."""
        self.written = number
        self._now = now
        touched: dict[AccountGrants, bool] = {}
        self._quotas.answered(answers[len(self._lines) :], now)
        for line, answer in zip(self._lines, answers, strict=False):
            line.amount.answered(line.grants.account, line.ask, answer)
            touched[line.grants] = touched.get(line.grants, False) or answer.granted < line.ask.need
        for grants, is_short in touched.items():
            self._set_watermarks(grants)
            if not is_short or grants.short_since is None:
                grants.short_since = now if is_short else None
            if not any(amount.held for amount in grants.amounts) and grants.is_idle and grants.account not in self._due:
                self._forget(grants)
        self._lines = []

    def rebuilt(self, held: dict[str, int]) -> None:
        """The authority was rebuilt from the database, which has these holdings of this gateway by account.

        An exchange in flight is void: the next one asks again. Holdings may include what was just granted or settled.
        """
        self._quotas.void()
        for line in self._lines:
            self._due[line.grants.account] = None
        self._lines = []
        for grants in self._grants.values():
            for amount in grants.amounts:
                amount.rebuilt(held.get(amount.name(grants.account), 0))
            self._set_watermarks(grants)

    def holdings(self, answers: list[Answer]) -> dict[str, int]:
        """What the exchange changes of what this gateway holds, by account: to be written before it is used."""
        return {
            line.ask.account: answer.held
            for line, answer in zip(self._lines, answers, strict=False)
            if answer.held != line.amount.held
        }

    # -- time --------------------------------------------------------------------------------------------------------

    def sweep(self, recorded: int, settled: int, *, is_complete: bool = True, limit: int = SWEEP_BATCH) -> None:
        """Include accounts in the next exchange: settle what is in the ledger, return what is unused.

        `recorded` is the number of rows passed to the ledger so far, `settled` the number that it has written.
        `is_complete`: no row was lost. Otherwise nothing is settled, so that holdings cover what the ledger lacks.
        """
        self._quotas.sweep()
        for name in list(self._grants)[:limit]:
            grants = self._grants.pop(name)
            self._grants[name] = grants  # the least recently swept come first
            if grants.rows < 0 and is_complete:
                grants.rows = recorded
                for amount in grants.amounts:
                    amount.marked = amount.unsettled(grants.account)
            if 0 <= grants.rows <= settled:
                grants.rows = -1
                for amount in grants.amounts:
                    amount.ledger_spent = amount.marked
            self._swept[name] = grants

    def release_all(self) -> None:
        """The gateway stops: return the grants of idle accounts with the next exchange."""
        for grants in self._swept.values():
            grants.used_at = float("-inf")

    def set_valid(self, is_valid: bool) -> None:
        """Whether grants may be spent: not once the TTL of this gateway at the authority may have passed."""
        if is_valid != self.is_valid:
            self.is_valid = is_valid
            self._quotas.set_valid(is_valid)
            for grants in self._grants.values():
                self._set_watermarks(grants)

    def _set_watermarks(self, grants: AccountGrants) -> None:
        for amount in grants.amounts:
            amount.set_watermark(grants.account, is_valid=self.is_valid)

    def _forget(self, grants: AccountGrants) -> None:
        """Nothing is held and nothing is owed."""
        account = grants.account
        account.known_tokens, account.known_nanos = grants.amounts[0].settled, grants.amounts[1].settled
        account.is_shared = False
        account.clear_watermark()
        account.watermark_batch = 0
        del self._grants[_name(account)]
        self._swept.pop(_name(account), None)


def settled_amounts(spending: Iterable[Spending]) -> list[tuple[str, int, int]]:
    """The ledger's spending by account of the authority: (account, amount, keep_s)."""
    found = []
    for one in spending:
        day = utc_day(one.at)
        number = 0 if one.period == "run" else day if one.period == "day" else utc_month(day)
        scope = "run" if one.run_id is not None else "tenant" if one.key_id is None else "key"
        name = one.run_id or one.key_id or ""
        for unit, amount in (("tokens", one.tokens), ("nanos", one.nanos)):
            account = account_name(scope, one.tenant, name, one.period, number, unit)
            found.append((account, amount, keep_s(one.period)))
    return found


def _continue_account(grants: AccountGrants, account: Account) -> None:
    old = grants.account
    # The leases of both accounts, and what the old one has spent.
    account.committed_tokens += old.committed_tokens - account.spent_tokens
    account.committed_nanos += old.committed_nanos - account.spent_nanos
    account.spent_tokens, account.spent_nanos = old.spent_tokens, old.spent_nanos
    account.watermark_batch = old.watermark_batch
    account.requested_tokens, account.requested_nanos = old.requested_tokens, old.requested_nanos
    account.token_watermark, account.nano_watermark = old.token_watermark, old.nano_watermark
    account.token_threshold, account.nano_threshold = old.token_threshold, old.nano_threshold
    account.is_shared = True
    grants.account = account


def _period(account: Account) -> str:
    return account.kind.removeprefix(" a ") or "run"


def _name(account: Account) -> str:
    return account_name(account.owner_kind, *account.name, account.kind, account.period, "")
