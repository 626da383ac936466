"""Quotas shared by several gateways: requests and tokens per minute, and concurrent calls.

A gateway takes from what it was granted. A call that needs more is admitted and waits for the next exchange with the
authority; where the authority grants too little, the last calls are refused, with the time at which to retry. Until
then further calls are refused at once.
"""

from math import ceil
from typing import Final

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.permits import Permit
from inferry.admission.quotas import Quotas, TokenBucket
from inferry.admission.refusals import Refusal
from inferry.domain.errors import GatewayError
from inferry.domain.shared_limits import Answer, Ask, LimitKind, account_name
from inferry.domain.tenants import Limits

EXTRA_PER_LIMIT: Final = 64
"""A gateway asks for 1/64 of a limit more than it needs."""
QUOTA_IDLE_S: Final = 2.0
"""What was granted and is unused is returned after this time."""


class SharedBucket(TokenBucket):
    """`level`: what this gateway was granted and has not taken; below 0, what it waits for. It does not refill.

    `left`: what the authority's bucket had at `at`. `refused_until`: it cannot grant more before.
    """

    __slots__ = ("left", "refused_until")

    def __init__(self, per_minute: int, now: float) -> None:
        super().__init__(per_minute, now)
        self.left = self.level
        self.level = 0.0
        self.refused_until = now

    def level_at(self, now: float) -> float:
        return min(float(self.burst), self.left + max(0.0, now - self.at) * self.per_s) + max(0.0, self.level)

    def fill(self, now: float) -> None:
        pass

    def wait_s(self, amount: int, now: float) -> float:
        if not self.burst:
            return super().wait_s(amount, now)
        return max(0.0, self.refused_until - now) if amount > self.level else 0.0

    def settle(self, amount: int, now: float) -> None:
        self.level += amount

    def ask(self, name: str, *, is_idle: bool) -> Ask:
        need = min(self.burst, ceil(max(0.0, -self.level)))
        extra = max(1, self.burst // EXTRA_PER_LIMIT)
        surplus = int(self.level) if is_idle else int(self.level) - 2 * extra
        returned = max(0, surplus)
        self.level -= returned  # nothing is taken from what is being returned
        want = need + extra if need else 0
        return Ask(name, LimitKind.RATE, self.burst, returned=returned, need=need, want=want, keep_s=600)

    def answered(self, ask: Ask, answer: Answer, now: float) -> bool:
        """Take the grant; return whether it was too small."""
        self.level += answer.granted
        self.left, self.at = float(answer.settled), now
        if answer.granted >= ask.need:
            return False
        self.refused_until = now + (ask.need - answer.granted) / self.per_s if self.burst else now
        return True


class SharedQuotas(Quotas):
    """The quotas of one tenant or key at one of several gateways. `held`: concurrent calls that it was granted."""

    __slots__ = ("held", "is_due", "name", "refused_until", "short", "used_at")

    def __init__(self, owner_kind: str, name: tuple[str, str]) -> None:
        super().__init__(owner_kind)
        self.name = name
        self.held = 0
        self.is_due = False
        self.short: set[str] = set()
        self.refused_until = 0.0
        self.used_at = 0.0

    def set_limits(self, limits: Limits, now: float) -> None:
        self.max_concurrent = limits.max_concurrent
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)

    def wait(self, tokens: int, now: float) -> tuple[float, str] | None:
        found = super().wait(tokens, now)
        is_limited = self.max_concurrent is not None and self.in_flight >= self.held
        if found is None and is_limited and now < self.refused_until:
            return self.refused_until - now, "max_concurrent"
        return found

    @property
    def is_short(self) -> bool:
        """Whether more is in use than was granted."""
        return (
            (self.max_concurrent is not None and self.in_flight > self.held)
            or (self.requests is not None and self.requests.level < 0)
            or (self.tokens is not None and self.tokens.level < 0)
        )

    @property
    def has_surplus(self) -> bool:
        levels = [bucket.level for bucket in (self.requests, self.tokens) if bucket is not None]
        return self.held > self.in_flight or not self.in_flight or any(level >= 1 for level in levels)

    def asks(self, now: float) -> list[tuple[str, Ask]]:
        """What is asked of the authority, by limit."""
        found: list[tuple[str, Ask]] = []
        is_idle = now - self.used_at >= QUOTA_IDLE_S
        if self.max_concurrent is not None:
            granted = min(self.held, self.in_flight)
            need = self.in_flight - granted
            extra = self.max_concurrent // EXTRA_PER_LIMIT
            self.held = granted  # nothing more is begun with what is being returned
            name = self._account("calls")
            want = 0 if is_idle else need + extra
            found.append(("max_concurrent", Ask(name, LimitKind.SLOTS, self.max_concurrent, granted, 0, 0, need, want)))
        for limit, bucket in (("requests_per_minute", self.requests), ("tokens_per_minute", self.tokens)):
            if isinstance(bucket, SharedBucket):
                found.append((limit, bucket.ask(self._account(limit), is_idle=is_idle)))
        return found

    def answered(self, limit: str, ask: Ask, answer: Answer, now: float) -> None:
        is_short = False
        if limit == "max_concurrent":
            self.held = answer.held
            is_short = answer.granted < ask.need
            if is_short:
                self.refused_until = now + self.slots_free_in_s(1)
        else:
            bucket = self.requests if limit == "requests_per_minute" else self.tokens
            if isinstance(bucket, SharedBucket):
                is_short = bucket.answered(ask, answer, now)
        if is_short:
            self.short.add(limit)
        else:
            self.short.discard(limit)

    def suspend(self) -> None:
        """Grants may have ended: spend nothing more of them."""
        self.held = min(self.held, self.in_flight)
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.level = min(bucket.level, 0.0)

    def excess(self) -> dict[str, float]:
        """By limit that was granted too little: how much of it is in use without a grant."""
        amounts = {
            "max_concurrent": float(self.in_flight - self.held),
            "requests_per_minute": 0.0 if self.requests is None else -self.requests.level,
            "tokens_per_minute": 0.0 if self.tokens is None else -self.tokens.level,
        }
        return {limit: amounts[limit] for limit in self.short if amounts[limit] > 0}

    def refusal_wait(self, limit: str, now: float) -> float:
        bucket = self.requests if limit == "requests_per_minute" else self.tokens
        until = bucket.refused_until if isinstance(bucket, SharedBucket) else self.refused_until
        return max(0.001, (self.refused_until if limit == "max_concurrent" else until) - now)

    def _account(self, unit: str) -> str:
        tenant, key_id = self.name
        return account_name(self.owner_kind, tenant, key_id, "", 0, unit)


