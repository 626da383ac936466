"""Whether quotas and budgets admit a job, or which one refuses it. Changes neither: the gate commits afterwards."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from inferry.admission.accounts import RunAccounts
from inferry.admission.budgets import Calendar, headroom, lease_size
from inferry.admission.permits import Permit
from inferry.admission.refusals import Refusal
from inferry.domain.callers import Caller
from inferry.domain.jobs import InferenceJob
from inferry.domain.tenants import Limits

_counted: Final = attrgetter(
    "requests_per_minute", "tokens_per_minute", "max_concurrent", "max_concurrent_runs", "max_kv_tokens",
    "run_max_kv_tokens", "run_token_ceiling", "run_money_ceiling",
    "day_token_ceiling", "month_token_ceiling", "day_money_ceiling", "month_money_ceiling",
)  # fmt: skip
_NOTHING_COUNTED: Final = _counted(Limits())


def has_limits(limits: Limits) -> bool:
    """Whether any quota or ceiling is set."""
    return _counted(limits) != _NOTHING_COUNTED


def limits_runs(caller: Caller) -> bool:
    """Whether a ceiling of runs applies to calls of the caller."""
    tenant, key = caller.tenant, caller.key
    if tenant.shadow:
        return False
    return _has_run_ceiling(tenant.limits) or (key is not None and _has_run_ceiling(key.limits))


def _has_run_ceiling(limits: Limits) -> bool:
    return limits.run_token_ceiling is not None or limits.run_money_ceiling is not None


def find_accounts(permit: Permit, runs: RunAccounts, calendar: Calendar, tenant: str, lineage: Sequence[str]) -> None:
    """Set the permit's accounts: those that limit the job, and those that it only charges."""
    owner, key, leased_accounts = permit.tenant, permit.key, permit.leased_accounts
    permit.run_id = lineage[-1]
    assert owner is not None
    if owner.limits_runs or (key is not None and key.limits_runs):
        get_or_new = runs.get_or_new
        if len(lineage) > 1:
            permit.runs = [get_or_new(tenant, run_id) for run_id in lineage]
            permit.charge_only_accounts = permit.runs[:-1]
        else:
            permit.runs = [get_or_new(tenant, lineage[0])]
        permit.root = permit.runs[-1]
        leased_accounts.append(permit.root)
        apply_run_ceilings(permit)
    if (account := owner.day_account(calendar)) is not None:
        leased_accounts.append(account)
    if (account := owner.month_account(calendar)) is not None:
        leased_accounts.append(account)
    if key is not None:
        if (account := key.day_account(calendar)) is not None:
            leased_accounts.append(account)
        if (account := key.month_account(calendar)) is not None:
            leased_accounts.append(account)


def evaluate(permit: Permit, job: InferenceJob, lease_tokens: int, now: float) -> Refusal | None:
    """The job's refusal, or None. Without a refusal, the permit holds what the job will lease and reserve."""
    payload, prompt = job.payload, job.footprint.prompt
    choices, cap = payload.choices, job.token_budget
    limit = payload.output_limit
    is_explicit_limit = limit is None or limit <= cap * choices
    if permit.leased_accounts:
        tariff = permit.tariff
        prompt_nanos = tariff.prompt(prompt.high)
        left, account, in_money = headroom(permit.leased_accounts, tariff, prompt.high, prompt_nanos)
        min_output = choices if cap else 0  # a subscriber of a shared execution generates nothing itself
        if left < min_output:
            assert account is not None
            return Refusal(account=account, in_money=in_money)
        max_output = cap * choices if limit is None or is_explicit_limit or not cap else limit
        if left < cap * choices:
            cap = left // choices
            max_output = cap * choices
            permit.is_capped = True
            permit.binding_account, permit.bound_in_money = account, in_money
        granted = lease_size(left, lease_tokens if lease_tokens < max_output else max_output)
        if granted < min_output:
            granted = min_output
        permit.granted_tokens = granted
        permit.max_output = max_output
        permit.leased_tokens = prompt.high + granted
        permit.leased_nanos = prompt_nanos + tariff.output(granted)
    permit.output_cap = cap
    if not is_explicit_limit and not permit.is_capped:
        cap = min(cap, job.footprint.output.high)
    permit.reserved = reserved = prompt.expected + cap * choices
    tenant, key = permit.tenant, permit.key
    assert tenant is not None
    wait = tenant.quotas.wait(reserved, now)
    owner = tenant
    if key is not None:
        other = key.quotas.wait(reserved, now)
        if other is not None and (wait is None or other > wait):
            wait, owner = other, key
    if wait is not None:
        return Refusal(wait_s=wait[0], quota=wait[1], owner=owner)
    if tenant.kv.is_limited or (key is not None and key.kv.is_limited):
        permit.kv_tokens = reserved
        permit.is_only_call = permit.run_id == job.job_id
        return _kv_refusal(permit, now)
    return None


def _kv_refusal(permit: Permit, now: float) -> Refusal | None:
    for owner in (permit.tenant, permit.key):
        excess = None if owner is None else owner.kv.excess(permit.run_id, permit.kv_tokens, now)
        if owner is not None and excess is not None:
            wait_s = owner.quotas.slots_free_in_s(1) if excess.free_in_s is None else excess.free_in_s
            return Refusal(wait_s=wait_s, quota=excess.limit, owner=owner, needed=permit.kv_tokens, excess=excess)
    return None


def apply_run_ceilings(permit: Permit) -> None:
    """Set the root run's ceilings to those of the permit's tenant and key.

    Calls of several keys may share a run, so the ceilings are set again for every call.
    """
    root, tenant, key = permit.root, permit.tenant, permit.key
    if root is None or tenant is None:
        return
    tokens, nanos = tenant.run_tokens, tenant.run_nanos
    if key is not None:
        if key.run_tokens < tokens:
            tokens = key.run_tokens
        if key.run_nanos < nanos:
            nanos = key.run_nanos
    root.set_ceilings(tokens, nanos)
