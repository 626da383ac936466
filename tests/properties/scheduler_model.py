"""A simple model of the scheduler's state for its state machine."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import CapacityUse, Tick
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler


@dataclass
class Known:
    """What the model knows of one job."""

    job: InferenceJob
    number: int
    state: str = "queued"
    worker: str = ""
    prefilling: bool = True
    passed: list[int] = field(default_factory=list)
    """Prompt tokens of lower-lane jobs that went before it while it was the first of its lane and route."""
    passed_by: int = 0
    """Tokens of later jobs of its own lane and route that went to workers it waits for."""

    @property
    def order(self) -> tuple[Lane, float, int]:
        return self.job.lane, self.job.arrived_at, self.number


def eligible(view: WorkerView, job: InferenceJob) -> bool:
    return (
        view.phase is Phase.READY
        and job.route.model in view.models
        and (job.route.adapter is None or job.route.adapter in view.adapters)
        and job.route.isolation == view.isolation
    )


class SchedulerModel(RuleBasedStateMachine):
    """The state that the scheduler should be in, computed slowly and simply. It has no rules of its own."""

    scheduler: Scheduler

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[Lane, LanePolicy] = {}
        self.known: dict[str, Known] = {}
        self.views: dict[str, WorkerView] = {}
        self.plan_ids: set[int] = set()
        self.now = 1.0
        self.wake_at: float | None = None
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.ticks: list[Tick] = []

    def tell(self, verb: str, *arguments: Any) -> Any:
        """Call the scheduler and log the call for the replay."""
        self.log.append((verb, arguments))
        self.wake_at = None
        return getattr(self.scheduler, verb)(*arguments)

    @staticmethod
    def pick(data: st.DataObject, of: Iterable[Known]) -> Known:
        return data.draw(st.sampled_from(list(of)))

    def queued(self, lane: Lane | None = None) -> list[Known]:
        return [k for k in self.known.values() if k.state == "queued" and lane in (None, k.job.lane)]

    def in_flight(self) -> list[Known]:
        return [k for k in self.known.values() if k.state == "planned"]

    def use(self, worker: str, lane: Lane = Lane.P2) -> CapacityUse:
        """What jobs of the lane and better ones use there."""
        here = [known for known in self.in_flight() if known.worker == worker and known.job.lane <= lane]
        return CapacityUse(
            len(here),
            sum(known.job.footprint.peak_kv_tokens for known in here),
            sum(known.job.footprint.prefill_tokens for known in here if known.prefilling),
        )

    def able(self, known: Known) -> set[str]:
        return {name for name, view in self.views.items() if eligible(view, known.job)}

    def hold_end(self, job: InferenceJob) -> float:
        policy = self.lanes[job.lane]
        ends = [job.arrived_at + policy.coalesce_ms / 1000]
        ends.append(job.arrived_at + min(job.max_wait_s, policy.max_wait_ms / 1000))
        if job.deadline is not None:
            ends.append(job.arrived_at + (job.deadline - job.arrived_at) / 2)
        return min(ends)

    def may_hold(self, known: Known) -> bool:
        """Whether the job may still be waiting of its own accord."""
        policy = self.lanes[known.job.lane]
        if policy.window == "off" or self.now >= self.hold_end(known.job):
            return False
        able = [view for view in self.views.values() if eligible(view, known.job)]
        if policy.window == "fixed":
            return True
        # Before an idle worker that pads, a job may wait for company that is expected; before others it may wait for a
        # sibling, but not where one is idle.
        if any(view.pads for view in able):
            return all(view.pads for view in able)
        return bool(known.job.prefix) and len(able) > 1 and all(self.is_busy(view) for view in able)

    def is_busy(self, view: WorkerView) -> bool:
        return self.use(view.worker).sequences + view.foreign.running + view.foreign.waiting > 0

    def has_capacity(self, view: WorkerView, job: InferenceJob) -> bool:
        if view.pads and self.lanes[job.lane].window != "off" and self.is_busy(view):
            return False
        use, need, foreign = self.use(view.worker), job.footprint, view.foreign
        fill = 1 - self.lanes[job.lane].reserve
        sequences = use.sequences + foreign.running + foreign.waiting
        if view.capacity.sequences is not None and sequences >= view.capacity.sequences * fill:
            return False
        return all(
            limit is None or used + more <= limit * fill or (used == 0 and limit > 0)
            for limit, used, more in (
                (view.capacity.kv_tokens, use.kv_tokens + foreign.kv_tokens, need.peak_kv_tokens),
                (view.capacity.prefill_tokens, self.use(view.worker, job.lane).prefill_tokens, need.prefill_tokens),
            )
        )

    def may_be_reserved_for_a_share(self, known: Known, waiting: list[Known]) -> set[str]:
        return {
            name
            for other in waiting
            if other is not known and self.lanes[other.job.lane].share > 0 and waiting[0].job.lane < other.job.lane
            for name, view in self.views.items()
            if eligible(view, other.job)
        }
