"""High-water marks: what an account may have used at most, as the database has it.

What calls use is written to the ledger after they end, so a killed process leaves a ledger that says too little. A mark
is written before: an account's `taken` (spent and leased) never passes its mark in the database, save where an engine
used more than was leased. After a crash an account begins at its mark, so the ceiling holds over all incarnations. What
is lost is what was marked and not used: at most one block and the leases that were held when the mark was raised.

A mark is raised one block at a time, when half a block is left, so that calls seldom wait for it. An account that holds
no leases gives its mark up once all its rows are in the ledger, and then a crash costs it nothing.

Pure: the owner calls `take`, writes the batch in one transaction, then calls `wrote`. One batch is on its way at most.
"""

from collections.abc import Iterable

from inferry.admission.budgets import NEVER, UNBOUNDED, Account
from inferry.admission.permits import Permit
from inferry.domain.spending import Mark, MarkBatch

LEAST_BLOCK_TOKENS = 4096
LEAST_BLOCK_NANOS = 1_000_000
BLOCKS = 64
"""A block is the ceiling divided by this, and at least the values above (tokens, billionths of money)."""
IDLE_S = 10.0
"""How long after its last raise a mark is given up at the earliest."""
AT_ONCE = 1000

_Identity = tuple[str, str, tuple[str, str], int]


class Marks:
    """Which marks are to be written. `written` is the number of the last batch that the database has."""

    def __init__(self) -> None:
        self.written = 0
        self._gathering = 1
        self._due: dict[Account, None] = {}
        self._on_their_way: list[Account] = []
        self._live: dict[Account, float] = {}
        self._idle: dict[Account, tuple[int, int, int]] = {}
        self._released: dict[Account, None] = {}
        self._stale: list[Mark] = []
        # A run that was forgotten and comes again has another account, whose mark must outlive the former's.
        self._owners: dict[_Identity, Account] = {}

    def __len__(self) -> int:
        """How many marks the database has, as far as is known."""
        return len(self._live)

    @property
    def is_due(self) -> bool:
        """Whether there is a batch to write."""
        return bool(self._due or self._released or self._stale)

    def reach(self, account: Account) -> int:
        """The account has taken more than its alarm: have its mark raised. Returns the number of the batch that must be
        written before what was taken may be used; 0: none, the mark covers it."""
        is_covered = account.taken_tokens <= account.token_mark and account.taken_nanos <= account.nano_mark
        is_asked = account.taken_tokens <= account.asked_tokens and account.taken_nanos <= account.asked_nanos
        if account.batch > self.written and is_asked:
            return 0 if is_covered else account.batch
        self._due[account] = None
        self._owners[_identity(account)] = account
        return 0 if is_covered else self._gathering

    def cut(self, permit: Permit, granted: int, nanos: int) -> tuple[int, int]:
        """Give back what marks do not cover of a piece that was taken, have them raised, and say what is left of it.

        A running job does not wait for them: it asks again with every token.
        """
        covered = granted
        for account in permit.held:
            self.reach(account)
            left = account.token_mark - account.taken_tokens + granted
            if left < covered:
                covered = left
            if account.nano_mark != UNBOUNDED:
                left = permit.tariff.affordable(account.nano_mark - account.taken_nanos + nanos)
                if left < covered:
                    covered = left
        if covered < 0:
            covered = 0
        cost = permit.tariff.output(covered) if covered else 0
        if covered < granted:
            for account in permit.held:
                account.taken_tokens -= granted - covered
                account.taken_nanos -= nanos - cost
        permit.is_unmarked = covered == 0
        return covered, cost

    def take(self, wall: float) -> MarkBatch:
        """What to write now, as one transaction."""
        number, self._gathering = self._gathering, self._gathering + 1
        kept: list[Mark] = []
        gone = self._stale
        self._stale = []
        for account in self._released:
            if account in self._due:
                continue
            if account.leased_tokens or account.leased_nanos:
                self._live[account] = self._live.get(account, 0.0)
                continue
            identity = _identity(account)
            if self._owners.get(identity) is not account:
                continue
            del self._owners[identity]
            if account.is_beyond_ledger:
                kept.append(_mark(account, account.spent_tokens, account.spent_nanos, wall))
            else:
                gone.append(_mark(account, 0, 0, wall))
            account.forget_mark()
        self._released = {}
        self._on_their_way = list(self._due)
        self._due = {}
        for account in self._on_their_way:
            tokens, nanos = account.token_mark, account.nano_mark
            account.asked_tokens = _target(account.taken_tokens, account.token_ceiling, tokens, LEAST_BLOCK_TOKENS)
            account.asked_nanos = _target(account.taken_nanos, account.nano_ceiling, nanos, LEAST_BLOCK_NANOS)
            account.batch = number
            kept.append(_mark(account, _stored(account.asked_tokens), _stored(account.asked_nanos), wall))
        return MarkBatch(number, kept, gone)

    def wrote(self, number: int, now: float) -> None:
        """The database has the batch."""
        self.written = number
        for account in self._on_their_way:
            tokens, nanos = account.asked_tokens, account.asked_nanos
            account.token_mark, account.nano_mark = tokens, nanos
            account.token_alarm = _alarm(tokens, account.token_ceiling, LEAST_BLOCK_TOKENS)
            account.nano_alarm = _alarm(nanos, account.nano_ceiling, LEAST_BLOCK_NANOS)
            self._live.pop(account, None)
            self._live[account] = now
        self._on_their_way = []

    def retire(self, now: float, recorded: int, settled: int, idle_s: float = IDLE_S, at_once: int = AT_ONCE) -> None:
        """Give up marks of accounts that hold no leases, once the rows of all that they spent are in the ledger.

        `recorded` is how many rows were given to the ledger so far, `settled` how many of them it has.
        """
        for account, since in list(self._live.items())[:at_once]:
            if now - since < idle_s:
                break
            if account.leased_tokens or account.leased_nanos or account.batch > self.written or account in self._due:
                self._idle.pop(account, None)
                del self._live[account]
                self._live[account] = now
                continue
            count, tokens, nanos = self._idle.get(account, (-1, 0, 0))
            if count < 0 or (tokens, nanos) != (account.spent_tokens, account.spent_nanos):
                self._idle[account] = (recorded, account.spent_tokens, account.spent_nanos)
                count = recorded
            if settled >= count:
                del self._live[account], self._idle[account]
                self._released[account] = None

    def keep_all(self) -> None:
        """Rows were lost: the ledger alone no longer says what was spent, so no mark is given up."""
        for account in (*self._live, *self._due, *self._on_their_way, *self._released):
            account.is_beyond_ledger = True

    def rewrite(self, accounts: Iterable[Account]) -> None:
        """The database is another one: write the marks of all that has spent anything, and keep them."""
        for account in accounts:
            if account.taken_tokens or account.taken_nanos:
                account.is_beyond_ledger = True
                account.forget_mark()
                self._live.pop(account, None)
                self._owners[_identity(account)] = account
                if account.leased_tokens or account.leased_nanos:
                    self._due[account] = None
                else:
                    self._released[account] = None

    def restored(self, account: Account, mark: Mark, now: float) -> None:
        """A process that was killed has left this mark."""
        if mark.tokens > account.spent_tokens or mark.nanos > account.spent_nanos:
            account.is_beyond_ledger = True
        account.is_at_least(mark.tokens, mark.nanos)
        account.token_mark, account.nano_mark = mark.tokens, mark.nanos
        self._live[account] = now
        self._owners[_identity(account)] = account

    def stale(self, mark: Mark) -> None:
        """Nothing can be charged to it any more."""
        self._stale.append(mark)


