"""The room of every worker, computed from what passes through the loop.

Owned by the dispatch loop, which tells it of every job sent, every first token and every end, and asks it for the views
that the scheduler is to have. One controller per worker; workers whose room is fixed by configuration have none.
"""

from collections.abc import Callable, Collection, Mapping

from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, WorkerView
from inferry.scheduling.capacity.controller import CapacityController, Stream

CAPACITY_INTERVAL_S = 0.05
MIN_RELATIVE_CHANGE = 0.03
"""A room that differs by less than this part in every currency is none the scheduler has to hear of."""


class _TrackedWorker:
    """One worker. `jobs` are the attempts that were sent there, with their streams once they decode."""

    __slots__ = ("capacity", "controller", "expected_cached_tokens", "jobs", "limits", "view")

    def __init__(self, lanes: Mapping[Lane, LanePolicy], view: WorkerView) -> None:
        self.view = view
        self.limits = view.capacity
        self.controller = CapacityController(lanes, view.capacity, view.chunk_tokens)
        self.capacity = view.capacity
        self.jobs: dict[Attempt, Stream | None] = {}
        self.expected_cached_tokens = 0


class CapacityTracker:
    """`on_cached` hears how many tokens of a model's prompts were known from before, and how many of those its worker
    found in its cache.
    """

    def __init__(
        self, lanes: Mapping[Lane, LanePolicy], on_cached: Callable[[str, int, int], None] | None = None
    ) -> None:
        self._lanes = lanes
        self._on_cached = on_cached
        self._tracked: dict[str, _TrackedWorker] = {}
        # Those who wait for a worker, longest first, by what they wait for.
        self._waiting: dict[tuple[Lane, str], dict[Attempt, None]] = {}

    def update_view(self, view: WorkerView, now: float) -> WorkerView:
        """The pool has a new view of a worker; the one the scheduler is to have of it."""
        if not view.controlled:
            self._tracked.pop(view.worker, None)
            return view
        tracked = self._tracked.get(view.worker)
        if tracked is None:
            tracked = self._tracked[view.worker] = _TrackedWorker(self._lanes, view)
        if tracked.limits != view.capacity or tracked.view.chunk_tokens != view.chunk_tokens:
            tracked.limits = view.capacity
            tracked.controller.limit(view.capacity, view.chunk_tokens)
        self._report_prefix_hits(tracked, view)
        tracked.view = view
        tracked.capacity = self._compute_capacity(tracked, now)
        return replace(view, capacity=tracked.capacity)

    def forget(self, worker: str) -> None:
        """A worker is gone; one that comes under its name is another."""
        self._tracked.pop(worker, None)

    def refresh(self, now: float) -> list[WorkerView]:
        """Views of the workers whose room has changed since it was last told."""
        changed_views = []
        for tracked in self._tracked.values():
            capacity = self._compute_capacity(tracked, now)
            if _has_changed(tracked.capacity, capacity):
                tracked.capacity = capacity
                changed_views.append(replace(tracked.view, capacity=capacity))
        return changed_views

    def queued(self, attempt: Attempt) -> None:
        job = attempt.job
        key = job.lane, job.route.model
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = {}
        waiting[attempt] = None

    def sent(self, attempt: Attempt, now: float) -> None:
        self._stop_waiting(attempt)
        tracked = self._tracked_for(attempt)
        if tracked is not None:
            job = attempt.job
            tracked.jobs[attempt] = None
            tracked.controller.sent(job.lane, job.footprint.prefill_tokens, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        tracked = self._tracked_for(attempt)
        if tracked is not None and attempt in tracked.jobs:
            job = attempt.job
            prefill_tokens = job.footprint.prefill_tokens
            tracked.expected_cached_tokens += job.footprint.cached.high
            tracked.jobs[attempt] = tracked.controller.first_token(job.lane, prefill_tokens, attempt.slo_start_at, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        """An attempt is over, sent or not."""
        if attempt.sent_at is None:
            self._stop_waiting(attempt)
        tracked = self._tracked_for(attempt)
        if tracked is not None and attempt in tracked.jobs:
            stream = tracked.jobs.pop(attempt)
            if stream is not None:
                stream.tokens = max(stream.tokens, attempt.output_tokens)
            tracked.controller.ended(attempt.job.lane, stream, now)

    def describe(self) -> list[str]:
        """What is believed of every controlled worker, for the log."""
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
        # Which model they were of is only known where there is one; fewer than before means that it started again.
        if self._on_cached is not None and len(view.models) == 1 and hits_after >= hits_before:
            (model,) = view.models
            self._on_cached(model, expected_cached_tokens, hits_after - hits_before)

    def _stop_waiting(self, attempt: Attempt) -> None:
        job = attempt.job
        waiting = self._waiting.get((job.lane, job.route.model))
        if waiting is not None:
            waiting.pop(attempt, None)

    def _waiting_since(self, lane: Lane, models: Collection[str]) -> float | None:
        oldest = [next(iter(waiting), None) for model in models if (waiting := self._waiting.get((lane, model)))]
        return min((first.slo_start_at for first in oldest if first is not None), default=None)

    def _tracked_for(self, attempt: Attempt) -> _TrackedWorker | None:
        return None if attempt.plan is None else self._tracked.get(attempt.plan.worker)

    def _compute_capacity(self, tracked: _TrackedWorker, now: float) -> Capacity:
        for attempt, stream in tracked.jobs.items():
            if stream is not None and attempt.output_tokens > stream.tokens:
                stream.tokens = attempt.output_tokens
        for lane in self._lanes:
            tracked.controller.waiting(lane, self._waiting_since(lane, tracked.view.models))
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
        )
    )
