"""The authority over shared limits, in memory: the reference for the script that Redis runs.

Rules:
- settled + held never exceeds a ceiling by a grant. A ceiling that was lowered below it gets no further grant.
- A grant beyond what is needed is at most 1/32 of what is left, so that gateways share the rest of a limit.
- An authority that has lost its state answers nothing until `rebuild`. The database holds every budget grant before it
  is used, so what is rebuilt is never below what may be spent.
- After a rebuild other than the first, buckets start empty, and slots are granted once every live gateway has reported
  what it uses: one TTL later.
"""

from collections.abc import Sequence
from typing import NamedTuple

from inferry.domain.shared_limits import (
    CONTENTION_MS,
    REBUILD_MS,
    REBUILDING,
    Answer,
    Ask,
    Exchanged,
    Holding,
    LimitKind,
)

EXTRA_DIVISOR = 32
"""A grant exceeds the need by at most this fraction (1/32) of what is left."""
MINUTE_MS = 60_000


class _Account:
    __slots__ = ("at_ms", "held", "settled", "short_ms")

    def __init__(self, settled: float, at_ms: int) -> None:
        self.settled = settled
        self.at_ms = at_ms
        self.held: dict[str, int] = {}
        self.short_ms: dict[str, int] = {}


class _Last(NamedTuple):
    number: int
    generation: int
    answers: list[Answer]


class InMemoryAuthority:
    """Time is an argument, in milliseconds on the authority's own clock."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self.lose_state()

    def lose_state(self) -> None:
        """The process was restarted."""
        self.generation = self._rebuilt_by_ms = 0
        self._built_ms = 0
        self._accounts: dict[str, _Account] = {}
        self._last: dict[str, _Last] = {}
        self._alive_until: dict[str, int] = {}

    def rebuild(
        self, generation: int, spending: Sequence[tuple[str, int, int]], holdings: Sequence[Holding], now_ms: int
    ) -> None:
        if generation <= self.generation:
            return
        self.lose_state()
        self.generation, self._built_ms = generation, now_ms
        for name, settled, _ in spending:
            self._accounts[name] = _Account(settled, now_ms)
        for one in holdings:
            account = self._accounts.setdefault(one.account, _Account(0, now_ms))
            _hold(account, one.holder, one.amount)

    def exchange(self, holder: str, number: int, generation: int, asks: Sequence[Ask], now_ms: int) -> Exchanged:
        if not self.generation:
            if now_ms < self._rebuilt_by_ms:
                return Exchanged(REBUILDING, None)
            self._rebuilt_by_ms = now_ms + REBUILD_MS
            return Exchanged(0, None)
        if generation != self.generation:
            return Exchanged(self.generation, None)
        self._alive_until[holder] = now_ms + self._ttl_ms
        last = self._last.get(holder)
        if last is not None and last.number == number:
            return Exchanged(self.generation, last.answers)
        answers = [self._answer(holder, ask, now_ms) for ask in asks]
        self._last[holder] = _Last(number, generation, answers)
        return Exchanged(self.generation, answers)

    def totals(self, account: str) -> tuple[int, int]:
        """What is settled and what is held."""
        found = self._accounts.get(account)
        return (0, 0) if found is None else (int(found.settled), sum(found.held.values()))

    def held_by(self, account: str, holder: str) -> int:
        found = self._accounts.get(account)
        return 0 if found is None else found.held.get(holder, 0)

    def _answer(self, holder: str, ask: Ask, now_ms: int) -> Answer:
        match ask.kind:
            case LimitKind.BUDGET:
                return self._budget(holder, ask, now_ms)
            case LimitKind.RATE:
                return self._rate(ask, now_ms)
            case LimitKind.SLOTS:
                return self._slots(holder, ask, now_ms)

    def _budget(self, holder: str, ask: Ask, now_ms: int) -> Answer:
        account = self._accounts.get(ask.account)
        if account is None:
            account = self._accounts[ask.account] = _Account(0, now_ms)
        if not account.held:
            account.settled = max(account.settled, ask.base)
        account.settled += ask.spent
        others = sum(account.held.values()) - account.held.get(holder, 0)
        held = account.held.get(holder, 0) - ask.spent - ask.returned
        granted = grant_size(ask, ask.limit - int(account.settled) - others - held)
        _hold(account, holder, held + granted)
        is_wanted = any(now_ms - at < CONTENTION_MS for one, at in account.short_ms.items() if one != holder)
        if granted < ask.need:
            account.short_ms[holder] = now_ms
        else:
            account.short_ms.pop(holder, None)
        return Answer(granted, held + granted, others, int(account.settled), int(is_wanted))

    def _rate(self, ask: Ask, now_ms: int) -> Answer:
        account = self._accounts.get(ask.account)
        if account is None:
            is_first = self.generation == 1 or now_ms - self._built_ms >= MINUTE_MS
            level = ask.limit if is_first else ask.limit * (now_ms - self._built_ms) / MINUTE_MS
            account = self._accounts[ask.account] = _Account(level, now_ms)
        refill = max(0, now_ms - account.at_ms) * ask.limit / MINUTE_MS
        account.settled = min(float(ask.limit), account.settled + refill + ask.returned)
        account.at_ms = max(now_ms, account.at_ms)
        granted = grant_size(ask, int(account.settled))
        account.settled -= granted
        return Answer(granted, 0, 0, int(account.settled))

    def _slots(self, holder: str, ask: Ask, now_ms: int) -> Answer:
        account = self._accounts.setdefault(ask.account, _Account(0, now_ms))
        for name in [one for one in account.held if self._alive_until.get(one, 0) <= now_ms]:
            del account.held[name]
        others = sum(account.held.values()) - account.held.get(holder, 0)
        is_settling = self.generation > 1 and now_ms - self._built_ms < self._ttl_ms
        # A gateway that was cut off may use slots that others were granted meanwhile: it keeps what they leave.
        kept = max(0, min(ask.base, ask.limit - others))
        granted = 0 if is_settling else grant_size(ask, ask.limit - others - kept)
        _hold(account, holder, kept + granted)
        return Answer(granted, kept + granted, others, 0)


def grant_size(ask: Ask, left: int) -> int:
    """What is granted of what is left: all that is needed where possible, and a little more of it."""
    if left <= 0 or ask.want <= 0:
        return 0
    return min(left, max(ask.need, min(ask.want, left // EXTRA_DIVISOR)))


def _hold(account: _Account, holder: str, amount: int) -> None:
    if amount > 0:
        account.held[holder] = amount
    else:
        account.held.pop(holder, None)
