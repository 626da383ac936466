"""What an admitted job holds until its end: leases on budgets and shares of quotas."""

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.budgets import UNBOUNDED, Account, Tariff
from inferry.admission.kv_quota import KvQuota
from inferry.admission.quotas import TokenBucket


class Permit:
    """One per admitted job. Only the gate changes it. Jobs of callers without limits share one permit per model.

    Read by others:
    - `granted_tokens`: output tokens covered by leases, over all choices.
    - `output_cap`: the most output tokens per choice.

    Used by the gate:
    - `max_output`: the most output tokens over all choices; `is_capped` if the rest of a budget sets it.
    - `leased_accounts`: accounts that each hold `leased_tokens` and `leased_nanos` for the job.
    - `charge_only_accounts`: accounts that are charged at the end and never limit the job.
    - `runs`: accounts of the job's run and its ancestors; the last one is `root`.
    - `watermark_batch`: the batch of watermarks to be written before the job is served; 0 for none.
    - `is_watermark_blocked`: a watermark that could not be written prevents a further lease.
    - `requests`, `tokens`: the buckets that were taken from; `reserved` tokens from each of the latter.
    - `kv_quotas`: those that count `kv_tokens` for the job's run `run_id`; `is_only_call`: the run has no other call.
    """

    __slots__ = (
        "binding_account",
        "bound_in_money",
        "charge_only_accounts",
        "cost_nanos",
        "granted_tokens",
        "is_capped",
        "is_only_call",
        "is_settled",
        "is_watermark_blocked",
        "key",
        "kv_quotas",
        "kv_tokens",
        "leased_accounts",
        "leased_nanos",
        "leased_tokens",
        "max_output",
        "output_cap",
        "requests",
        "reserved",
        "root",
        "run_id",
        "runs",
        "tariff",
        "tenant",
        "tokens",
        "watermark_batch",
    )

    def __init__(self, tariff: Tariff) -> None:
        self.tariff = tariff
        self.granted_tokens = UNBOUNDED
        self.output_cap = UNBOUNDED
        self.max_output = UNBOUNDED
        self.is_capped = False
        self.is_settled = False
        self.is_watermark_blocked = False
        self.watermark_batch = 0
        self.cost_nanos: int | None = None
        self.tenant: OwnerAccounts | None = None
        self.key: OwnerAccounts | None = None
        self.leased_accounts: list[Account] = []
        self.charge_only_accounts: list[Account] = []
        self.runs: list[Account] = []
        self.root: Account | None = None
        self.leased_tokens = 0
        self.leased_nanos = 0
        self.binding_account: Account | None = None
        self.bound_in_money = False
        self.reserved = 0
        self.requests: list[TokenBucket] = []
        self.tokens: list[TokenBucket] = []
        self.run_id = ""
        self.is_only_call = False
        self.kv_tokens = 0
        self.kv_quotas: list[KvQuota] = []
