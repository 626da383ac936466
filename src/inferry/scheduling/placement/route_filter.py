"""Filters that hold for a whole route: kind, tenant pool, phase and group."""

from collections.abc import Iterable, Sequence

from inferry.domain.routes import RouteKey
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.batching.packing import WorkerState
from inferry.scheduling.placement.worker_groups import WorkerGroup, WorkerGroupIndex


def serves(view: WorkerView, route: RouteKey) -> bool:
    """Whether the worker is of the route's kind, up or not. A route that names a precision means that one exactly."""
    return (
        route.model in view.models
        and (route.precision is None or route.precision == view.precision)
        and (route.adapter is None or route.adapter in view.adapters)
        and route.isolation == view.isolation
    )


def changes_routes(old: WorkerView | None, new: WorkerView) -> bool:
    """Whether the new view changes which routes the worker serves or how."""
    return old is None or (
        (old.phase, old.pads, old.isolation, old.precision, old.group)
        != (new.phase, new.pads, new.isolation, new.precision, new.group)
        or old.models != new.models
        or old.adapters != new.adapters
    )


class RouteFilter:
    """The workers that are up for one route key and the groups of one lane, by name.

    `tiers` are the same workers by group, best first: a worker of a later group is used when no earlier one has room.
    Nearly always there is only one, and it is asked directly.
    """

    __slots__ = ("_groups", "_single_tier", "all_pad", "any_pads", "key", "tiers", "workers")

    def __init__(
        self,
        key: RouteKey,
        workers: Iterable[WorkerState],
        worker_groups: WorkerGroupIndex,
        groups: tuple[str, ...] | None = None,
    ) -> None:
        self.key = key
        self._groups = groups
        self.refresh(workers, worker_groups)

    def refresh(self, workers: Iterable[WorkerState], worker_groups: WorkerGroupIndex) -> None:
        up = [w for w in workers if w.view is not None and w.view.phase is Phase.READY and serves(w.view, self.key)]
        if self.key.avoid:
            up = [w for w in up if w.name not in self.key.avoid] or up
        up.sort(key=lambda w: w.name)
        tiers = [up] if self._groups is None else [_in_group(up, group) for group in self._groups]
        self.tiers: Sequence[WorkerGroup] = tuple(worker_groups.of(tuple(tier)) for tier in tiers if tier)
        self._single_tier = self.tiers[0] if len(self.tiers) == 1 else None
        self.workers: Sequence[WorkerState] = tuple(w for tier in self.tiers for w in tier.workers)
        self.any_pads = any(w.pads for w in self.workers)
        self.all_pad = self.any_pads and all(w.pads for w in self.workers)

    def overlaps(self, other: "RouteFilter") -> bool:
        return self.tiers == other.tiers or any(w in other.workers for w in self.workers)

    def has(self, worker: WorkerState) -> bool:
        single_tier = self._single_tier
        return (
            worker in single_tier.index if single_tier is not None else any(worker in tier.index for tier in self.tiers)
        )

    def has_idle(self) -> bool:
        """Whether one of its workers has nothing to do, or there is none."""
        single_tier = self._single_tier
        return (
            single_tier.has_idle()
            if single_tier is not None
            else any(tier.has_idle() for tier in self.tiers) or not self.tiers
        )

    def is_closed(self, walk: int) -> bool:
        """Whether all its workers are kept for somebody in this walk."""
        single_tier = self._single_tier
        return (
            single_tier.closed_in_walk == walk
            if single_tier is not None
            else all(tier.closed_in_walk == walk for tier in self.tiers)
        )

    def is_untouched(self, walk: int) -> bool:
        """Whether none of its workers is kept for anybody in this walk."""
        single_tier = self._single_tier
        if single_tier is not None:
            return single_tier.closed_in_walk != walk != single_tier.touched_in_walk
        return all(tier.closed_in_walk != walk != tier.touched_in_walk for tier in self.tiers)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether none of its workers takes a job that needs so much KV. Cheap, and not always right to say no."""
        single_tier = self._single_tier
        if single_tier is not None:
            return single_tier.is_full(kv_tokens, fill)
        return all(tier.is_full(kv_tokens, fill) for tier in self.tiers)

    def close(self, walk: int) -> None:
        for tier in self.tiers:
            tier.close(walk)


def _in_group(workers: Iterable[WorkerState], group: str) -> list[WorkerState]:
    return [w for w in workers if w.view is not None and w.view.group == group]
