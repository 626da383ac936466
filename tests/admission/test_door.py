"""The door of the queues: who finds a place, who is told to come back, and whether that helps."""

import heapq
import random
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import pytest

from inferry.admission.door import (
    BEYOND_S,
    EARLY_S,
    GUESSED_EACH_S,
    GUESSED_SOONEST_S,
    LATE_S,
    LONGEST_S,
    SOONEST_S,
    Door,
)
from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from support.builders import a_job, a_policy

EACH_S = 0.5


def a_door(queue_limit: int = 10, refuse_at: float = 0.8, **more: bool | int) -> Door:
    policy = replace(a_policy(queue_limit=queue_limit), refuse_at=refuse_at)
    return Door(dict.fromkeys(Lane, policy), **more)  # type: ignore[arg-type]


def a_call(prompt: str = "a", **fields: str) -> InferenceJob:
    return replace(a_job(**fields), prompt_hash=prompt)  # type: ignore[arg-type]


def comes(
    door: Door, job: InferenceJob, now: float = 0.0, each_s: float = EACH_S, at_best_s: float | None = None
) -> float | None:
    """It is let in, or told when to come back."""
    if (
        not door.is_open(job)
        and (refusal := door.refusal(job, each_s, each_s if at_best_s is None else at_best_s, now)) is not None
    ):
        assert refusal.retry_after_s is not None
        return now + refusal.retry_after_s
    door.joined(job)
    return None


def filled(door: Door, jobs: int = 8) -> Iterator[InferenceJob]:
    for number in range(jobs):
        job = a_call(f"filler {number}")
        assert comes(door, job) is None
        yield job


def test_newcomers_are_refused_from_a_part_of_the_limit_on() -> None:
    door = a_door(10, 0.8)
    inside = list(filled(door, 8))
    assert comes(door, a_call("ninth")) is not None
    door.left(inside[0])
    assert comes(a_door(), a_call()) is None


def test_a_lane_of_one_takes_one() -> None:
    door = a_door(1, 0.1)
    assert comes(door, a_call()) is None
    assert comes(door, a_call("b")) is not None


def test_a_full_lane_refuses_nobody_in_another() -> None:
    door = a_door()
    list(filled(door))
    assert comes(door, replace(a_call("c"), lane=Lane.P0)) is None


def test_everybody_gets_a_turn_of_its_own() -> None:
    door = a_door()
    list(filled(door))
    told = [comes(door, a_call(f"late {number}")) for number in range(6)]
    assert told == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_who_comes_back_in_time_goes_before_newcomers() -> None:
    door = a_door()
    inside = list(filled(door))
    at = comes(door, a_call("mine"))
    for number in range(3):
        comes(door, a_call(f"other {number}"))
    assert at is not None
    door.left(inside[0])
    assert comes(door, a_call("a newcomer"), at) is not None
    assert comes(door, a_call("mine"), at) is None


def test_who_comes_back_may_use_what_newcomers_may_not() -> None:
    door = a_door(10, 0.8)
    list(filled(door))
    told = [comes(door, a_call(f"late {number}")) for number in range(4)]
    assert all(at is not None for at in told)
    back = [comes(door, a_call(f"late {number}"), at or 0.0) for number, at in enumerate(told)]
    assert back[:2] == [None, None], "up to the limit"
    assert all(at is not None for at in back[2:]), "and no further"


def test_who_comes_too_early_has_to_come_again_and_keeps_its_turn() -> None:
    door = a_door()
    inside = list(filled(door))
    comes(door, a_call("first"))
    comes(door, a_call("second"))
    at = comes(door, a_call("mine"))
    assert at is not None
    assert comes(door, a_call("mine"), at - 2 * EARLY_S) is not None
    door.left(inside[0])
    assert comes(door, a_call("mine"), at) is None


def test_turns_of_those_who_do_not_come_are_given_up() -> None:
    door = a_door()
    inside = list(filled(door))
    last = [comes(door, a_call(f"gone {number}")) for number in range(5)][-1]
    assert last is not None
    for job in inside[:4]:
        door.left(job)
    assert comes(door, a_call("newcomer"), last + LATE_S + 1) is None
    assert door.waiting_outside()[Lane.P1] == 0


def test_nobody_waits_for_those_who_do_not_come() -> None:
    door = a_door(10, 0.8)
    inside = list(filled(door))
    for number in range(40):
        comes(door, a_call(f"gone {number}"))
    for job in inside[:5]:
        door.left(job)
    assert comes(door, a_call("newcomer"), 0.5) is None, "with the queue less than half full"


def test_a_burst_above_is_first_taken_to_be_short_and_then_as_it_is() -> None:
    door = a_door(10, 1.0)
    list(filled(door, 10))
    for number in range(3):
        comes(door, a_call(f"other {number}"), each_s=4.0, at_best_s=1.0)
    at = comes(door, a_call("mine"), each_s=4.0, at_best_s=1.0)
    assert at == 4.0
    assert comes(door, a_call("mine"), at, each_s=4.0, at_best_s=1.0) == at + 4 * 4.0


