"""The capacity of every worker, computed from the job events.

Subscribes to `queued`, `sent`, `first_token` and `ended`, and gives out the views that the scheduler gets. One
controller per worker; workers whose capacity is fixed by configuration have none.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, WorkerView
from inferry.scheduling.capacity.controller import CapacityController, Stream

CAPACITY_INTERVAL_S = 0.05
MIN_RELATIVE_CHANGE = 0.03
"""The scheduler is told of a capacity only if some part of it has changed by more than this share."""

MIN_WAIT_S: Final = 0.05


class _TrackedWorker:
    """One worker. `jobs` are the attempts sent there, each with its stream once it decodes."""

    __slots__ = ("capacity", "controller", "expected_cached_tokens", "jobs", "limits", "view")

    def __init__(self, lanes: Mapping[Lane, LanePolicy], view: WorkerView) -> None:
        self.view = view
        self.limits = view.capacity
        self.controller = CapacityController(lanes, view.capacity, view.chunk_tokens)
        self.capacity = view.capacity
        self.jobs: dict[Attempt, Stream | None] = {}
        self.expected_cached_tokens = 0


class CapacityTracker:
    """`on_cached` is told how many prompt tokens of a model had been seen before, and how many of those its worker
    found in its cache.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        depth: QueueDepth,
        on_cached: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._lanes = lanes
        self._depth = depth
        self._on_cached = on_cached
        self._tracked: dict[str, _TrackedWorker] = {}
        self._serving: dict[str, list[_TrackedWorker]] = {}
        self._prefilling: dict[str, list[_TrackedWorker]] = {}
        self._arrivals = 0

    def use_lanes(self) -> None:
        """The lanes have other SLO targets."""
        for tracked in self._tracked.values():
            tracked.controller.use_lanes(self._lanes)

    def update_view(self, view: WorkerView, now: float) -> WorkerView:
        """The view that the scheduler gets of a worker whose view in the pool has changed."""
        tracked = self._tracked.get(view.worker)
        if tracked is None or not view.controlled or tracked.view.models != view.models:
            self._forget_serving()
        if not view.controlled:
            self._tracked.pop(view.worker, None)
            return view
        if tracked is None:
            tracked = self._tracked[view.worker] = _TrackedWorker(self._lanes, view)
        if tracked.limits != view.capacity or tracked.view.chunk_tokens != view.chunk_tokens:
            tracked.limits = view.capacity
            tracked.controller.limit(view.capacity, view.chunk_tokens)
        self._report_prefix_hits(tracked, view)
        tracked.view = view
        tracked.capacity = self._compute_capacity(tracked, now)
        return replace(view, capacity=tracked.capacity)

    def capacity_of(self, view: WorkerView) -> Capacity:
        """The capacity that the scheduler was told last, or what the view names."""
        tracked = self._tracked.get(view.worker)
        return view.capacity if tracked is None else tracked.capacity

    def forget(self, worker: str) -> None:
        """A worker was removed; a later one of the same name starts afresh."""
        self._forget_serving()
        self._tracked.pop(worker, None)

    def _forget_serving(self) -> None:
        self._serving.clear()
        self._prefilling.clear()

    def refresh(self, now: float) -> list[WorkerView]:
        """Views of the workers whose capacity has changed since the scheduler was last told."""
        changed_views = []
        for tracked in self._tracked.values():
            capacity = self._compute_capacity(tracked, now)
            if _has_changed(tracked.capacity, capacity):
                tracked.capacity = capacity
                changed_views.append(replace(tracked.view, capacity=capacity))
        return changed_views

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        """Tell one controller of the job, in rotation: without the gateway, calls are divided like that."""
        job, model = attempt.job, attempt.job.route.model
        is_prefill = job.route.role == "prefill"
        known = self._prefilling if is_prefill else self._serving
        serving = known.get(model)
        if serving is None:
            serving = [
                tracked
                for tracked in self._tracked.values()
                if model in tracked.view.models and (tracked.view.role == "prefill") == is_prefill
            ]
            known[model] = serving
        if serving:
            self._arrivals += 1
            serving[self._arrivals % len(serving)].controller.arrived(job.lane, job.footprint, now)

    def sent(self, attempt: Attempt, now: float) -> None:
        tracked = self._tracked_for(attempt)
        if tracked is not None:
            job = attempt.job
            tracked.jobs[attempt] = None
            tracked.controller.sent(job.lane, attempt.prefill_tokens, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        tracked = self._tracked_for(attempt)
        if tracked is not None and attempt in tracked.jobs:
            job = attempt.job
            prefill_tokens = attempt.prefill_tokens
            if job.route.role != "decode" and attempt.finds_prefix:  # what was handed over is in no cache
                tracked.expected_cached_tokens += job.footprint.cached.high
            tracked.jobs[attempt] = tracked.controller.first_token(job.lane, prefill_tokens, attempt.slo_start_at, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        tracked = self._tracked_for(attempt)
        if tracked is not None and attempt in tracked.jobs:
            stream = tracked.jobs.pop(attempt)
            if stream is not None:
                stream.tokens = max(stream.tokens, attempt.output_tokens)
            tracked.controller.ended(attempt.job.lane, stream, now)

    # -- what it computes --------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """Capacity and step costs of every controlled worker, for the log."""
        return [
            f"worker {name}: {tracked.capacity}, a step {1000 * costs.base_s:.2f} ms, a token "
            f"{1e6 * costs.token_s:.0f} us, "
            f"a prompt token {1e6 * costs.prompt_s:.1f} us, least slack "
            + " ".join(f"{lane.name} {tracked.controller.slack_s(lane):.2f}" for lane in self._lanes)
            + f", {len(tracked.jobs)} jobs"
            for name, tracked in self._tracked.items()
            for costs in (tracked.controller.costs,)
        ]

    def _report_prefix_hits(self, tracked: _TrackedWorker, view: WorkerView) -> None:
        hits_before, hits_after = tracked.view.prefix_hits, view.prefix_hits
        if hits_before is None or hits_after is None:
            return
        expected_cached_tokens, tracked.expected_cached_tokens = tracked.expected_cached_tokens, 0
        # The model is known only where there is one. A smaller counter means that the engine has restarted.
        if self._on_cached is not None and len(view.models) == 1 and hits_after >= hits_before:
            (model,) = view.models
            self._on_cached(model, expected_cached_tokens, hits_after - hits_before)

    def _tracked_for(self, attempt: Attempt) -> _TrackedWorker | None:
        return None if attempt.plan is None else self._tracked.get(attempt.plan.worker)

    def _compute_capacity(self, tracked: _TrackedWorker, now: float) -> Capacity:
        for attempt, stream in tracked.jobs.items():
            if stream is not None and attempt.output_tokens > stream.tokens:
                stream.tokens = attempt.output_tokens
        for lane in self._lanes:
            tracked.controller.waiting(lane, self._depth.oldest_slo_start_at(lane, tracked.view.models))
        tracked.controller.observe(tracked.view.load)
        if tracked.view.counts is not None and tracked.view.counted_at is not None:
            tracked.controller.observe_counts(tracked.view.counts, tracked.view.counted_at)
        return tracked.controller.capacity(now)


def _has_changed(old: Capacity, new: Capacity) -> bool:
    return any(
        (a is None) is not (b is None)
        or (a is not None and b is not None and abs(a - b) > MIN_RELATIVE_CHANGE * max(a, b))
        for a, b in (
            (old.sequences, new.sequences),
            (old.kv_tokens, new.kv_tokens),
            (old.prefill_tokens, new.prefill_tokens),
            (old.prefill_tokens_per_s, new.prefill_tokens_per_s),
            (old.batch_sequences, new.batch_sequences),
            *_waits(old, new),
        )
    )


def _waits(old: Capacity, new: Capacity) -> Iterable[tuple[float | None, float | None]]:
    """The waits by lane; waits below `MIN_WAIT_S` count as that."""
    if old.direct is None or new.direct is None:
        return [(None, None) if old.direct is new.direct else (None, 0.0)]
    return [
        (max(a, MIN_WAIT_S), max(b, MIN_WAIT_S)) for a, b in zip(old.direct.waits_s, new.direct.waits_s, strict=True)
    ]
