"""Queue limits: admission to a lane's queue, retry slots, and whether retries succeed."""

import heapq
import random
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from inferry.admission.queue_limiter import (
    DEFAULT_MIN_RETRY_AFTER_S,
    DEFAULT_SPACING_S,
    EARLY_TOLERANCE_S,
    LATE_TOLERANCE_S,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    NO_SLOT_RETRY_AFTER_S,
    QueueLimiter,
)
from inferry.domain.attempts import Attempt
from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from support.builders import a_job, a_policy

EACH_S = 0.5


class Queue:
    """A limiter with the queue depth that it reads."""

    def __init__(self, queue_limit: int, high_watermark: float, **more: Any) -> None:
        policy = replace(a_policy(queue_limit=queue_limit), high_watermark=high_watermark)
        self._depth = QueueDepth()
        self._queued: dict[str, Attempt] = {}
        self.limiter = QueueLimiter(dict.fromkeys(Lane, policy), self._depth, **more)
        self.has_space, self.refusal = self.limiter.has_space, self.limiter.refusal
        self.reserve_bytes, self.release_bytes = self.limiter.reserve_bytes, self.limiter.release_bytes
        self.pending_retries = self.limiter.pending_retries

    @property
    def queued_bytes(self) -> int:
        return self.limiter.queued_bytes

    def joined(self, job: InferenceJob) -> None:
        attempt = self._queued[job.job_id] = Attempt(job)
        self._depth.queued(attempt, 0.0)

    def left(self, job: InferenceJob) -> None:
        self._depth.sent(self._queued.pop(job.job_id), 0.0)


def a_door(queue_limit: int = 10, high_watermark: float = 0.8, **more: bool | int) -> Queue:
    return Queue(queue_limit, high_watermark, **more)


def a_call(prompt: str = "a", **fields: str) -> InferenceJob:
    return replace(a_job(**fields), prompt_hash=prompt)  # type: ignore[arg-type]


def comes(
    queue_limiter: Queue,
    job: InferenceJob,
    now: float = 0.0,
    seconds_per_job: float = EACH_S,
    best_case_s_per_job: float | None = None,
) -> float | None:
    """It is let in, or told when to come back."""
    if (
        not queue_limiter.has_space(job)
        and (
            refusal := queue_limiter.refusal(
                job, seconds_per_job, seconds_per_job if best_case_s_per_job is None else best_case_s_per_job, now
            )
        )
        is not None
    ):
        assert refusal.retry_after_s is not None
        return now + refusal.retry_after_s
    queue_limiter.joined(job)
    return None


def filled(queue_limiter: Queue, jobs: int = 8) -> Iterator[InferenceJob]:
    for number in range(jobs):
        job = a_call(f"filler {number}")
        assert comes(queue_limiter, job) is None
        yield job


def test_new_jobs_are_refused_above_the_high_watermark() -> None:
    queue_limiter = a_door(10, 0.8)
    inside = list(filled(queue_limiter, 8))
    assert comes(queue_limiter, a_call("ninth")) is not None
    queue_limiter.left(inside[0])
    assert comes(a_door(), a_call()) is None


def test_a_lane_with_a_limit_of_one_takes_one_job() -> None:
    queue_limiter = a_door(1, 0.1)
    assert comes(queue_limiter, a_call()) is None
    assert comes(queue_limiter, a_call("b")) is not None


def test_a_full_lane_refuses_no_job_of_another_lane() -> None:
    queue_limiter = a_door()
    list(filled(queue_limiter))
    assert comes(queue_limiter, replace(a_call("c"), lane=Lane.P0)) is None


def test_each_refused_client_gets_its_own_retry_slot() -> None:
    queue_limiter = a_door()
    list(filled(queue_limiter))
    told = [comes(queue_limiter, a_call(f"late {number}")) for number in range(6)]
    assert told == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_a_client_in_its_retry_slot_goes_before_newcomers() -> None:
    queue_limiter = a_door()
    inside = list(filled(queue_limiter))
    at = comes(queue_limiter, a_call("mine"))
    for number in range(3):
        comes(queue_limiter, a_call(f"other {number}"))
    assert at is not None
    queue_limiter.left(inside[0])
    assert comes(queue_limiter, a_call("a newcomer"), at) is not None
    assert comes(queue_limiter, a_call("mine"), at) is None


