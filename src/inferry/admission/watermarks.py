"""Watermarks: for each account the database holds an upper bound of what it may have used.

The usage of a call is written to the ledger after the call ends, so the ledger of a killed process is incomplete. The
watermark is written before the usage: an account's committed amount (spent + leased) never exceeds its watermark in the
database, except where an engine used more than was leased. After a crash an account starts at its watermark, so its
ceiling holds across restarts. The part of the budget that is lost is what the watermark covered and no call used: at
most one block, and the leases held when the watermark was raised.

A watermark is raised by one block when half a block is left, so that calls rarely wait for a write. Once all rows of an
account without leases are in the ledger, its watermark is released, and a crash costs this account nothing.

Pure: the owner calls `take_batch`, writes the batch in one transaction, then calls `batch_written`. At most one batch
is in flight.
"""

from collections.abc import Iterable
from typing import Final

from inferry.admission.budgets import NO_THRESHOLD, UNBOUNDED, Account
from inferry.admission.permits import Permit
from inferry.domain.errors import GatewayError
from inferry.domain.spending import Watermark, WatermarkBatch

MIN_BLOCK_TOKENS = 4096
MIN_BLOCK_NANOS = 1_000_000
BLOCKS_PER_CEILING: Final = 64
"""A block is the ceiling divided by this, and at least the values above (tokens, nanos)."""
WATERMARK_IDLE_S: Final = 10.0
"""A watermark is released at the earliest this long after it was last raised."""
RELEASE_BATCH: Final = 1000

_Identity = tuple[str, str, tuple[str, str], int]


