"""Tokens served to each tenant in the last minutes, for the fairness between tenants.

No metric has a tenant as its label: `/metrics` needs no key, and the number of tenants is not bounded.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 60.0
SLICES: Final = 5
MAX_TENANTS = 10_000
"""Tenants counted in one slice. Further ones are not counted: callers without keys choose their names."""


class TenantService:
    """Tokens by tenant over SLICES slices of SLICE_S seconds. One event loop owns it."""

    def __init__(self) -> None:
        self._slices: deque[dict[str, int]] = deque([{}], maxlen=SLICES)
        self._current = self._slices[0]
        self._next_slice_at = 0.0
        self.weight_of: Callable[[str], float] = lambda tenant: 1.0

    def add(self, tenant: str, tokens: int, now: float) -> None:
        if now >= self._next_slice_at:
            self._begin_slice(now)
        current = self._current
        if tenant in current:
            current[tenant] += tokens
        elif len(current) < MAX_TENANTS:
            current[tenant] = tokens

    def tokens(self, now: float) -> dict[str, int]:
        """Tokens of all tenants with calls that ended in the time covered."""
        if now >= self._next_slice_at:
            self._begin_slice(now)
        totals: dict[str, int] = {}
        for one in self._slices:
            for tenant, tokens in one.items():
                totals[tenant] = totals.get(tenant, 0) + tokens
        return totals

    def fairness(self, now: float) -> float:
        """Jain's index of weighted tokens; 1 without tenants."""
        shares = [tokens / self.weight_of(tenant) for tenant, tokens in self.tokens(now).items()]
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0

    def _begin_slice(self, now: float) -> None:
        passed = int((now - self._next_slice_at) // SLICE_S) + 1 if self._next_slice_at else 1
        for _ in range(min(passed, SLICES)):
            self._slices.append({})
        self._current = self._slices[-1]
        self._next_slice_at = now - now % SLICE_S + SLICE_S
