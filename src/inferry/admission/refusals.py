"""Refusals of jobs by quotas and budgets, and their errors."""

from math import inf

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.budgets import Account
from inferry.admission.kv_quota import KvExcess
from inferry.domain.errors import (
    GatewayError,
    KvQuotaExceeded,
    KvQuotaTooSmall,
    RateLimited,
    RunBudgetExhausted,
    TenantBudgetExhausted,
    TenantConcurrency,
)

_QUOTAS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "max_concurrent": "concurrent calls",
    "max_concurrent_runs": "concurrent runs",
}


class Refusal:
    """The limit that refuses a job: an exhausted account or an exhausted quota."""

    __slots__ = ("_account", "_excess", "_in_money", "_needed", "_owner", "_quota", "_wait_s")

    def __init__(
        self,
        *,
        account: Account | None = None,
        in_money: bool = False,
        wait_s: float = 0.0,
        quota: str = "",
        owner: OwnerAccounts | None = None,
        needed: int = 0,
        excess: KvExcess | None = None,
    ) -> None:
        self._account = account
        self._in_money = in_money
        self._wait_s = wait_s
        self._quota = quota
        self._owner = owner
        self._needed = needed
        self._excess = excess

    @property
    def limit(self) -> str:
        """The limit's name, as in the configuration and in metrics."""
        account = self._account
        if account is None:
            return self._quota
        return f"{account.kind.removeprefix(' a ') or 'run'}_{'money' if self._in_money else 'token'}_ceiling"

    def error(self) -> GatewayError:
        account = self._account
        if account is not None:
            exhausted = RunBudgetExhausted if account.owner_kind == "run" else TenantBudgetExhausted
            return exhausted(account.describe_limit(self._in_money))
        assert self._owner is not None
        quotas = self._owner.quotas
        limits = self._owner.limits
        retry_after_s = None if self._wait_s == inf else self._wait_s
        if self._excess is not None and self._quota != "max_concurrent_runs":
            holder = "run" if self._quota == "run_max_kv_tokens" else quotas.owner_kind
            refused_by = KvQuotaTooSmall if retry_after_s is None else KvQuotaExceeded
            return refused_by(
                f"the call would hold {self._needed:,} KV tokens; the {holder}'s limit is {self._excess.value:,}, "
                f"{self._excess.in_use:,} in use",
                retry_after_s=retry_after_s,
            )
        message = f"the {quotas.owner_kind}'s limit of {getattr(limits, self._quota)} {_QUOTAS[self._quota]} is reached"
        if self._quota in ("max_concurrent", "max_concurrent_runs"):
            return TenantConcurrency(message, retry_after_s=retry_after_s)
        return RateLimited(message, retry_after_s=retry_after_s)
