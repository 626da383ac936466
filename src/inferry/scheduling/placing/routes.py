"""Filters that hold for a whole route: kind, tenant pool, phase and group."""

from collections.abc import Iterable, Sequence

from inferry.domain.jobs import RouteKey
from inferry.domain.plans import Phase, WorkerView
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.affinity import Circle


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
    """

    __slots__ = ("_groups", "all_pad", "circle", "key", "some_pad", "tiers", "workers")

    def __init__(self, key: RouteKey, workers: Iterable[WorkerState], groups: tuple[str, ...] | None = None) -> None:
        self.key = key
        self._groups = groups
        self.refresh(workers)

    def refresh(self, workers: Iterable[WorkerState]) -> None:
        up = [w for w in workers if w.view is not None and w.view.phase is Phase.READY and serves(w.view, self.key)]
        up.sort(key=lambda w: w.name)
        tiers = [up] if self._groups is None else [_in_group(up, group) for group in self._groups]
        self.tiers: Sequence[Sequence[WorkerState]] = tuple(tuple(tier) for tier in tiers if tier)
        self.workers: Sequence[WorkerState] = tuple(w for tier in self.tiers for w in tier)
        self.circle = Circle(self.tiers[0] if self.tiers else ())
        self.some_pad = any(w.pads for w in self.workers)
        self.all_pad = self.some_pad and all(w.pads for w in self.workers)

    def overlaps(self, other: "Route") -> bool:
        return self is other or any(w in other.workers for w in self.workers)


def _in_group(workers: Iterable[WorkerState], group: str) -> list[WorkerState]:
    return [w for w in workers if w.view is not None and w.view.group == group]
