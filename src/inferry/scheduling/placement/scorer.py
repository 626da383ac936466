"""What a scorer sees and what it answers. Scorers change nothing."""

from collections.abc import Sequence
from typing import Final

from inferry.scheduling.placement.route_filter import RouteFilter
from inferry.scheduling.placement.worker_groups import WorkerGroup
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState


class PrefixMatch:
    """The longest known beginning of a prompt: its number of slices, the workers it was sent to, latest first, and the
    prompt tokens that are left to compute there.
    """

    def __init__(self, slices: int, workers: Sequence[WorkerState], prefill_tokens: int) -> None:
        self.slices: Final = slices
        self.workers: Final = workers
        self.prefill_tokens: Final = prefill_tokens


class Placement:
    """A worker that accepts the job now, and the prompt tokens to compute there."""

    def __init__(self, worker: WorkerState, prefill_tokens: int) -> None:
        self.worker: Final = worker
        self.prefill_tokens: Final = prefill_tokens


class Candidates:
    """The workers of a route that a walk may use: those that are not reserved, in the part `fill` of their capacity.

    `among` narrows them to some workers; None means all. Among one worker there is nothing to rank (`is_choice`).
    Scorers only read it. The selector reuses one object for all placements, since every job needs one.
    """

    __slots__ = ("among", "fill", "is_choice", "route", "walk")

    def __init__(self, route: RouteFilter, walk: int, fill: float) -> None:
        self.show(route, walk, fill, None)

    def show(self, route: RouteFilter, walk: int, fill: float, among: dict[WorkerState, None] | None) -> None:
        """Replace what scorers see, before the next placement."""
        self.route = route
        self.walk = walk
        self.fill = fill
        self.among = among
        self.is_choice = among is None or len(among) > 1

    def accepts(self, worker: WorkerState, group: WorkerGroup, entry: QueuedJob, prefill_tokens: int) -> bool:
        """Whether a worker of the group accepts the job now, with that much prefill."""
        return (
            worker in group.index
            and (self.among is None or worker in self.among)
            and (group.touched_in_walk != self.walk or group.is_open(worker, entry, self.walk))
            and worker.accepts(entry, prefill_tokens, self.fill)
        )


class Scorer:
    """One rule that prefers some workers to others. Scorers are asked in order until one places the job.

    A rule with `needs_affinity` is asked only for jobs with a session or a prefix. `name` is what decision records call
    the rule.
    """

    def __init__(self, name: str, needs_affinity: bool = False) -> None:
        self.name: Final = name
        self.needs_affinity: Final = needs_affinity

    def place(self, entry: QueuedJob, match: PrefixMatch | None, candidates: Candidates) -> Placement | None:
        """The candidate this rule prefers, or None to leave the job to the next rule."""
        raise NotImplementedError
