"""Money leases of models with a price per GPU-hour.

GPU time is not known in advance, so such a lease follows what a running job has used. A job whose GPU time costs more
than its budgets leave is stopped.
"""

from inferry.admission.budgets import Account
from inferry.admission.evaluation import apply_run_ceilings
from inferry.admission.permits import Permit


def lease_gpu_time(permit: Permit, gpu_seconds: float) -> bool:
    """Raise the lease to the cost of the job's GPU time so far; False where an account has less left.

    The lease then takes what is left, so that spent + leased stays within every ceiling.
    """
    tariff = permit.tariff
    if tariff.is_per_token or tariff.price is None or permit.is_settled or not permit.leased_accounts:
        return True
    wanted = tariff.price.nanos(0, 0, 0, gpu_seconds) - permit.leased_nanos
    if wanted <= 0:
        return True
    apply_run_ceilings(permit)
    granted = wanted
    binding: Account | None = None
    for account in permit.leased_accounts:
        left = max(0, account.nano_ceiling - account.committed_nanos)
        if left < granted:
            granted, binding = left, account
    permit.leased_nanos += granted
    for account in permit.leased_accounts:
        account.committed_nanos += granted
    if binding is None:
        return True
    permit.binding_account, permit.bound_in_money = binding, True
    permit.is_watermark_blocked = False
    return False
