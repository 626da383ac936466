"""Filters that hold for a whole route: kind, tenant pool, phase and group."""

from collections.abc import Iterable, Sequence

from inferry.domain.routes import RouteKey
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.fleets import Fleet, Fleets


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


class Route:
    """The workers that are up for one route key and the groups of one lane, by name.

    `tiers` are the same workers by group, best first: a worker of a later group is used when no earlier one has room.
    Nearly always there is only one, and it is asked directly.
    """

    __slots__ = ("_groups", "_only", "all_pad", "key", "some_pad", "tiers", "workers")

    def __init__(
        self, key: RouteKey, workers: Iterable[WorkerState], fleets: Fleets, groups: tuple[str, ...] | None = None
    ) -> None:
        self.key = key
        self._groups = groups
        self.refresh(workers, fleets)

    def refresh(self, workers: Iterable[WorkerState], fleets: Fleets) -> None:
        up = [w for w in workers if w.view is not None and w.view.phase is Phase.READY and serves(w.view, self.key)]
        if self.key.avoid:
            up = [w for w in up if w.name not in self.key.avoid] or up
        up.sort(key=lambda w: w.name)
        tiers = [up] if self._groups is None else [_in_group(up, group) for group in self._groups]
        self.tiers: Sequence[Fleet] = tuple(fleets.of(tuple(tier)) for tier in tiers if tier)
        self._only = self.tiers[0] if len(self.tiers) == 1 else None
        self.workers: Sequence[WorkerState] = tuple(w for tier in self.tiers for w in tier.workers)
        self.some_pad = any(w.pads for w in self.workers)
        self.all_pad = self.some_pad and all(w.pads for w in self.workers)

    def overlaps(self, other: "Route") -> bool:
        return self.tiers == other.tiers or any(w in other.workers for w in self.workers)

    def has(self, worker: WorkerState) -> bool:
        only = self._only
        return worker in only.index if only is not None else any(worker in tier.index for tier in self.tiers)

    def has_idle(self) -> bool:
        """Whether one of its workers has nothing to do, or there is none."""
        only = self._only
        return only.has_idle() if only is not None else any(tier.has_idle() for tier in self.tiers) or not self.tiers

    def is_closed(self, walk: int) -> bool:
        """Whether all its workers are kept for somebody in this walk."""
        only = self._only
        return only.closed_in == walk if only is not None else all(tier.closed_in == walk for tier in self.tiers)

    def is_untouched(self, walk: int) -> bool:
        """Whether none of its workers is kept for anybody in this walk."""
        only = self._only
        if only is not None:
            return only.closed_in != walk != only.touched_in
        return all(tier.closed_in != walk != tier.touched_in for tier in self.tiers)

    def is_full(self, kv_tokens: int, fill: float) -> bool:
        """Whether none of its workers takes a job that needs so much KV. Cheap, and not always right to say no."""
        only = self._only
        if only is not None:
            return only.is_full(kv_tokens, fill)
        return all(tier.is_full(kv_tokens, fill) for tier in self.tiers)

    def close(self, walk: int) -> None:
        for tier in self.tiers:
            tier.close(walk)


def _in_group(workers: Iterable[WorkerState], group: str) -> list[WorkerState]:
    return [w for w in workers if w.view is not None and w.view.group == group]
