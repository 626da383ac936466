"""What an admitted job holds: leases on budgets and parts of quotas, until its end gives them back."""

from inferry.admission.accounts import OwnerAccounts
from inferry.admission.budgets import UNBOUNDED, Account, Tariff
from inferry.admission.quotas import TokenBucket


class Permit:
    """One per admitted job; the gate's to change. Jobs of callers without limits share one per model.

    `granted_tokens` is for how many output tokens it holds leases, all choices together; `output_cap` the most it may
    ever write per choice. The rest is the gate's. `max_output` is where its own limit ends it anyway, all choices
    together, and `is_capped` says that what was left of a budget set that. Every account in `leased_accounts` holds
    `leased_tokens` and `leased_nanos` for it; those in `charge_only_accounts` are only told what it was in the end.
    `runs` are the accounts of its run and those above it, the last of them the `root`; `watermark_batch` is the batch
    of marks that must be in the database before the job may be served, 0 where none; `is_watermark_blocked` says that a
    mark that could not be written keeps it from more; `requests` and `tokens` are the buckets that it took from, of the
    latter `reserved`.
    """

    __slots__ = (
        "binding_account",
        "bound_in_money",
        "charge_only_accounts",
        "cost_nanos",
        "granted_tokens",
        "is_capped",
        "is_settled",
        "is_watermark_blocked",
        "key",
        "leased_accounts",
        "leased_nanos",
        "leased_tokens",
        "max_output",
        "output_cap",
        "requests",
        "reserved",
        "root",
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