def block(ceiling: int, least: int) -> int:
    """How far a mark is raised at a time."""
    return max(least, ceiling // BLOCKS)


def _target(taken: int, ceiling: int, mark: int, least: int) -> int:
    """How far to raise a mark; UNBOUNDED where no ceiling has asked for one."""
    if ceiling == UNBOUNDED:
        return UNBOUNDED if mark in (-1, UNBOUNDED) else max(mark, taken + least)
    return max(taken, min(ceiling, taken + block(ceiling, least)))


def _alarm(mark: int, ceiling: int, least: int) -> int:
    """When the mark is to be raised again. At the ceiling it never is."""
    if mark == UNBOUNDED:
        return NEVER
    return mark if mark >= ceiling else max(0, mark - block(ceiling, least) // 2)


def _identity(account: Account) -> _Identity:
    return account.whose, account.kind, account.name, account.period


def _stored(mark: int) -> int:
    return 0 if mark == UNBOUNDED else mark


def _mark(account: Account, tokens: int, nanos: int, wall: float) -> Mark:
    tenant, name = account.name
    return Mark(
        scope=account.whose,
        tenant=tenant,
        name=name,
        period=account.kind.removeprefix(" a ") or "run",
        number=account.period,
        tokens=min(tokens, UNBOUNDED),
        nanos=min(nanos, UNBOUNDED),
        at=wall,
    )
