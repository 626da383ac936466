"""Where a job goes: filter the workers that may take it, then pick the least loaded."""

from collections.abc import Iterable, Sequence
from math import inf

from inferry.domain.jobs import RouteKey
from inferry.domain.plans import Phase, WorkerView
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.tickets import Ticket


def serves(view: WorkerView, route: RouteKey) -> bool:
    """Whether the worker is of the route's kind, up or not. No worker vouches for a precision yet."""
    return (
        route.model in view.models
        and route.precision is None
        and (route.adapter is None or route.adapter in view.adapters)
        and route.isolation == view.isolation
    )


def changes_routes(old: WorkerView | None, new: WorkerView) -> bool:
    """Whether the new view changes which routes the worker serves or how."""
    return old is None or (
        (old.phase, old.pads, old.isolation) != (new.phase, new.pads, new.isolation)
        or old.models != new.models
        or old.adapters != new.adapters
    )


class Route:
    """The workers that are up for one route key, by name."""

    __slots__ = ("all_pad", "key", "some_pad", "workers")

    def __init__(self, key: RouteKey, workers: Iterable[WorkerState]) -> None:
        self.key = key
        self.refresh(workers)

    def refresh(self, workers: Iterable[WorkerState]) -> None:
        up = (w for w in workers if w.view is not None and w.view.phase is Phase.READY and serves(w.view, self.key))
        self.workers: Sequence[WorkerState] = tuple(sorted(up, key=lambda w: w.name))
        self.some_pad = any(w.pads for w in self.workers)
        self.all_pad = self.some_pad and all(w.pads for w in self.workers)

    def overlaps(self, other: "Route") -> bool:
        return self is other or any(w in other.workers for w in self.workers)


def least_loaded(workers: Sequence[WorkerState], ticket: Ticket, walk: int, fill: float) -> WorkerState | None:
    """The least loaded worker that takes the job into the part `fill` of its room; ties go by name.

    Workers that are closed in this walk take nobody.
    """
    best, least = None, inf
    for worker in workers:
        if worker.closed_in != walk:
            load = worker.load
            if load is None:
                load = worker.weigh()
            if load < least and worker.takes(ticket, fill):
                if load == 0.0:
                    return worker
                best, least = worker, load
    return best


def close(workers: Sequence[WorkerState], walk: int) -> None:
    """Keep the workers for the job that waits for them: nobody behind it may have them in this walk."""
    for worker in workers:
        worker.closed_in = walk
