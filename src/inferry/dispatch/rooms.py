"""The room of every worker, computed from what passes through the loop.

Owned by the dispatch loop, which tells it of every job sent, every first token and every end, and asks it for the views
that the scheduler is to have. One controller per worker; workers whose room is fixed by configuration have none.
"""

from collections.abc import Callable, Collection, Mapping

from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.values import replace
from inferry.domain.workers import Room, WorkerView
from inferry.scheduling.controller import RoomController, Stream

LOOK_S = 0.05
NEWS = 0.03
"""A room that differs by less than this part in every currency is none the scheduler has to hear of."""


class _Keeper:
    """One worker. `jobs` are the attempts that were sent there, with their streams once they decode."""

    __slots__ = ("controller", "jobs", "known_tokens", "limits", "room", "view")

    def __init__(self, lanes: Mapping[Lane, LanePolicy], view: WorkerView) -> None:
        self.view = view
        self.limits = view.room
        self.controller = RoomController(lanes, view.room, view.chunk_tokens)
        self.room = view.room
        self.jobs: dict[Attempt, Stream | None] = {}
        self.known_tokens = 0


class Rooms:
    """`on_cached` hears how many tokens of a model's prompts were known from before, and how many of those its worker
    found in its cache.
    """

    def __init__(
        self, lanes: Mapping[Lane, LanePolicy], on_cached: Callable[[str, int, int], None] | None = None
    ) -> None:
        self._lanes = lanes
        self._on_cached = on_cached
        self._keepers: dict[str, _Keeper] = {}
        # Those who wait for a worker, longest first, by what they wait for.
        self._waiting: dict[tuple[Lane, str], dict[Attempt, None]] = {}

    def seen(self, view: WorkerView, now: float) -> WorkerView:
        """The pool has a new view of a worker; the one the scheduler is to have of it."""
        if not view.controlled:
            self._keepers.pop(view.worker, None)
            return view
        keeper = self._keepers.get(view.worker)
        if keeper is None:
            keeper = self._keepers[view.worker] = _Keeper(self._lanes, view)
        if keeper.limits != view.room or keeper.view.chunk_tokens != view.chunk_tokens:
            keeper.limits = view.room
            keeper.controller.limit(view.room, view.chunk_tokens)
        self._compare(keeper, view)
        keeper.view = view
        keeper.room = self._room(keeper, now)
        return replace(view, room=keeper.room)

    def forget(self, worker: str) -> None:
        """A worker is gone; one that comes under its name is another."""
        self._keepers.pop(worker, None)

    def look(self, now: float) -> list[WorkerView]:
        """Views of the workers whose room has changed since it was last told."""
        news = []
        for keeper in self._keepers.values():
            room = self._room(keeper, now)
            if _is_news(keeper.room, room):
                keeper.room = room
                news.append(replace(keeper.view, room=room))
        return news

    def queued(self, attempt: Attempt) -> None:
        job = attempt.job
        key = job.lane, job.route.model
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = {}
        waiting[attempt] = None

    def sent(self, attempt: Attempt, now: float) -> None:
        self._waits_no_more(attempt)
        keeper = self._of(attempt)
        if keeper is not None:
            job = attempt.job
            keeper.jobs[attempt] = None
            keeper.controller.sent(job.lane, job.footprint.prefill_tokens, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        keeper = self._of(attempt)
        if keeper is not None and attempt in keeper.jobs:
            job = attempt.job
            prefill_tokens = job.footprint.prefill_tokens
            keeper.known_tokens += job.footprint.cached.high
            keeper.jobs[attempt] = keeper.controller.first_token(job.lane, prefill_tokens, attempt.promised_from, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        """An attempt is over, sent or not."""
        if attempt.sent_at is None:
            self._waits_no_more(attempt)
        keeper = self._of(attempt)
        if keeper is not None and attempt in keeper.jobs:
            stream = keeper.jobs.pop(attempt)
            if stream is not None:
                stream.tokens = max(stream.tokens, attempt.output_tokens)
            keeper.controller.ended(attempt.job.lane, stream, now)

    def describe(self) -> list[str]:
        """What is believed of every controlled worker, for the log."""
        return [
            f"worker {name}: {keeper.room}, a step {1000 * costs.base_s:.2f} ms, a token {1e6 * costs.token_s:.0f} us, "
            f"a prompt token {1e6 * costs.prompt_s:.1f} us, least slack "
            + " ".join(f"{lane.name} {keeper.controller.slack_s(lane):.2f}" for lane in self._lanes)
            + f", {len(keeper.jobs)} jobs"
            for name, keeper in self._keepers.items()
            for costs in (keeper.controller.costs,)
        ]

    def _compare(self, keeper: _Keeper, view: WorkerView) -> None:
        before, after = keeper.view.prefix_hits, view.prefix_hits
        if before is None or after is None:
            return
        known_tokens, keeper.known_tokens = keeper.known_tokens, 0
        # Which model they were of is only known where there is one; fewer than before means that it started again.
        if self._on_cached is not None and len(view.models) == 1 and after >= before:
            (model,) = view.models
            self._on_cached(model, known_tokens, after - before)

    def _waits_no_more(self, attempt: Attempt) -> None:
        job = attempt.job
        waiting = self._waiting.get((job.lane, job.route.model))
        if waiting is not None:
            waiting.pop(attempt, None)

    def _waiting_since(self, lane: Lane, models: Collection[str]) -> float | None:
        firsts = [next(iter(waiting), None) for model in models if (waiting := self._waiting.get((lane, model)))]
        return min((first.promised_from for first in firsts if first is not None), default=None)

    def _of(self, attempt: Attempt) -> _Keeper | None:
        return None if attempt.plan is None else self._keepers.get(attempt.plan.worker)

    def _room(self, keeper: _Keeper, now: float) -> Room:
        for attempt, stream in keeper.jobs.items():
            if stream is not None and attempt.output_tokens > stream.tokens:
                stream.tokens = attempt.output_tokens
        for lane in self._lanes:
            keeper.controller.waiting(lane, self._waiting_since(lane, keeper.view.models))
        keeper.controller.observe(keeper.view.load)
        if keeper.view.counts is not None and keeper.view.counted_at is not None:
            keeper.controller.count(keeper.view.counts, keeper.view.counted_at)
        return keeper.controller.room(now)


def _is_news(old: Room, new: Room) -> bool:
    return any(
        (a is None) is not (b is None) or (a is not None and b is not None and abs(a - b) > NEWS * max(a, b))
        for a, b in (
            (old.sequences, new.sequences),
            (old.kv_tokens, new.kv_tokens),
            (old.prefill_tokens, new.prefill_tokens),
            (old.prefill_tokens_per_s, new.prefill_tokens_per_s),
            (old.batch_sequences, new.batch_sequences),
        )
    )