def test_a_returning_client_may_use_the_reserved_part_of_the_queue() -> None:
    queue_limiter = a_door(10, 0.8)
    list(filled(queue_limiter))
    told = [comes(queue_limiter, a_call(f"late {number}")) for number in range(4)]
    assert all(at is not None for at in told)
    back = [comes(queue_limiter, a_call(f"late {number}"), at or 0.0) for number, at in enumerate(told)]
    assert back[:2] == [None, None], "up to the limit"
    assert all(at is not None for at in back[2:]), "and no further"


def test_a_client_that_retries_too_early_keeps_its_slot() -> None:
    queue_limiter = a_door()
    inside = list(filled(queue_limiter))
    comes(queue_limiter, a_call("first"))
    comes(queue_limiter, a_call("second"))
    at = comes(queue_limiter, a_call("mine"))
    assert at is not None
    assert comes(queue_limiter, a_call("mine"), at - 2 * EARLY_TOLERANCE_S) is not None
    queue_limiter.left(inside[0])
    assert comes(queue_limiter, a_call("mine"), at) is None


def test_retry_slots_of_absent_clients_expire() -> None:
    queue_limiter = a_door()
    inside = list(filled(queue_limiter))
    last = [comes(queue_limiter, a_call(f"gone {number}")) for number in range(5)][-1]
    assert last is not None
    for job in inside[:4]:
        queue_limiter.left(job)
    assert comes(queue_limiter, a_call("newcomer"), last + LATE_TOLERANCE_S + 1) is None
    assert queue_limiter.pending_retries()[Lane.P1] == 0


def test_no_capacity_is_held_for_absent_clients() -> None:
    queue_limiter = a_door(10, 0.8)
    inside = list(filled(queue_limiter))
    for number in range(40):
        comes(queue_limiter, a_call(f"gone {number}"))
    for job in inside[:5]:
        queue_limiter.left(job)
    assert comes(queue_limiter, a_call("newcomer"), 0.5) is None, "with the queue less than half full"


def test_the_first_retry_time_assumes_a_short_burst_in_higher_lanes() -> None:
    queue_limiter = a_door(10, 1.0)
    list(filled(queue_limiter, 10))
    for number in range(3):
        comes(queue_limiter, a_call(f"other {number}"), seconds_per_job=4.0, best_case_s_per_job=1.0)
    at = comes(queue_limiter, a_call("mine"), seconds_per_job=4.0, best_case_s_per_job=1.0)
    assert at == 4.0
    assert comes(queue_limiter, a_call("mine"), at, seconds_per_job=4.0, best_case_s_per_job=1.0) == at + 4 * 4.0


def test_retry_times_are_spread_before_a_drain_rate_is_measured() -> None:
    queue_limiter = a_door()
    list(filled(queue_limiter))
    told = [comes(queue_limiter, a_call(f"late {number}"), seconds_per_job=0.0) for number in range(30)]
    assert told[0] == DEFAULT_MIN_RETRY_AFTER_S
    assert 30 * DEFAULT_SPACING_S <= (told[-1] or 0.0) <= 40 * DEFAULT_SPACING_S


def test_a_fast_queue_has_a_minimum_retry_time() -> None:
    queue_limiter = a_door()
    list(filled(queue_limiter))
    assert comes(queue_limiter, a_call(), seconds_per_job=0.0001) == MIN_RETRY_AFTER_S


def test_no_retry_after_exceeds_what_clients_accept() -> None:
    queue_limiter = a_door()
    list(filled(queue_limiter))
    told = [comes(queue_limiter, a_call(f"late {number}"), seconds_per_job=10.0) for number in range(40)]
    assert all(at is not None and at <= MAX_RETRY_AFTER_S for at in told)
    assert told.count(NO_SLOT_RETRY_AFTER_S) > 20
    assert queue_limiter.pending_retries()[Lane.P1] == int(MAX_RETRY_AFTER_S / 10.0)


