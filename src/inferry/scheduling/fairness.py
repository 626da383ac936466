"""Who has been served how much: fair share in tokens over tenants, and over the runs of each tenant.

Every account keeps a virtual time: what it has been served over its weight. The one with the least goes next. The
clock of a family runs at the pace its waiting members are served on average, and never behind the member chosen last;
whoever comes back from having nothing to send starts at the clock, so that idle time earns nothing and past service
costs nothing.

The law, between members a and b that both have jobs waiting for the same workers: a's virtual time is ahead of b's by
no more than one prompt of a and what its jobs in flight may still write, over its weight. What siblings, turns and
passing jobs take out of order adds a quantum each.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from math import ceil

from inferry.domain.plans import Ahead

Weights = Mapping[str, float] | Callable[[str], float]


class Account:
    """A lane, a tenant in it, or a run of that tenant. The lane has no parent and is never charged itself.

    `at` is its virtual time and never falls: what was charged too much is a `refund`, which later charges use up first.
    `rank` says when it last came from having nothing ready, and orders equals. `jobs` counts all its jobs, `ready`
    those that wait for room. `queued` and its tokens are what lanes and tenants have held or ready; runs do not count it.
    """

    __slots__ = (
        "_ready_weight",
        "_resting",
        "at",
        "clock",
        "jobs",
        "members",
        "name",
        "parent",
        "queued",
        "queued_output_tokens",
        "queued_prompt_tokens",
        "rank",
        "ready",
        "refund",
        "weight",
    )

    def __init__(self, name: str = "", parent: "Account | None" = None, rank: int = 0, weight: float = 1.0) -> None:
        self.name = name
        self.parent = parent
        self.rank = rank
        self.weight = weight
        self.clock = 0.0
        self.at: float = 0.0 if parent is None else parent.clock
        self.refund = 0.0
        self.jobs = 0
        self.ready = 0
        self.queued = self.queued_prompt_tokens = self.queued_output_tokens = 0
        self.members: dict[str, Account] = {}
        self._ready_weight = 0.0
        self._resting: list[tuple[float, int, Account]] = []

    def joined(self) -> None:
        """A job was offered."""
        account: Account | None = self
        while account is not None:
            account.jobs += 1
            account = account.parent

    def entered(self, rank: int) -> None:
        """A job is ready. Whoever had none enters at the clock."""
        account = self
        while (parent := account.parent) is not None:
            account.ready += 1
            if account.ready == 1:
                account.rank = rank
                if account.at < parent.clock:
                    account.at = parent.clock
                    account.refund = 0.0
                parent._ready_weight += account.weight
            account = parent
        account.ready += 1

    def left(self) -> None:
        """A job is ready no more: it was sent, or it left the queue."""
        account = self
        account.ready -= 1
        while (parent := account.parent) is not None:
            parent.ready -= 1
            if not account.ready:
                # Exactly nothing when nobody is left, whatever the floats have added up to.
                parent._ready_weight = parent._ready_weight - account.weight if parent.ready else 0.0
            account = parent

    def chosen(self) -> None:
        """It is this account's turn: no clock stays behind it."""
        account = self
        while (parent := account.parent) is not None:
            if account.at > parent.clock:
                parent.clock = account.at
            account = parent

    def charge(self, tokens: float) -> None:
        """Count tokens as served; fewer than none when an estimate was too high."""
        account = self
        while (parent := account.parent) is not None:
            if tokens < 0:
                account.refund -= tokens
            else:
                paid = tokens
                if account.refund:
                    paid = max(0.0, tokens - account.refund)
                    account.refund -= tokens - paid
                account.at += paid / account.weight
                if account.ready:
                    parent.clock += paid / parent._ready_weight
                elif not parent.ready and account.at > parent.clock:
                    # Where nobody waits nobody is owed anything.
                    parent.clock = account.at
                if parent._resting:
                    parent._sweep()
            account = parent

    def ended(self) -> None:
        """A job is gone. An account without jobs is kept only while it is ahead of the clock."""
        account = self
        while (parent := account.parent) is not None:
            account.jobs -= 1
            if not account.jobs:
                if account.at <= parent.clock:
                    del parent.members[account.name]
                else:
                    heappush(parent._resting, (account.at, account.rank, account))
            account = parent
        account.jobs -= 1

    def _sweep(self) -> None:
        """Forget members without jobs that the clock has caught up with."""
        resting = self._resting
        while resting and resting[0][0] <= self.clock:
            account = heappop(resting)[2]
            if not account.jobs and account.at <= self.clock and self.members.get(account.name) is account:
                del self.members[account.name]


def ahead_in(lane: Account, tenant: str) -> Ahead:
    """What of a lane goes before the next job of a tenant: its own jobs, and as much of others as fair share gives
    them in the meantime; never more than there is.
    """
    own = lane.members.get(tenant)
    if own is None or not own.queued:
        return Ahead()
    weight = max(lane._ready_weight, own.weight)
    part = min(1.0, own.queued * weight / own.weight / lane.queued)
    return Ahead(
        ceil(part * lane.queued),
        min(lane.queued_prompt_tokens, ceil(own.queued_prompt_tokens * weight / own.weight)),
        min(lane.queued_output_tokens, ceil(own.queued_output_tokens * weight / own.weight)),
    )


def weigher(weights: Weights) -> Callable[[str], float]:
    """The weight of a tenant, however weights were given; 1 unless it is named."""
    if callable(weights):
        return weights
    if any(weight <= 0 for weight in weights.values()):
        raise ValueError("weights are more than 0")
    return lambda tenant: weights.get(tenant, 1.0)


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 where all have the same, 1 / n where one of n has everything."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
