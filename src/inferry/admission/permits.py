"""What an admitted job holds: leases on budgets and parts of quotas, until its end gives them back."""

from inferry.admission.books import Books
from inferry.admission.budgets import UNBOUNDED, Account, Tariff
from inferry.admission.quotas import Bucket


class Permit:
    """One per admitted job; the gate's to change. Jobs of callers without limits share one per model.

    `may_write` is for how many output tokens it holds leases, all choices together; `output_cap` the most it may ever
    write per choice. The rest is the gate's. `most` is where its own limit ends it anyway, all choices together, and
    `is_capped` says that what was left of a budget set that. Every account in `held` holds `leased_tokens` and
    `leased_nanos` for it; those in `charged` are only told what it was in the end. `runs` are the accounts of its run
    and those above it, the last of them the `root`; `batch` is the batch of marks that must be in the database before
    the job may be served, 0 where none; `is_unmarked` says that a mark that could not be written keeps it from more;
    `requests` and `tokens` are the buckets that it took from, of the
    latter `reserved`.
    """

    __slots__ = (
        "batch",
        "bound_by",
        "bound_in_money",
        "charged",
        "cost_nanos",
        "held",
        "is_capped",
        "is_settled",
        "is_unmarked",
        "key",
        "leased_nanos",
        "leased_tokens",
        "may_write",
        "most",
        "output_cap",
        "requests",
        "reserved",
        "root",
        "runs",
        "tariff",
        "tenant",
        "tokens",
    )

    def __init__(self, tariff: Tariff) -> None:
        self.tariff = tariff
        self.may_write = UNBOUNDED
        self.output_cap = UNBOUNDED
        self.most = UNBOUNDED
        self.is_capped = False
        self.is_settled = False
        self.is_unmarked = False
        self.batch = 0
        self.cost_nanos: int | None = None
        self.tenant: Books | None = None
        self.key: Books | None = None
        self.held: list[Account] = []
        self.charged: list[Account] = []
        self.runs: list[Account] = []
        self.root: Account | None = None
        self.leased_tokens = 0
        self.leased_nanos = 0
        self.bound_by: Account | None = None
        self.bound_in_money = False
        self.reserved = 0
        self.requests: list[Bucket] = []
        self.tokens: list[Bucket] = []
