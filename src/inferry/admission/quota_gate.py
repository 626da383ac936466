"""The quota gate: whether a job is admitted, how much output it may generate, and what it cost.

One gate serves one gateway and has one owner, which calls `admit` once for every job, `renew` while the job generates,
and `settle` once at its end. All quotas and accounts of a job are evaluated (`evaluation`) before any of them changes,
so a refusal leaves no trace. Time is an argument: `now` is the gateway's clock, `wall` is Unix time.

Callers without any limit share one permit per model, and nothing is counted for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from inferry.admission.account_restorer import AccountRestorer
from inferry.admission.accounts import OwnerAccounts, OwnerRegistry, RunAccounts
from inferry.admission.budget_burn import BudgetBurn, burn_by_period
from inferry.admission.budgets import (
    NO_THRESHOLD,
    UNBOUNDED,
    Account,
    Calendar,
    Tariff,
    account_report,
    charge_ancestors,
    headroom,
    lease_size,
)
from inferry.admission.evaluation import apply_run_ceilings, evaluate, find_accounts, has_limits
from inferry.admission.gpu_leases import lease_gpu_time
from inferry.admission.grants import GrantTracker
from inferry.admission.permits import Permit
from inferry.admission.rate_limit_status import rate_limit_status
from inferry.admission.refusals import Refusal
from inferry.admission.reports import AccountReport, RateLimitStatus
from inferry.admission.shared_quotas import share_quotas
from inferry.admission.watermarks import WatermarkTracker
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, LedgerUnavailable
from inferry.domain.jobs import InferenceJob
from inferry.domain.prices import Price
from inferry.domain.spending import Spending, Watermark
from inferry.domain.streams import Usage

LEASE_TOKENS: Final = 256
MAX_OWNERS: Final = 10_000
MAX_RUNS: Final = 100_000
MAX_BURN_RUNS: Final = 1000
"""Most recently used runs that `budget_burn` looks at."""
RUN_IDLE_TIMEOUT_S: Final = 86_400.0
"""A run without calls for this long is considered over: its account is forgotten."""


class QuotaGate:
    """Quotas and budgets of all tenants.

    - `refused`: refusals by limit; `shadow_refused`: the same for tenants whose limits are only reported.
    - `overrun_tokens`, `overrun_nanos`: usage beyond leases and ceilings, which was charged to no account.
    """

    def __init__(
        self,
        prices: Mapping[str, Price],
        *,
        lease_tokens: int = LEASE_TOKENS,
        max_owners: int = MAX_OWNERS,
        max_runs: int = MAX_RUNS,
        run_idle_s: float = RUN_IDLE_TIMEOUT_S,
        watermarks: WatermarkTracker | None = None,
    ) -> None:
        self.watermarks = watermarks
        self._uses_watermarks = watermarks is not None
        self.lease_tokens = lease_tokens
        self.refused: dict[str, int] = {}
        self.shadow_refused: dict[str, int] = {}
        self.overrun_tokens = 0
        self.overrun_nanos = 0
        self._calendar = Calendar()
        self._grants = watermarks if isinstance(watermarks, GrantTracker) else None
        on_new = None if self._grants is None else share_quotas
        self._tenants, self._keys = OwnerRegistry(max_owners, on_new), OwnerRegistry(max_owners, on_new)
        self._runs = RunAccounts(max_runs, run_idle_s, uses_watermarks=self._uses_watermarks)
        self._account_restorer = AccountRestorer(
            self._tenants, self._keys, self._runs, self._calendar, run_idle_s, uses_watermarks=self._uses_watermarks
        )
        self._tariffs = {model: Tariff(price) for model, price in prices.items()}
        self._default_tariff = Tariff(prices.get("*"))
        self.charges_gpu_time = any(price.gpu_hour is not None and not price.is_per_token for price in prices.values())
        self._unlimited_permits = {model: Permit(tariff) for model, tariff in self._tariffs.items()}
        self._unlimited_default_permit = Permit(self._default_tariff)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def admit(self, job: InferenceJob, caller: Caller, lineage: Sequence[str], now: float, wall: float) -> Permit:
        """Admit the job. `lineage` is its run, that run's parent, and so on up to the root.

        Raises RateLimited, TenantConcurrency, KvQuotaExceeded, KvQuotaTooSmall, or the error of an exhausted budget.
        """
        tenant, key = caller.tenant, caller.key
        if not has_limits(tenant.limits) and (key is None or not has_limits(key.limits)):
            return self._unlimited_permits.get(job.route.model, self._unlimited_default_permit)
        if not self._calendar.day_starts_at <= wall < self._calendar.day_ends_at:
            self._calendar.advance_to(wall)
        permit = Permit(self._tariffs.get(job.route.model, self._default_tariff))
        owner = self._tenants.get(tenant.name)
        if owner is None:
            owner = OwnerAccounts(tenant.name, "tenant", uses_watermarks=self._uses_watermarks)
            self._tenants.add(tenant.name, owner, self._calendar, now)
        if owner.limits is not tenant.limits:
            owner.set_limits(tenant.limits, now)
        permit.tenant = owner
        if key is not None:
            owner = self._keys.get(key.key_id)
            if owner is None:
                owner = OwnerAccounts(tenant.name, "key", key.key_id, uses_watermarks=self._uses_watermarks)
                self._keys.add(key.key_id, owner, self._calendar, now)
            if owner.limits is not key.limits:
                owner.set_limits(key.limits, now)
            permit.key = owner
        find_accounts(permit, self._runs, self._calendar, tenant.name, lineage or (job.run_id,))
        refusal = evaluate(permit, job, self.lease_tokens, now)
        if tenant.shadow:
            self._admit_in_shadow(permit, refusal, now)
        elif refusal is not None:
            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1
            raise refusal.error()
        else:
            if len(permit.runs) == 1 and job.run_id == job.job_id:
                # A call without a run id is a run of its own. No later call joins it, so it needs no watermark.
                permit.runs[0].token_threshold = permit.runs[0].nano_threshold = NO_THRESHOLD
            for account in permit.leased_accounts:
                account.committed_tokens += permit.leased_tokens
                account.committed_nanos += permit.leased_nanos
                if (
                    account.committed_tokens > account.token_threshold
                    or account.committed_nanos > account.nano_threshold
                ):
                    self._request_watermark(permit, account)
            self._commit(permit, now, charges_quotas=True)
        if self._grants is not None:
            self._grants.request_quotas(permit, waits=not tenant.shadow)
        if permit.runs and job.run_id == job.job_id:
            permit.runs[0].is_ended = True  # no other call will name this run
        return permit

    def renew(self, permit: Permit, written: int) -> int:
        """Extend the lease of a job that has generated `written` tokens; return how many it may generate in total.

        The extension is a small fraction of what is left, so that concurrent calls share the rest.
        """
        leased_accounts, granted_tokens = permit.leased_accounts, permit.granted_tokens
        if not leased_accounts or permit.is_settled:
            return granted_tokens
        # An engine may slightly exceed the client's limit, but never what is left of a budget.
        max_output = permit.max_output if permit.is_capped or written < permit.max_output else written
        wanted = max_output - granted_tokens
        if wanted <= 0:
            return granted_tokens
        overrun = min(written - granted_tokens, wanted)
        apply_run_ceilings(permit)
        left, account, in_money = headroom(leased_accounts, permit.tariff)
        if left < wanted:
            permit.binding_account, permit.bound_in_money = account, in_money
            permit.is_watermark_blocked = False
            if left <= 0:
                return granted_tokens
        if overrun > 0:
            granted = overrun if overrun < left else left
            granted += lease_size(left - granted, min(self.lease_tokens, wanted - granted))
        else:
            granted = lease_size(left, self.lease_tokens if self.lease_tokens < wanted else wanted)
        nanos = permit.tariff.output(granted)
        is_covered = True
        for account in leased_accounts:
            account.committed_tokens += granted
            account.committed_nanos += nanos
            if account.committed_tokens > account.token_threshold or account.committed_nanos > account.nano_threshold:
                is_covered = False
        if not is_covered:
            assert self.watermarks is not None, "thresholds exist only with watermarks"
            granted, nanos = self.watermarks.trim_to_watermarks(permit, granted, nanos)
        permit.leased_tokens += granted
        permit.leased_nanos += nanos
        permit.granted_tokens = granted_tokens = granted_tokens + granted
        return granted_tokens

    def lease_gpu_time(self, permit: Permit, gpu_seconds: float) -> bool:
        """Raise the money lease of a running job to the cost of its GPU time; False where its budgets leave less."""
        is_within = lease_gpu_time(permit, gpu_seconds)
        for account in permit.leased_accounts:
            if account.committed_nanos > account.nano_threshold:
                self._request_watermark(permit, account)
        return is_within

    def settle(self, permit: Permit, usage: Usage | None, now: float, wall: float) -> int | None:
        """Charge an ended job and return the rest of its lease. `usage` is None for a job that never ran.

        Returns the cost in billionths; None where the model has no price. The job is charged to the day and month in
        which it was leased, whatever `wall` is now. A second call changes nothing.
        """
        tariff = permit.tariff
        if usage is None:
            cost, tokens = None if tariff.price is None else 0, 0
        else:
            cost = tariff.cost(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.gpu_seconds)
            tokens = usage.prompt_tokens + usage.output_tokens
        tenant, key = permit.tenant, permit.key
        if tenant is None:
            return cost  # the shared permit: nothing is counted
        if permit.is_settled:
            return permit.cost_nanos
        permit.is_settled = True
        permit.cost_nanos = cost
        nanos = cost or 0
        if tokens <= permit.leased_tokens and nanos <= permit.leased_nanos:
            rest_tokens, rest_nanos = permit.leased_tokens - tokens, permit.leased_nanos - nanos
            for account in permit.leased_accounts:
                account.spent_tokens += tokens
                account.spent_nanos += nanos
                account.committed_tokens -= rest_tokens
                account.committed_nanos -= rest_nanos
        elif permit.leased_accounts:
            self._charge_overrun(permit, tokens, nanos)
        for account in permit.charge_only_accounts:
            account.record_spending(tokens, nanos)
        if permit.runs:
            if permit.runs[-1].parent is not None:
                charge_ancestors(permit.runs, tokens, nanos)
            for account in permit.runs:
                self._runs.release(account)
        for bucket in permit.tokens:
            bucket.settle(permit.reserved - tokens, now)
        if usage is None:
            for bucket in permit.requests:
                bucket.settle(1, now)
        for kv in permit.kv_quotas:
            kv.release(permit.run_id, permit.kv_tokens, now, is_last_call=permit.is_only_call)
        tenant.quotas.release(now)
        if key is not None:
            key.quotas.release(now)
        return cost

    def exhausted_error(self, permit: Permit) -> GatewayError:
        """The error of a job that gets no further lease."""
        if permit.is_watermark_blocked and self.watermarks is not None:
            return self.watermarks.uncovered_error(permit) or LedgerUnavailable("the budget was not extended in time")
        account, in_money = permit.binding_account, permit.bound_in_money
        if account is None:
            _, account, in_money = headroom(permit.leased_accounts, permit.tariff)
        assert account is not None, "a job without leases is never stopped"
        return Refusal(account=account, in_money=in_money).error()

    # -- reports -----------------------------------------------------------------------------------------------------

    def rate_limit_status(self, caller: Caller, now: float) -> RateLimitStatus | None:
        """The remaining requests and tokens per minute; None where neither is limited."""
        limited = [(caller.tenant.limits, self._tenants.get(caller.tenant.name))]
        if caller.key is not None:
            limited.append((caller.key.limits, self._keys.get(caller.key.key_id)))
        return rate_limit_status(limited, now)

    def report(self, tenant: str) -> list[AccountReport]:
        """The tenant's accounts of day and month, then those of its keys."""
        owner = self._tenants.get(tenant)
        found = [(None, owner)] if owner is not None else []
        return [
            account_report(account, key_id=key_id)
            for key_id, one in [*found, *self._keys.entries_of_tenant(tenant)]
            for account, period in ((one.day, self._calendar.day), (one.month, self._calendar.month))
            if account is not None and account.period == period
        ]

    def run_report(self, tenant: str, run_id: str) -> AccountReport | None:
        """What a run and its sub-runs have spent and leased; None for a run without a ceiling or not known."""
        account = self._runs.find(tenant, run_id)
        return None if account is None else account_report(account, run_id=run_id)

    def budget_burn(self, wall: float) -> dict[str, BudgetBurn]:
        """By period, the account that is furthest ahead of it: of tenants and keys, and of recently used runs."""
        self._calendar.advance_to(wall)
        owners = [*self._tenants.all(), *self._keys.all()]
        return burn_by_period(owners, self._runs.newest(MAX_BURN_RUNS), self._calendar, wall)

    @property
    def owner_count(self) -> int:
        """Tenants and keys with accounts."""
        return len(self._tenants) + len(self._keys)

    @property
    def run_count(self) -> int:
        """Runs with accounts."""
        return len(self._runs)

    # -- state -------------------------------------------------------------------------------------------------------

    def end_run(self, tenant: str, run_id: str) -> None:
        """Forget the account of a finished run, once its last job has ended."""
        self._runs.end(tenant, run_id)

    def free_run_slot(self, tenant: str, run_id: str) -> None:
        """The run was finished or cancelled: it counts as concurrent only while calls of it are in flight."""
        if (owner := self._tenants.get(tenant)) is not None:
            for one in (owner, *(key for _, key in self._keys.entries_of_tenant(tenant))):
                one.kv.end_run(run_id)

    def forget_idle(self, now: float, limit: int = 1000) -> int:
        """Forget accounts of idle runs; returns how many."""
        return self._runs.forget_idle(now, limit)

    def restore(self, spent: Iterable[Spending], now: float = 0.0) -> None:
        """Count the ledger's spending. Spending that is counted already is not counted again."""
        for one in spent:
            self._account_restorer.restore_spending(one, now)

    def restore_watermarks(self, watermarks: Iterable[Watermark], now: float, wall: float) -> int:
        """Count the most that a killed process may have used as spent; return the number of accounts.

        Call it after `restore`.
        """
        counted = 0
        if self.watermarks is None:
            return 0
        for watermark in watermarks:
            account = self._account_restorer.account_for(watermark, now, wall)
            if account is None:
                self.watermarks.discard(watermark)
            else:
                counted += 1
                self.watermarks.restore_account(account, watermark, now)
        return counted

    def rewrite_watermarks(self) -> None:
        """Write the watermarks of all accounts again, to a database that was replaced."""
        if self.watermarks is not None:
            self.watermarks.rewrite_all(self._account_restorer.all_accounts())

    def _request_watermark(self, permit: Permit, account: Account) -> None:
        """Request a higher watermark for the account; the job waits for the batch that writes it."""
        assert self.watermarks is not None, "thresholds exist only with watermarks"
        watermark_batch = self.watermarks.request_raise(account)
        if watermark_batch > permit.watermark_batch:
            permit.watermark_batch = watermark_batch

    def _charge_overrun(self, permit: Permit, tokens: int, nanos: int) -> None:
        """Charge a job that used more than it had leased, as far as accounts allow; count the rest as overrun."""
        apply_run_ceilings(permit)
        unpaid = [
            account.charge(tokens, nanos, permit.leased_tokens, permit.leased_nanos)
            for account in permit.leased_accounts
        ]
        self.overrun_tokens += max(tokens for tokens, _ in unpaid)
        self.overrun_nanos += max(nanos for _, nanos in unpaid)
        for account in permit.leased_accounts:
            if account.committed_tokens > account.token_threshold or account.committed_nanos > account.nano_threshold:
                self._request_watermark(permit, account)

    # -- parts of admitting ------------------------------------------------------------------------------------------

    def _commit(self, permit: Permit, now: float, *, charges_quotas: bool) -> None:
        """Count the job, and take the evaluated amounts from its buckets."""
        if permit.runs:
            self._commit_runs(permit.runs, now)
        for owner in (permit.tenant, permit.key):
            if owner is None:
                continue
            quotas = owner.quotas
            quotas.acquire(now)
            if charges_quotas:
                if quotas.requests is not None:
                    quotas.requests.take(1)
                    permit.requests.append(quotas.requests)
                if quotas.tokens is not None:
                    quotas.tokens.take(permit.reserved)
                    permit.tokens.append(quotas.tokens)
                if owner.kv.is_limited:
                    owner.kv.acquire(permit.run_id, permit.kv_tokens)
                    permit.kv_quotas.append(owner.kv)

    def _commit_runs(self, runs: list[Account], now: float) -> None:
        """Count the job in the accounts of its run and of all its ancestors."""
        for account in runs:
            self._runs.acquire(account, now)
        for level in range(len(runs) - 1, 0, -1):
            child, account = runs[level - 1], runs[level]
            if child.parent is not account:
                # The run has just got its parent: what it has spent counts for all ancestors from here on.
                child.parent = account
                for one in runs[level:]:
                    self.overrun_tokens += one.charge(child.spent_tokens, child.spent_nanos, 0, 0)[0]

    def _admit_in_shadow(self, permit: Permit, refusal: Refusal | None, now: float) -> None:
        """Admit a job of a tenant whose limits are only reported. A job that would have been refused takes no quota."""
        if refusal is not None:
            self.shadow_refused[refusal.limit] = self.shadow_refused.get(refusal.limit, 0) + 1
        permit.charge_only_accounts = permit.charge_only_accounts + permit.leased_accounts
        permit.leased_accounts = []
        permit.root = None
        permit.granted_tokens = permit.max_output = permit.output_cap = UNBOUNDED
        permit.leased_tokens = permit.leased_nanos = 0
        permit.is_capped = False
        self._commit(permit, now, charges_quotas=refusal is None)