def test_while_nothing_is_known_people_are_spread_out_all_the_same() -> None:
    door = a_door()
    list(filled(door))
    told = [comes(door, a_call(f"late {number}"), each_s=0.0) for number in range(30)]
    assert told[0] == GUESSED_SOONEST_S
    assert 30 * GUESSED_EACH_S <= (told[-1] or 0.0) <= 40 * GUESSED_EACH_S


def test_a_fast_queue_is_not_asked_again_at_once() -> None:
    door = a_door()
    list(filled(door))
    assert comes(door, a_call(), each_s=0.0001) == SOONEST_S


def test_nobody_is_told_to_come_later_than_clients_will() -> None:
    door = a_door()
    list(filled(door))
    told = [comes(door, a_call(f"late {number}"), each_s=10.0) for number in range(40)]
    assert all(at is not None and at <= LONGEST_S for at in told)
    assert told.count(BEYOND_S) > 20
    assert door.waiting_outside()[Lane.P1] == int(LONGEST_S / 10.0)


def test_a_tenant_that_floods_the_queue_does_not_shut_others_out() -> None:
    door = a_door(10, 0.8)
    list(filled(door))
    assert comes(door, a_call("more", tenant="a")) is not None
    assert comes(door, a_call("b's only call", tenant="b")) is None


def test_those_who_find_no_room_in_their_turn_are_not_all_told_the_same() -> None:
    door = a_door(10, 1.0)
    list(filled(door, 10))
    told = [comes(door, a_call(f"late {number}")) for number in range(10)]
    again = [comes(door, a_call(f"late {number}"), 5.0) for number in range(10)]
    assert told == [0.5 * turn for turn in range(1, 11)]
    times = [at for at in again if at is not None]
    assert len(times) == 10
    assert all(later - sooner >= 0.5 - 1e-9 for sooner, later in pairwise(times))


def test_a_tenant_with_many_turns_does_not_delay_those_of_another() -> None:
    door = a_door(10, 1.0)
    list(filled(door, 5))
    for number in range(5):
        assert comes(door, a_call(f"b's {number}", tenant="b")) is None
    for number in range(100):
        comes(door, a_call(f"late {number}", tenant="a"))
    told = [comes(door, a_call(f"b's late {number}", tenant="b")) for number in range(3)]
    assert told == [0.5, 1.5, 2.5], "its own and as many of the other"


def test_the_bytes_of_all_that_is_queued_are_bounded() -> None:
    door = a_door(max_queued_bytes=100)
    large = a_job(body=b"x" * 60)
    assert comes(door, large) is None
    assert comes(door, replace(a_job(body=b"x" * 60), lane=Lane.P2)) is not None
    assert comes(door, a_job(body=b"x" * 40)) is None
    with pytest.raises(QueueFull):
        door.hold(1)
    door.left(large)
    door.hold(60)
    door.let_go(60)
    assert door.queued_bytes == 40


def test_one_call_larger_than_all_that_may_be_queued_is_taken_when_nothing_is() -> None:
    assert comes(a_door(max_queued_bytes=10), a_job(body=b"x" * 60)) is None


def test_switched_off_it_knows_no_turns() -> None:
    door = a_door(keeps_turns=False)
    list(filled(door))
    refusal = door.refusal(a_call(), EACH_S, EACH_S, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s is None
    assert door.waiting_outside()[Lane.P1] == 0


@pytest.mark.parametrize(("believed_s", "most_errors"), [(0.05, 0), (0.07, 0), (0.035, 150)])
def test_clients_that_try_three_times_get_in_after_a_pulse_of_three_times_the_capacity(
    believed_s: float, most_errors: int
) -> None:
    """In virtual time: the door believes that a job takes so long, and really it takes 0.05 s."""
    clients, each_s, draw = 1800, 0.05, random.Random(5)
    door = a_door(100, 0.8)
    queue: deque[InferenceJob] = deque()
    events = [(draw.uniform(0.0, 30.0), client, 1) for client in range(clients)]
    heapq.heapify(events)
    served, errors, idle, goes_at = 0, 0, 0, 0.0
    while events or queue:
        if not events or goes_at <= events[0][0]:
            if queue:
                door.left(queue.popleft())
                served += 1
            elif goes_at < 85.0:
                idle += 1
            goes_at += each_s
            continue
        now, client, attempt = heapq.heappop(events)
        job = a_call(f"client {client}")
        at = comes(door, job, now, believed_s)
        if at is None:
            queue.append(job)
        elif attempt < 3:
            heapq.heappush(events, (at + draw.uniform(0.0, 0.05), client, attempt + 1))
        else:
            errors += 1
    assert served + errors == clients
    assert errors <= most_errors
    if believed_s <= each_s:
        assert idle * each_s < 1.0
    assert door.waiting_outside()[Lane.P1] <= errors, "none but those who have given up"
