"""The room of every worker, computed from what passes through the loop.

Owned by the dispatch loop, which tells it of every job sent, every first token and every end, and asks it for the views
that the scheduler is to have. One controller per worker; workers whose room is fixed by configuration have none.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import Lane, LanePolicy
from inferry.domain.plans import Room, WorkerView
from inferry.scheduling.controller import RoomController, Stream

LOOK_S = 0.05
NEWS = 0.03
"""A room that differs by less than this part in every currency is none the scheduler has to hear of."""


class _Keeper:
    """One worker. `jobs` are the attempts that were sent there, with their streams once they decode."""

    __slots__ = ("controller", "jobs", "limits", "room", "view")

    def __init__(self, lanes: Mapping[Lane, LanePolicy], view: WorkerView) -> None:
        self.view = view
        self.limits = view.room
        self.controller = RoomController(lanes, view.room, view.chunk_tokens)
        self.room = view.room
        self.jobs: dict[Attempt, Stream | None] = {}


class Rooms:
    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        self._lanes = lanes
        self._keepers: dict[str, _Keeper] = {}

    def seen(self, view: WorkerView, now: float) -> WorkerView:
        """The pool has a new view of a worker; the one the scheduler is to have of it."""
        if not view.controlled:
            self._keepers.pop(view.worker, None)
            return view
        keeper = self._keepers.get(view.worker)
        if keeper is None:
            keeper = self._keepers[view.worker] = _Keeper(self._lanes, view)
        keeper.view = view
        if keeper.limits != view.room:
            keeper.limits = view.room
            keeper.controller.limit(view.room, view.chunk_tokens)
        keeper.room = self._room(keeper, now)
        return replace(view, room=keeper.room)

    def look(self, now: float) -> list[WorkerView]:
        """Views of the workers whose room has changed since it was last told."""
        news = []
        for keeper in self._keepers.values():
            room = self._room(keeper, now)
            if _is_news(keeper.room, room):
                keeper.room = room
                news.append(replace(keeper.view, room=room))
        return news

    def sent(self, attempt: Attempt, now: float) -> None:
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
            keeper.jobs[attempt] = keeper.controller.first_token(job.lane, prefill_tokens, job.arrived_at, now)

    def ended(self, attempt: Attempt, now: float) -> None:
        """An attempt is over; one that was never sent is no news here."""
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

    def _of(self, attempt: Attempt) -> _Keeper | None:
        return None if attempt.plan is None else self._keepers.get(attempt.plan.worker)

    def _room(self, keeper: _Keeper, now: float) -> Room:
        for attempt, stream in keeper.jobs.items():
            if stream is not None and attempt.output_tokens > stream.tokens:
                stream.tokens = attempt.output_tokens
        keeper.controller.observe(keeper.view.load)
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
