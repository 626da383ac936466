"""The workers that one lane may use for one route: what the filters allow, by worker group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from inferry.domain import decisions
from inferry.domain.routes import RouteKey
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.placement.filters import Filter
from inferry.scheduling.placement.worker_groups import WorkerGroup, WorkerGroupIndex
from inferry.scheduling.worker_state import WorkerState

_UNAVAILABLE = (decisions.WORKER_GROUP, decisions.BREAKER, decisions.WORKER_DOWN)
"""Why a route has no worker, the reason that is nearest to having one first."""

_LOST: Final = (decisions.BREAKER, decisions.WORKER_DOWN)


def changes_routes(old: WorkerView | None, new: WorkerView) -> bool:
    """Whether the new view changes which routes the worker serves or how."""
    return old is None or (
        (old.phase, old.pads, old.refills, old.isolation, old.precision, old.group, old.output_length)
        != (new.phase, new.pads, new.refills, new.isolation, new.precision, new.group, new.output_length)
        or (old.overflow, old.role) != (new.overflow, new.role)
        or old.models != new.models
        or old.adapters != new.adapters
    )


class RouteFilter:
    """The workers that are up for one route key and one lane, in the order of their names.

    `tiers` are the same workers by group, best first: a worker of a later tier is used when no earlier one accepts the
    job. There is mostly one, which is asked directly. `borrowable` are the workers of other groups, by group; those
    lent now are the last tiers. Workers that pad are not lent, since batch keys would split the queue. `is_pooled`: the
    jobs of the route embed or score. `has_lost_worker`: one that it could use is down. `filtered` counts the workers
    that it may not use, by reason; `unavailable` is why there is none where there is none.
    """

    __slots__ = (
        "_by_name",
        "_filters",
        "_lent",
        "_own_tiers",
        "_rules",
        "_single_tier",
        "all_pad",
        "any_pads",
        "borrowable",
        "filtered",
        "has_lost_worker",
        "is_pooled",
        "is_remote",
        "key",
        "tiers",
        "unavailable",
        "workers",
    )

    def __init__(
        self,
        key: RouteKey,
        rules: LaneRules,
        filters: Sequence[Filter],
        workers: Iterable[WorkerState],
        worker_groups: WorkerGroupIndex,
    ) -> None:
        self.key = key
        self.is_pooled = key.pooled
        self._rules = rules
        self._filters = filters
        self._lent: frozenset[str] = frozenset()
        self.refresh(workers, worker_groups)

    def refresh(self, workers: Iterable[WorkerState], worker_groups: WorkerGroupIndex) -> None:
        """Apply the filters again: workers have changed."""
        up = []
        filtered: dict[str, int] = {}
        self.has_lost_worker = False
        for worker in workers:
            reason = self._rejection(worker.view)
            if reason in _LOST and worker.view is not None and worker.view.phase is Phase.DOWN:
                self.has_lost_worker = True
            if reason is None:
                up.append(worker)
            else:
                filtered[reason] = filtered.get(reason, 0) + 1
        if self.key.avoid:
            up = [w for w in up if w.name not in self.key.avoid] or up
        if self.key.role == "decode":
            up = [w for w in up if w.view is not None and w.view.role == "decode"] or up
        if self.key.length is not None:
            up = [w for w in up if w.output_length in (None, self.key.length)] or up
        up.sort(key=lambda w: w.name)
        self.is_remote = any(w.view is not None and w.view.is_remote for w in up)
        groups = None if self.is_remote or self.key.overflow else self._rules.groups
        tiers = [up] if groups is None else [[w for w in up if w.group == group] for group in groups]
        if groups is not None and (outside := len(up) - sum(map(len, tiers))):
            filtered[decisions.WORKER_GROUP] = outside
        self.filtered: Mapping[str, int] = filtered
        self.unavailable = next((reason for reason in _UNAVAILABLE if reason in filtered), decisions.NO_WORKER)
        self._own_tiers = tuple(worker_groups.of(tuple(tier)) for tier in tiers if tier)
        self.borrowable: dict[str, WorkerGroup] = {}
        if self._rules.borrow_groups and groups is not None:
            others = [w for w in up if w.group is not None and w.group not in groups and not w.pads]
            for group in sorted({w.group for w in others if w.group is not None}):
                self.borrowable[group] = worker_groups.of(tuple(w for w in others if w.group == group))
        self._update_tiers()

    def use_rules(self, rules: LaneRules) -> None:
        """The lane has other rules. They apply from the next `refresh` on."""
        self._rules = rules

    def borrow(self, lent: frozenset[str]) -> bool:
        """Use the workers of these groups and of no other borrowed group; say whether that is a change."""
        if lent == self._lent:
            return False
        self._lent = lent
        self._update_tiers()
        return True

    def _update_tiers(self) -> None:
        borrowed = [tier for group, tier in self.borrowable.items() if group in self._lent]
        self.tiers: Sequence[WorkerGroup] = (*self._own_tiers, *borrowed)
        self._single_tier = self.tiers[0] if len(self.tiers) == 1 else None
        self.workers: Sequence[WorkerState] = tuple(w for tier in self.tiers for w in tier.workers)
        self._by_name = {w.name: w for w in self.workers}
        self.any_pads = any(w.pads for w in self.workers)
        self.all_pad = self.any_pads and all(w.pads for w in self.workers)

    def _rejection(self, view: WorkerView | None) -> str | None:
        """What excludes a worker: the first filter by name, or that it is not up; None where it may be used."""
        if view is None:
            return decisions.WORKER_DOWN
        for allows in self._filters:
            if not allows(view, self.key):
                return allows.__name__
        if view.phase is Phase.READY:
            return None
        return decisions.BREAKER if view.breaker_open else decisions.WORKER_DOWN

    def overlaps(self, other: "RouteFilter") -> bool:
        return self.tiers == other.tiers or any(w in other.workers for w in self.workers)

    def has(self, worker: WorkerState) -> bool:
        single_tier = self._single_tier
        return (
            worker in single_tier.index if single_tier is not None else any(worker in tier.index for tier in self.tiers)
        )

    def worker_named(self, name: str) -> WorkerState | None:
        return self._by_name.get(name)

    def has_idle(self) -> bool:
        """Whether one of its workers is idle, or there is none."""
        single_tier = self._single_tier
        return (
            single_tier.has_idle()
            if single_tier is not None
            else any(tier.has_idle() for tier in self.tiers) or not self.tiers
        )

    def has_free_pass(self) -> bool:
        """Whether one of its workers runs no pass, or there is none. A worker that batches continuously runs a pass
        while it has pooled jobs, a worker that pads while it has any. A pass that is refilled counts while it has rows.
        """
        if not self.is_pooled or self.any_pads:
            return self.has_idle() or any(w.refills and w.sequences < w.sequence_limit for w in self.workers)
        return not self.workers or any(not worker.pooled_sequences for worker in self.workers)

    def is_closed(self, walk: int) -> bool:
        """Whether all its workers are reserved in this walk."""
        single_tier = self._single_tier
        return (
            single_tier.closed_in_walk == walk
            if single_tier is not None
            else all(tier.closed_in_walk == walk for tier in self.tiers)
        )

    def is_untouched(self, walk: int) -> bool:
        """Whether none of its workers is reserved in this walk."""
        single_tier = self._single_tier
        if single_tier is not None:
            return single_tier.closed_in_walk != walk != single_tier.touched_in_walk
        return all(tier.closed_in_walk != walk != tier.touched_in_walk for tier in self.tiers)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether certainly none of its workers accepts a job with that much KV."""
        single_tier = self._single_tier
        if single_tier is not None:
            return single_tier.is_full(kv_tokens, fill)
        return all(tier.is_full(kv_tokens, fill) for tier in self.tiers)

    def close(self, walk: int) -> None:
        for tier in self.tiers:
            tier.close(walk)