def test_a_tenant_that_floods_the_queue_excludes_no_other_tenant() -> None:
    queue_limiter = a_door(10, 0.8)
    list(filled(queue_limiter))
    assert comes(queue_limiter, a_call("more", tenant="a")) is not None
    assert comes(queue_limiter, a_call("b's only call", tenant="b")) is None


def test_clients_refused_in_their_retry_slot_get_distinct_retry_times() -> None:
    queue_limiter = a_door(10, 1.0)
    list(filled(queue_limiter, 10))
    told = [comes(queue_limiter, a_call(f"late {number}")) for number in range(10)]
    again = [comes(queue_limiter, a_call(f"late {number}"), 5.0) for number in range(10)]
    assert told == [0.5 * turn for turn in range(1, 11)]
    times = [at for at in again if at is not None]
    assert len(times) == 10
    assert all(later - sooner >= 0.5 - 1e-9 for sooner, later in pairwise(times))


def test_a_tenant_with_many_retry_slots_does_not_delay_those_of_another() -> None:
    queue_limiter = a_door(10, 1.0)
    list(filled(queue_limiter, 5))
    for number in range(5):
        assert comes(queue_limiter, a_call(f"b's {number}", tenant="b")) is None
    for number in range(100):
        comes(queue_limiter, a_call(f"late {number}", tenant="a"))
    told = [comes(queue_limiter, a_call(f"b's late {number}", tenant="b")) for number in range(3)]
    assert told == [0.5, 1.5, 2.5], "its own and as many of the other"


def test_the_bytes_of_all_that_is_queued_are_bounded() -> None:
    queue_limiter = a_door(max_queued_bytes=100)
    large = a_job(body=b"x" * 60)
    assert comes(queue_limiter, large) is None
    assert comes(queue_limiter, replace(a_job(body=b"x" * 60), lane=Lane.P2)) is not None
    assert comes(queue_limiter, a_job(body=b"x" * 40)) is None
    with pytest.raises(QueueFull):
        queue_limiter.reserve_bytes(1)
    queue_limiter.left(large)
    queue_limiter.reserve_bytes(60)
    queue_limiter.release_bytes(60)
    assert queue_limiter.queued_bytes == 40


def test_an_empty_queue_takes_a_body_larger_than_the_byte_limit() -> None:
    assert comes(a_door(max_queued_bytes=10), a_job(body=b"x" * 60)) is None


def test_without_retry_slots_no_slot_is_kept() -> None:
    queue_limiter = a_door(keeps_retry_slots=False)
    list(filled(queue_limiter))
    refusal = queue_limiter.refusal(a_call(), EACH_S, EACH_S, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s is None
    assert queue_limiter.pending_retries()[Lane.P1] == 0


@pytest.mark.parametrize(("believed_s", "most_errors"), [(0.05, 0), (0.07, 0), (0.035, 150)])
def test_clients_with_two_retries_are_all_admitted_after_a_burst_of_three_times_the_capacity(
    believed_s: float, most_errors: int
) -> None:
    """In virtual time: the door believes that a job takes so long, and really it takes 0.05 s."""
    clients, seconds_per_job, draw = 1800, 0.05, random.Random(5)
    queue_limiter = a_door(100, 0.8)
    queue: deque[InferenceJob] = deque()
    events = [(draw.uniform(0.0, 30.0), client, 1) for client in range(clients)]
    heapq.heapify(events)
    served, errors, idle, goes_at = 0, 0, 0, 0.0
    while events or queue:
        if not events or goes_at <= events[0][0]:
            if queue:
                queue_limiter.left(queue.popleft())
                served += 1
            elif goes_at < 85.0:
                idle += 1
            goes_at += seconds_per_job
            continue
        now, client, attempt = heapq.heappop(events)
        job = a_call(f"client {client}")
        at = comes(queue_limiter, job, now, believed_s)
        if at is None:
            queue.append(job)
        elif attempt < 3:
            heapq.heappush(events, (at + draw.uniform(0.0, 0.05), client, attempt + 1))
        else:
            errors += 1
    assert served + errors == clients
    assert errors <= most_errors
    if believed_s <= seconds_per_job:
        assert idle * seconds_per_job < 1.0
    assert queue_limiter.pending_retries()[Lane.P1] <= errors, "none but those who have given up"