class QuotaGrants:
    """The shared quotas of one gateway, and what of them is in the exchange in flight."""

    def __init__(self) -> None:
        self._quotas: dict[SharedQuotas, None] = {}
        self._lines: list[tuple[SharedQuotas, str, Ask]] = []
        self._now = 0.0

    @property
    def is_due(self) -> bool:
        return any(one.is_due for one in self._quotas)

    def request(self, quotas: SharedQuotas) -> None:
        self._quotas[quotas] = None
        quotas.is_due = True

    def sweep(self, *, is_lost: bool = False) -> None:
        """Return what is unused with the next exchange. `is_lost`: the authority has forgotten what is in use."""
        for quotas in self._quotas:
            if is_lost or quotas.has_surplus:
                quotas.is_due = True

    def take(self, now: float) -> list[Ask]:
        self._lines = []
        for quotas in list(self._quotas):
            if quotas.is_due:
                if quotas.in_flight:
                    quotas.used_at = now
                quotas.is_due = False
                self._lines += [(quotas, limit, ask) for limit, ask in quotas.asks(now)]
                if not quotas.in_flight and now - quotas.used_at >= 2 * QUOTA_IDLE_S:
                    del self._quotas[quotas]  # everything was returned
        return [ask for _, _, ask in self._lines]

    def answered(self, answers: list[Answer], now: float) -> None:
        self._now = now
        for (quotas, limit, ask), answer in zip(self._lines, answers, strict=True):
            quotas.answered(limit, ask, answer, now)
        self._lines = []

    def void(self) -> None:
        """The exchange in flight was lost with the authority's state: ask again."""
        self._lines = []
        self.sweep(is_lost=True)

    def set_valid(self, is_valid: bool) -> None:
        """See `GrantTracker.set_valid`. Meanwhile the authority may have granted to others what is in use here."""
        if is_valid:
            self.sweep(is_lost=True)
        else:
            for quotas in self._quotas:
                quotas.suspend()

    def uncovered(self, permits: list[Permit], found: set[int]) -> None:
        """Add the last permits whose quotas were granted too little."""
        excess: dict[SharedQuotas, dict[str, float]] = {}
        for number in range(len(permits) - 1, -1, -1):
            permit = permits[number]
            for quotas in shared_quotas(permit):
                if quotas.short:
                    amounts = excess.setdefault(quotas, quotas.excess())
                    if any(amount > 0 for amount in amounts.values()):
                        found.add(number)
                        for limit in amounts:
                            amounts[limit] -= permit.reserved if limit == "tokens_per_minute" else 1

    def refusal(self, permit: Permit) -> GatewayError | None:
        for owner in (permit.tenant, permit.key):
            quotas = None if owner is None else owner.quotas
            if isinstance(quotas, SharedQuotas):
                for limit in quotas.excess():
                    return Refusal(wait_s=quotas.refusal_wait(limit, self._now), quota=limit, owner=owner).error()
        return None


def share_quotas(owner: OwnerAccounts) -> None:
    """Have the quotas of a new owner granted by the authority."""
    owner.quotas = SharedQuotas(owner.quotas.owner_kind, owner.name)


def shared_quotas(permit: Permit) -> list[SharedQuotas]:
    owners = (permit.tenant, permit.key)
    return [one.quotas for one in owners if one is not None and isinstance(one.quotas, SharedQuotas)]


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return SharedBucket(per_minute, now)
    bucket.resize(per_minute)
    return bucket
