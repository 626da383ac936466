"""Fair share in tokens over tenants, and over the runs of each tenant.

Every account keeps a virtual time: its service over its weight. The account with the least goes next. The virtual clock
of a group advances at the mean rate of its waiting members, and is never behind the member chosen last. A member that
returns after it had no jobs starts at the clock: idle time earns nothing, and past service costs nothing.

The bound between members a and b that both have jobs waiting for the same workers: a's virtual time is ahead of b's by
no more than one prompt of a and the output its jobs in flight may still produce, over its weight. Siblings, turns and
backfilled jobs, which go out of order, add a quantum each.

A member that is alone in its group is charged nothing there: the clock would move along with it. So a lane with one
tenant and one run costs almost nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

Weights = Mapping[str, float] | Callable[[str], float]

_SWEEP_THRESHOLD: Final = 16
_Member = TypeVar("_Member", "RunAccount", "TenantAccount")


class AccountGroup(Generic[_Member]):
    """Accounts that share: the tenants of a lane, or the runs of a tenant.

    `active` counts members that have jobs, `ready` those that have jobs waiting for capacity, `ready_weight` weighs the
    latter. Members without jobs are kept while they are ahead of the clock, and until there are enough of them to be
    worth a sweep; none of them is ahead of the clock once that has come to `ahead_until`.
    """

    __slots__ = ("active", "ahead_until", "members", "ready", "ready_weight", "sweep_at", "virtual_clock")

    def __init__(self) -> None:
        self.virtual_clock = 0.0
        self.active = 0
        self.ready = 0
        self.ready_weight = 0.0
        self.members: dict[str, _Member] = {}
        self.ahead_until = 0.0
        self.sweep_at = _SWEEP_THRESHOLD

    def forget_idle(self) -> list[_Member]:
        """Drop the members that nothing need be remembered of, and return them."""
        idle = [
            member for member in self.members.values() if member.is_idle and member.virtual_time <= self.virtual_clock
        ]
        for member in idle:
            del self.members[member.name]
        self.sweep_at = 2 * len(self.members) + _SWEEP_THRESHOLD
        return idle


class LaneAccounts(AccountGroup["TenantAccount"]):
    """The tenants of one lane. What a tenant was served is handed to `record_service` when its account is dropped."""

    __slots__ = ("_record_service", "_weight_of")

    def __init__(
        self,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        record_service: Callable[[str, int], None] = lambda tenant, tokens: None,
    ) -> None:
        super().__init__()
        self._weight_of = weight_of
        self._record_service = record_service

    def open_run(self, tenant: str, run_id: str) -> "RunAccount":
        """A job was offered: its run, in an account that is opened if need be."""
        tenant_account = self.members.get(tenant)
        if tenant_account is None:
            tenant_account = self.members[tenant] = TenantAccount(tenant, self, self._weight_of(tenant))
        run = tenant_account.members.get(run_id)
        if run is None:
            run = tenant_account.members[run_id] = RunAccount(run_id, tenant_account)
        run.jobs += 1
        if run.jobs == 1:
            tenant_account.active += 1
            if tenant_account.active == 1:
                self.active += 1
        return run

    def sweep(self) -> None:
        for tenant in self.forget_idle():
            self._record_service(tenant.name, tenant.served)


class TenantAccount(AccountGroup["RunAccount"]):
    """A tenant in one lane, and the family of its runs.

    `virtual_time` is its virtual time and never falls: what was charged too much is a `refund`, which later charges use
    up first. `rank` says when it last came from having nothing ready, and orders equals. `served` are its tokens since
    the account was opened; `queued` counts its jobs held or ready.
    """

    __slots__ = (
        "lane",
        "name",
        "queued",
        "rank",
        "refund",
        "served",
        "virtual_time",
        "weight",
    )

    def __init__(self, name: str, lane: LaneAccounts, weight: float) -> None:
        super().__init__()
        self.name = name
        self.lane = lane
        self.weight = weight
        self.virtual_time = lane.virtual_clock
        self.refund = 0.0
        self.rank = 0
        self.served = 0
        self.queued = 0

    @property
    def is_idle(self) -> bool:
        return not self.active


class RunAccount:
    """A run of a tenant in one lane; see `TenantAccount`. `jobs` counts all its jobs, `ready` those that wait for
    capacity.

    What happens to a run is told here, and passed on to its tenant and its lane where it concerns them.
    """

    __slots__ = ("jobs", "name", "rank", "ready", "refund", "tenant", "virtual_time")
    weight = 1.0

    def __init__(self, name: str, tenant: TenantAccount) -> None:
        self.name = name
        self.tenant = tenant
        self.virtual_time = tenant.virtual_clock
        self.refund = 0.0
        self.rank = 0
        self.jobs = 0
        self.ready = 0

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    def ended(self) -> None:
        """A job is gone."""
        self.jobs -= 1
        if self.jobs:
            return
        tenant = self.tenant
        tenant.active -= 1
        if self.virtual_time > tenant.virtual_clock:
            tenant.ahead_until = max(tenant.ahead_until, self.virtual_time)
        if len(tenant.members) > tenant.sweep_at:
            tenant.forget_idle()
        if tenant.active:
            return
        lane = tenant.lane
        lane.active -= 1
        if tenant.virtual_time > lane.virtual_clock:
            lane.ahead_until = max(lane.ahead_until, tenant.virtual_time)
        if len(lane.members) > lane.sweep_at:
            lane.sweep()

    def job_ready(self, rank: int) -> None:
        """A job is ready. A run or tenant without ready jobs enters at the clock."""
        self.ready += 1
        if self.ready > 1:
            return
        tenant = self.tenant
        self.rank = rank
        tenant.ready += 1
        tenant.ready_weight += 1.0
        if self.virtual_time < tenant.virtual_clock:
            self.virtual_time = tenant.virtual_clock
            self.refund = 0.0
        if tenant.ready > 1:
            return
        lane = tenant.lane
        tenant.rank = rank
        lane.ready += 1
        lane.ready_weight += tenant.weight
        if tenant.virtual_time < lane.virtual_clock:
            tenant.virtual_time = lane.virtual_clock
            tenant.refund = 0.0

    def job_left(self) -> None:
        """A job is ready no more: it was sent, or it left the queue."""
        self.ready -= 1
        if not self.ready:
            self._not_ready()

    def _not_ready(self) -> None:
        tenant = self.tenant
        tenant.ready -= 1
        tenant.ready_weight -= 1.0
        if tenant.ready:
            return
        lane = tenant.lane
        lane.ready -= 1
        # Exactly zero without ready members, whatever rounding has left.
        lane.ready_weight = lane.ready_weight - tenant.weight if lane.ready else 0.0

    def serve(self, tokens: int, in_order: bool) -> None:
        """A ready job is charged and leaves. Where it was the run's turn no clock stays behind it."""
        tenant = self.tenant
        lane = tenant.lane
        if in_order:
            if self.virtual_time > tenant.virtual_clock:
                tenant.virtual_clock = self.virtual_time
            if tenant.virtual_time > lane.virtual_clock:
                lane.virtual_clock = tenant.virtual_time
        self.charge(tokens)
        self.ready -= 1
        if not self.ready:
            self._not_ready()

    def charge(self, tokens: int) -> None:
        """Count tokens as served; fewer than none when an estimate was too high."""
        tenant = self.tenant
        lane = tenant.lane
        tenant.served += tokens
        if tenant.active > 1 or tenant.virtual_clock < tenant.ahead_until:
            _charge(self, tenant, tokens)
        elif self.virtual_time > tenant.virtual_clock:
            tenant.virtual_clock = self.virtual_time
        if lane.active > 1 or lane.virtual_clock < lane.ahead_until:
            _charge(tenant, lane, tokens)
        elif tenant.virtual_time > lane.virtual_clock:
            lane.virtual_clock = tenant.virtual_time


def _charge(
    member: RunAccount | TenantAccount, group: AccountGroup[RunAccount] | AccountGroup[TenantAccount], tokens: float
) -> None:
    if tokens < 0:
        member.refund -= tokens
        return
    if member.refund:
        owed = tokens
        tokens = max(0.0, tokens - member.refund)
        member.refund -= owed - tokens
    member.virtual_time += tokens / member.weight
    if member.ready:
        group.virtual_clock += tokens / group.ready_weight
    elif not group.ready and member.virtual_time > group.virtual_clock:
        # Without waiting members no service is owed.
        group.virtual_clock = member.virtual_time


def weight_lookup(weights: Weights) -> Callable[[str], float]:
    """The weight of a tenant, however weights were given; 1 unless it is named."""
    if callable(weights):
        return weights
    if any(weight <= 0 for weight in weights.values()):
        raise ValueError("weights are more than 0")
    return lambda tenant: weights.get(tenant, 1.0)


def jain_index(values: Iterable[float]) -> float:
    """Jain's index: 1 where all have the same, 1 / n where one of n has everything."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
