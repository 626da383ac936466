"""How many workers a group needs, from the work that waits and the capacity in use. Pure.

Needed workers = capacity in use / utilisation + waiting work / time to drain it, rounded up. Capacity in use is counted
in workers: 0.5 is half of one worker's capacity, in the currency that is used most. Waiting work is in seconds of one
engine. Both are absolute: they do not change because a worker is added, so the rule does not oscillate by itself.

Advice rises at once and falls to the largest need of the last `scale_down_after_s`, as the stabilisation window of
Kubernetes' HorizontalPodAutoscaler does. Between two falls therefore lies at least that time.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil, exp

from msgspec import Struct

OUTPUT_TOKEN_WEIGHT = 16.0
"""Cost of an output token in prompt tokens: that of a step divided among a dozen sequences, as calibrated for an 8B
model on an H200. Only the ratio matters, the observed time gives the scale."""
PRIOR_S_PER_UNIT = 5e-5
"""Assumed seconds per prompt token before the first observation."""
MEMORY_S = 60.0
"""Time constant of the learned cost, in seconds."""
_MIN_OBSERVED_S = 0.05
_ROUNDING = 1e-6


class ScalingPolicy(Struct, frozen=True, kw_only=True):
    """`target_wait_s`: waiting work is to be drained within this time. `utilization`: part of the capacity that running
    work should use. `scale_down_after_s`: how long fewer workers must have been enough. `limits`: the fewest and most
    workers of the groups that the gateway scales itself.
    """

    target_wait_s: float = 10.0
    utilization: float = 0.8
    scale_down_after_s: float = 300.0
    limits: Mapping[str, tuple[int, int]] = {}


class GroupDemand(Struct, frozen=True, kw_only=True):
    """A group now. `workers` are up or starting; `in_use` is the capacity in use, in workers."""

    workers: int
    in_use: float
    waiting_jobs: int
    waiting_s: float
    min_workers: int = 0
    max_workers: int | None = None


class ScaleAdvice(Struct, frozen=True, kw_only=True):
    """What `GET /admin/scale` says of a group. `needed`: the rule's result now. `desired`: workers it should have."""

    group: str
    current: int
    desired: int
    needed: int
    waiting_jobs: int
    waiting_work_seconds: float
    capacity_in_use_workers: float
    min_workers: int
    max_workers: int | None
    reason: str


class WorkCost:
    """Seconds of engine time per unit of work, learned from what engines report. A unit is a prompt token."""

    def __init__(self) -> None:
        self._busy_s = self._units = 0.0

    def observe(self, elapsed_s: float, busy_s: float, prompt_tokens: float, output_tokens: float) -> None:
        """Engines were busy for `busy_s` of the last `elapsed_s` and computed these tokens."""
        kept = exp(-elapsed_s / MEMORY_S)
        units = prompt_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens
        if busy_s > 0 and units > 0:  # an idle interval says nothing about the cost
            self._busy_s = self._busy_s * kept + busy_s
            self._units = self._units * kept + units

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        """Engine time of work that waits."""
        per_unit = self._busy_s / self._units if self._busy_s >= _MIN_OBSERVED_S else PRIOR_S_PER_UNIT
        return per_unit * (prompt_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens)


def needed_workers(demand: GroupDemand, policy: ScalingPolicy) -> int:
    """Workers that the group needs now, within its limits. Waiting or running work needs at least one."""
    needed = demand.in_use / policy.utilization + demand.waiting_s / policy.target_wait_s
    has_work = demand.in_use > 0 or demand.waiting_jobs > 0
    workers = max(ceil(needed - _ROUNDING), 1 if has_work else 0, demand.min_workers)
    return workers if demand.max_workers is None else min(workers, demand.max_workers)


class GroupScaler:
    """Advice for one group over time."""

    def __init__(self, group: str, policy: ScalingPolicy) -> None:
        self._group = group
        self._policy = policy
        # Times and needs, each need smaller than the one before: the first is the largest of the window.
        self._needs: deque[tuple[float, int]] = deque()

    def assume_needed(self, workers: int, now: float) -> None:
        """This many workers were found: they count as needed until now."""
        self._add(workers, now)

    def advise(self, demand: GroupDemand, now: float) -> ScaleAdvice:
        needed = needed_workers(demand, self._policy)
        needs = self._needs
        if not needs:
            # The past is not known: the present workers may have been needed.
            self._add(demand.workers, now)
        self._add(needed, now)
        while len(needs) > 1 and needs[0][0] <= now - self._policy.scale_down_after_s:
            needs.popleft()
        desired = _within_limits(needs[0][1], demand)
        return ScaleAdvice(
            group=self._group,
            current=demand.workers,
            desired=desired,
            needed=needed,
            waiting_jobs=demand.waiting_jobs,
            waiting_work_seconds=round(demand.waiting_s, 3),
            capacity_in_use_workers=round(demand.in_use, 3),
            min_workers=demand.min_workers,
            max_workers=demand.max_workers,
            reason=self._reason(demand, needed, desired),
        )

    def _add(self, workers: int, now: float) -> None:
        while self._needs and self._needs[-1][1] <= workers:
            self._needs.pop()
        self._needs.append((now, workers))

    def _reason(self, demand: GroupDemand, needed: int, desired: int) -> str:
        policy = self._policy
        if desired > needed:
            return f"{desired} workers were needed within the last {policy.scale_down_after_s:g} s"
        if needed == demand.max_workers:
            return "the maximum number of workers"
        if demand.waiting_s > 0:
            return (
                f"{demand.waiting_s:.1f} s of engine time waits, to be drained within {policy.target_wait_s:g} s; "
                f"capacity of {demand.in_use:.2f} workers is in use"
            )
        if demand.in_use > 0 and needed > demand.min_workers:
            return f"capacity of {demand.in_use:.2f} workers is in use, at most {policy.utilization:.0%} of each worker"
        return "the minimum number of workers"


def _within_limits(workers: int, demand: GroupDemand) -> int:
    workers = max(workers, demand.min_workers)
    return workers if demand.max_workers is None else min(workers, demand.max_workers)
