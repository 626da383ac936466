"""The rules of lanes in several versions: which are in use, and how a lane changes to others.

A queue belongs to one version of the rules. A change of version makes new queues for jobs that arrive; the old ones
empty in the usual order. So jobs of two versions are queued side by side in one lane, in fair order and with one share,
and no job changes its rules while it is queued.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.run_split import RunSplit
from inferry.domain.values import Value
from inferry.scheduling.lane_rules import LaneRules
from inferry.scheduling.queues.fair_share import LaneAccounts, Weights, weight_lookup
from inferry.scheduling.queues.lane_queue import BacklogCounter, LaneQueue
from inferry.scheduling.queues.queued_job import QueuedJob


class LaneTrial(Value):
    """Lane policies that are tried with the runs that `split` takes. They differ from the others in `RUN_KEYS` only."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy], version: int, split: RunSplit) -> None:
        self.lanes: Final = lanes
        self.version: Final = version
        self.split: Final = split


def make_lane_queues(
    lanes: Mapping[Lane, LanePolicy],
    weights: Weights | None,
    record_service: Callable[[str, int], None],
    backlog: BacklogCounter,
    cached_slices: Callable[[QueuedJob], int],
) -> tuple[LaneQueue, ...]:
    """One for each lane, the highest first."""
    return tuple(
        LaneQueue(
            LaneRules(lane, lanes[lane]),
            LaneAccounts(weight_lookup(weights or {}), record_service),
            backlog,
            cached_slices,
        )
        for lane in sorted(lanes)
    )


def switch_lanes(
    lane_queues: Sequence[LaneQueue], lanes: Mapping[Lane, LanePolicy], version: int, trial: LaneTrial | None
) -> None:
    """Have jobs that arrive join queues of the new rules, and those of the trial's runs queues of its candidate.

    Jobs that are queued keep the hold limits and batch sizes they came with. What belongs to a lane or a worker as a
    whole (shares, groups, preemption) follows when the caller refreshes the routes.
    """
    for lane_queue in lane_queues:
        lane = lane_queue.lane
        if lane_queue.rules.version != version:
            lane_queue.rules = LaneRules(lane, lanes[lane], version)
            for route in lane_queue.routes.values():
                route.use_rules(lane_queue.rules)
        lane_queue.trial = lane_queue.candidate = None
        if trial is not None:
            lane_queue.trial = trial.split
            lane_queue.candidate = LaneRules(lane, trial.lanes[lane], trial.version)
