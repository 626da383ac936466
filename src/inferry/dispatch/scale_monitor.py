"""The scaling advice for every worker group, from the queue and the views of workers. Called every second.

Belongs to the event loop of the gateway. It reads; whatever follows the advice (Ray Serve, Kubernetes) does so itself.
"""

from collections.abc import Callable, Mapping

from inferry.dispatch.pool import Pool
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.workers import Phase, WorkerView
from inferry.prediction.scaling import GroupDemand, GroupScaler, ScaleAdvice, ScalingPolicy, WorkCost

MAX_SAMPLED_JOBS = 1000
"""Queued jobs of a lane and model whose tokens are added up, so that a long queue does not delay the event loop."""

Reading = tuple[float, int, int]
"""Busy seconds, prompt tokens and output tokens since the start of an engine."""


class ScaleMonitor:
    """`used_fraction` is the part of a worker's capacity in use. In groups without limits in the policy the advice is
    at least one worker: the gateway could not start the first.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        used_fraction: Callable[[WorkerView], float],
        depth: QueueDepth,
        policy: ScalingPolicy,
    ) -> None:
        self._lanes = lanes
        self._pool = pool
        self._used_fraction = used_fraction
        self._depth = depth
        self._policy = policy
        self._scalers: dict[str, GroupScaler] = {}
        self._costs: dict[str, WorkCost] = {}
        self._readings: dict[str, Reading] = {}
        self._sampled_at: float | None = None
        self._advice: dict[str, ScaleAdvice] = {}

    def report(self) -> list[ScaleAdvice]:
        return [self._advice[group] for group in sorted(self._advice)]

    def desired(self, group: str) -> int | None:
        """Replicas that the group should have; None before the first sample."""
        advice = self._advice.get(group)
        return None if advice is None else advice.desired

    def assume_needed(self, group: str, workers: int, now: float) -> None:
        """This many replicas of the group run already: they are not stopped before `scale_down_after_s`."""
        self._scaler(group).assume_needed(workers, now)

    def desired_by_group(self) -> dict[str, float]:
        return {advice.group: float(advice.desired) for advice in self.report()}

    def waiting_by_group(self) -> dict[str, float]:
        """Waiting work in seconds of engine time."""
        return {advice.group: advice.waiting_work_seconds for advice in self.report()}

    def sample(self, now: float) -> None:
        # An owner elsewhere advises for the workers behind a remote one.
        views = [view for view in self._pool.views() if not view.is_remote]
        self._learn_costs(views, now)
        waiting = self._waiting(views)
        groups: dict[str, list[WorkerView]] = {}
        for view in views:
            groups.setdefault(view.group, []).append(view)
        for group, members in groups.items():
            self._advice[group] = self._scaler(group).advise(
                self._demand(group, members, waiting.get(group, (0, 0.0))), now
            )
        for group in self._advice.keys() - groups.keys():
            del self._advice[group], self._scalers[group]

    def _demand(self, group: str, members: list[WorkerView], waiting: tuple[int, float]) -> GroupDemand:
        workers = [view for view in members if view.scale_up_wait_s is None and view.phase is not Phase.DRAINING]
        min_workers, max_workers = self._policy.limits.get(group, (1, None))
        return GroupDemand(
            workers=len(workers),
            in_use=sum([self._used_fraction(view) for view in members]),
            waiting_jobs=waiting[0],
            waiting_s=waiting[1],
            min_workers=min_workers,
            max_workers=max_workers,
        )

    def _waiting(self, views: list[WorkerView]) -> dict[str, tuple[int, float]]:
        """Queued jobs and their engine time, by the first group that may serve them."""
        found: dict[str, tuple[int, float]] = {}
        for lane, model, jobs, prompt_tokens, output_tokens in self._depth.work_by_route(MAX_SAMPLED_JOBS):
            serving = [view.group for view in views if model in view.models]
            groups = self._lanes[lane].groups or serving
            group = next((one for one in groups if one in serving), None)
            if group is not None:
                jobs_before, seconds_before = found.get(group, (0, 0.0))
                seconds = self._cost(group).seconds(prompt_tokens, output_tokens)
                found[group] = jobs_before + jobs, seconds_before + seconds
        return found

    def _learn_costs(self, views: list[WorkerView], now: float) -> None:
        elapsed_s = 0.0 if self._sampled_at is None else now - self._sampled_at
        self._sampled_at = now
        readings: dict[str, Reading] = {}
        for view in views:
            reading = _reading(self._pool.reported_view(view.worker))
            if reading is None:
                continue
            readings[view.worker] = reading
            before = self._readings.get(view.worker)
            if before is not None and reading[0] >= before[0]:  # else the engine has restarted
                busy_s, prompt_tokens, output_tokens = (new - old for new, old in zip(reading, before, strict=True))
                self._cost(view.group).observe(elapsed_s, busy_s, prompt_tokens, output_tokens)
        self._readings = readings

    def _scaler(self, group: str) -> GroupScaler:
        scaler = self._scalers.get(group)
        if scaler is None:
            scaler = self._scalers[group] = GroupScaler(group, self._policy)
        return scaler

    def _cost(self, group: str) -> WorkCost:
        cost = self._costs.get(group)
        if cost is None:
            cost = self._costs[group] = WorkCost()
        return cost


def _reading(view: WorkerView | None) -> Reading | None:
    """What the engine says of its work; None where it does not measure its steps."""
    if view is None or view.busy_s is None or view.step_work is None:
        return None
    return view.busy_s, view.step_work.prompt_tokens, view.step_work.decode_rows
