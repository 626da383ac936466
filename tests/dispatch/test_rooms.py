"""The rooms of workers, as the loop keeps them."""

from inferry.dispatch.rooms import Rooms
from inferry.domain.attempts import Attempt
from inferry.domain.lanes import DEFAULT_LANES, Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.values import replace
from inferry.domain.workers import Room, WorkerView
from support.builders import a_job, a_view


def _view(**changes: object) -> WorkerView:
    return replace(a_view("w", sequences=64, kv_tokens=10_000), controlled=True, chunk_tokens=2048, **changes)


def _sent(rooms: Rooms, now: float, *, tokens: int = 100, lane: Lane = Lane.P1) -> Attempt:
    job = a_job(f"{now}", tokens=tokens, lane=lane, at=now)
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=now)
    attempt.sent(plan, now)
    rooms.sent(attempt, now)
    return attempt


def _served(rooms: Rooms, seconds: float) -> float:
    """A job after the other, ten tokens each in steps of 10 ms; the time it is then."""
    now = 0.0
    while now < seconds:
        attempt = _sent(rooms, now)
        now += 0.02
        attempt.first_token(now)
        rooms.first_token(attempt, now)
        for _ in range(10):
            now += 0.01
            attempt.output_tokens += 1
            rooms.look(now)
        rooms.ended(attempt, now)
    return now


def test_a_worker_whose_room_is_fixed_keeps_it() -> None:
    rooms = Rooms(DEFAULT_LANES)
    view = a_view("w", sequences=64, kv_tokens=10_000)
    assert rooms.seen(view, 0.0) is view
    _served(rooms, 2.0)
    assert rooms.look(2.0) == []


def test_a_controlled_room_stays_inside_what_the_worker_holds() -> None:
    rooms = Rooms(DEFAULT_LANES)
    room = rooms.seen(_view(), 0.0).room
    assert room.sequences == 64
    assert (room.kv_tokens or 0) <= 10_000


def test_the_room_follows_what_passes_through() -> None:
    rooms = Rooms(DEFAULT_LANES)
    rooms.seen(_view(), 0.0)
    now = _served(rooms, 5.0)
    attempt = _sent(rooms, now)
    attempt.first_token(now + 0.02)
    rooms.first_token(attempt, now + 0.02)
    assert rooms.seen(_view(), now + 0.02).room.prefill_tokens_per_s is not None


def test_the_scheduler_hears_only_of_rooms_that_changed() -> None:
    rooms = Rooms(DEFAULT_LANES)
    rooms.seen(_view(), 0.0)
    now = _served(rooms, 5.0)
    rooms.look(now + 2.0)
    assert rooms.look(now + 2.0) == []
    assert rooms.look(now + 2.05) == []


def test_limits_that_change_are_heeded() -> None:
    rooms = Rooms(DEFAULT_LANES)
    rooms.seen(_view(), 0.0)
    assert rooms.seen(_view(room=Room(sequences=7, kv_tokens=10_000)), 1.0).room.sequences == 7


def test_jobs_that_were_sent_before_the_worker_was_controlled_do_not_count() -> None:
    rooms = Rooms(DEFAULT_LANES)
    attempt = _sent(rooms, 0.0)
    rooms.seen(_view(), 0.0)
    attempt.first_token(0.1)
    rooms.first_token(attempt, 0.1)
    rooms.ended(attempt, 0.2)
    assert rooms.seen(_view(), 1.0).room.sequences == 64


def test_a_job_that_ends_before_its_first_token_leaves_nothing_behind() -> None:
    rooms = Rooms(DEFAULT_LANES)
    rooms.seen(_view(), 0.0)
    for number in range(10):
        rooms.ended(_sent(rooms, float(number)), number + 0.5)
    assert not rooms._keepers["w"].jobs
    assert rooms._keepers["w"].controller._decoding_now() == 0