class WatermarkTracker:
    """Decides which watermarks are written. `written` is the number of the last batch in the database."""

    def __init__(self) -> None:
        self.written = 0
        self._next_batch = 1
        self._due: dict[Account, None] = {}
        self._in_flight: list[Account] = []
        self._stored_at: dict[Account, float] = {}
        self._idle_since: dict[Account, tuple[int, int, int]] = {}
        self._released: dict[Account, None] = {}
        self._discarded: list[Watermark] = []
        # A run that was forgotten and is used again has a new account. Its watermark must outlive that of the old one.
        self._account_by_identity: dict[_Identity, Account] = {}

    def __len__(self) -> int:
        """The number of watermarks in the database, as far as is known."""
        return len(self._stored_at)

    @property
    def is_due(self) -> bool:
        """Whether there is a batch to write."""
        return bool(self._due or self._released or self._discarded)

    def request_raise(self, account: Account) -> int:
        """Have the watermark of an account above its threshold raised.

        Returns the number of the batch that must be written before the committed amount may be used; 0 if the present
        watermark covers it.
        """
        is_covered = (
            account.committed_tokens <= account.token_watermark and account.committed_nanos <= account.nano_watermark
        )
        is_requested = (
            account.committed_tokens <= account.requested_tokens and account.committed_nanos <= account.requested_nanos
        )
        if account.watermark_batch > self.written and is_requested:
            return 0 if is_covered else account.watermark_batch
        self._due[account] = None
        self._account_by_identity[_identity(account)] = account
        return 0 if is_covered else self._next_batch

    def trim_to_watermarks(self, permit: Permit, granted: int, nanos: int) -> tuple[int, int]:
        """Reduce a committed lease to what watermarks cover, and request higher ones; return its tokens and nanos.

        A running job does not wait for the write: it tries to renew its lease with every token.
        """
        covered = granted
        for account in permit.leased_accounts:
            self.request_raise(account)
            left = account.token_watermark - account.committed_tokens + granted
            if left < covered:
                covered = left
            if account.nano_watermark != UNBOUNDED:
                left = permit.tariff.affordable_tokens(account.nano_watermark - account.committed_nanos + nanos)
                if left < covered:
                    covered = left
        if covered < 0:
            covered = 0
        cost = permit.tariff.output(covered) if covered else 0
        if covered < granted:
            for account in permit.leased_accounts:
                account.committed_tokens -= granted - covered
                account.committed_nanos -= nanos - cost
        permit.is_watermark_blocked = covered == 0
        return covered, cost

    def uncovered(self, permits: list[Permit]) -> set[int]:
        """Of jobs whose batch is written, those that may not run: none, since it covers all that was leased before."""
        return set()

    def uncovered_error(self, permit: Permit) -> GatewayError | None:
        """Why a job that is not covered is refused; None where it is to wait for the next batch."""
        return None

    def take_batch(self, wall: float) -> WatermarkBatch:
        """The watermarks to write now, in one transaction."""
        number, self._next_batch = self._next_batch, self._next_batch + 1
        upserts: list[Watermark] = []
        deletes = self._discarded
        self._discarded = []
        for account in self._released:
            if account in self._due:
                continue
            if account.leased_tokens or account.leased_nanos:
                self._stored_at[account] = self._stored_at.get(account, 0.0)
                continue
            identity = _identity(account)
            if self._account_by_identity.get(identity) is not account:
                continue
            del self._account_by_identity[identity]
            if account.exceeds_ledger:
                upserts.append(_watermark(account, account.spent_tokens, account.spent_nanos, wall))
            else:
                deletes.append(_watermark(account, 0, 0, wall))
            account.clear_watermark()
        self._released = {}
        self._in_flight = list(self._due)
        self._due = {}
        for account in self._in_flight:
            tokens, nanos = account.token_watermark, account.nano_watermark
            account.requested_tokens = _target(
                account.committed_tokens, account.token_ceiling, tokens, MIN_BLOCK_TOKENS
            )
            account.requested_nanos = _target(account.committed_nanos, account.nano_ceiling, nanos, MIN_BLOCK_NANOS)
            account.watermark_batch = number
            upserts.append(
                _watermark(
                    account, _stored_value(account.requested_tokens), _stored_value(account.requested_nanos), wall
                )
            )
        return WatermarkBatch(number, upserts, deletes)

    def batch_written(self, number: int, now: float) -> None:
        """The batch is in the database: its watermarks apply."""
        self.written = number
        for account in self._in_flight:
            tokens, nanos = account.requested_tokens, account.requested_nanos
            account.token_watermark, account.nano_watermark = tokens, nanos
            account.token_threshold = _raise_threshold(tokens, account.token_ceiling, MIN_BLOCK_TOKENS)
            account.nano_threshold = _raise_threshold(nanos, account.nano_ceiling, MIN_BLOCK_NANOS)
            self._stored_at.pop(account, None)
            self._stored_at[account] = now
        self._in_flight = []

    def release_idle(
        self, now: float, recorded: int, settled: int, idle_s: float = WATERMARK_IDLE_S, limit: int = RELEASE_BATCH
    ) -> None:
        """Release watermarks of accounts without leases once all rows of their spending are in the ledger.

        `recorded` is the number of rows passed to the ledger so far, `settled` the number of rows that it has written.
        """
        for account, stored_at in list(self._stored_at.items())[:limit]:
            if now - stored_at < idle_s:
                break
            if (
                account.leased_tokens
                or account.leased_nanos
                or account.watermark_batch > self.written
                or account in self._due
            ):
                self._idle_since.pop(account, None)
                del self._stored_at[account]
                self._stored_at[account] = now
                continue
            recorded_rows, tokens, nanos = self._idle_since.get(account, (-1, 0, 0))
            if recorded_rows < 0 or (tokens, nanos) != (account.spent_tokens, account.spent_nanos):
                self._idle_since[account] = (recorded, account.spent_tokens, account.spent_nanos)
                recorded_rows = recorded
            if settled >= recorded_rows:
                del self._stored_at[account], self._idle_since[account]
                self._released[account] = None

    def retain_all(self) -> None:
        """Rows were lost, so the ledger no longer holds all spending: keep every watermark."""
        for account in (*self._stored_at, *self._due, *self._in_flight, *self._released):
            account.exceeds_ledger = True

    def rewrite_all(self, accounts: Iterable[Account]) -> None:
        """The database was replaced: write the watermarks of all accounts with spending or leases, and keep them."""
        for account in accounts:
            if account.committed_tokens or account.committed_nanos:
                account.exceeds_ledger = True
                account.clear_watermark()
                self._stored_at.pop(account, None)
                self._account_by_identity[_identity(account)] = account
                if account.leased_tokens or account.leased_nanos:
                    self._due[account] = None
                else:
                    self._released[account] = None

    def restore_account(self, account: Account, watermark: Watermark, now: float) -> None:
        """Restore an account from the watermark of a killed process."""
        if watermark.tokens > account.spent_tokens or watermark.nanos > account.spent_nanos:
            account.exceeds_ledger = True
        account.raise_spent_to(watermark.tokens, watermark.nanos)
        account.token_watermark, account.nano_watermark = watermark.tokens, watermark.nanos
        self._stored_at[account] = now
        self._account_by_identity[_identity(account)] = account

    def discard(self, watermark: Watermark) -> None:
        """Have a watermark deleted whose account can no longer be charged."""
        self._discarded.append(watermark)


def block_size(ceiling: int, minimum: int) -> int:
    """The amount by which a watermark is raised."""
    return max(minimum, ceiling // BLOCKS_PER_CEILING)


def _target(taken: int, ceiling: int, watermark: int, minimum: int) -> int:
    """The next value of a watermark; UNBOUNDED if no ceiling has required one."""
    if ceiling == UNBOUNDED:
        return UNBOUNDED if watermark in (-1, UNBOUNDED) else max(watermark, taken + minimum)
    return max(taken, min(ceiling, taken + block_size(ceiling, minimum)))


def _raise_threshold(watermark: int, ceiling: int, minimum: int) -> int:
    """The committed amount above which the watermark is raised again. At the ceiling it is never raised."""
    if watermark == UNBOUNDED:
        return NO_THRESHOLD
    return watermark if watermark >= ceiling else max(0, watermark - block_size(ceiling, minimum) // 2)


def _identity(account: Account) -> _Identity:
    return account.owner_kind, account.kind, account.name, account.period


def _stored_value(watermark: int) -> int:
    return 0 if watermark == UNBOUNDED else watermark


def _watermark(account: Account, tokens: int, nanos: int, wall: float) -> Watermark:
    tenant, name = account.name
    return Watermark(
        scope=account.owner_kind,
        tenant=tenant,
        name=name,
        period=account.kind.removeprefix(" a ") or "run",
        number=account.period,
        tokens=min(tokens, UNBOUNDED),
        nanos=min(nanos, UNBOUNDED),
        at=wall,
    )
