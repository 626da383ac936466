"""Which async jobs begin next."""

from inferry.durable.async_job_queue import AsyncJobQueue, WaitingJob


def a_queue(concurrency: int, *jobs: tuple[str, str, str]) -> AsyncJobQueue:
    queue = AsyncJobQueue(concurrency)
    for job in jobs:
        queue.add(WaitingJob(*job))
    return queue


def begin_all(queue: AsyncJobQueue, now: float = 0.0) -> list[WaitingJob]:
    begun = []
    while (job := queue.next(now)) is not None:
        begun.append(job)
    return begun


def test_tenants_of_a_lane_take_turns_and_share_the_places() -> None:
    queue = a_queue(4, *((f"a{n}", "a", "P2") for n in range(10)), *((f"b{n}", "b", "P2") for n in range(10)))
    assert [job.id for job in begin_all(queue)] == ["a0", "b0", "a1", "b1"]


def test_a_tenant_alone_has_all_places_and_every_tenant_at_least_one() -> None:
    assert len(begin_all(a_queue(4, *((f"a{n}", "a", "P2") for n in range(10))))) == 4
    assert len(begin_all(a_queue(2, *((f"a{n}", f"t{n}", "P2") for n in range(5))))) == 5


def test_a_higher_lane_does_not_wait_for_places_of_a_lower_one() -> None:
    queue = a_queue(2, *((f"a{n}", "a", "P2") for n in range(5)))
    assert len(begin_all(queue)) == 2
    queue.add(WaitingJob("urgent", "a", "P1"))
    assert [job.id for job in begin_all(queue)] == ["urgent"]


def test_a_place_that_becomes_free_is_used_in_order() -> None:
    queue = a_queue(1, ("a0", "a", "P2"), ("a1", "a", "P2"))
    (first,) = begin_all(queue)
    queue.ended(first)
    assert [job.id for job in begin_all(queue)] == ["a1"]


def test_a_refused_job_begins_again_in_front_when_the_refusal_says() -> None:
    queue = a_queue(4, ("a0", "a", "P2"), ("a1", "a", "P2"), ("a2", "a", "P2"))
    jobs = begin_all(queue)
    queue.ended(jobs[0])
    queue.refused(jobs[1], retry_at=5.0)
    queue.refused(jobs[2], retry_at=5.0)
    assert begin_all(queue, now=4.9) == []
    assert queue.wake_at(now=4.9) == 5.0
    assert [job.id for job in begin_all(queue, now=5.0)] == ["a2"], "one at a time after a refusal"
    assert queue.wake_at(now=5.0) is None


def test_refusals_of_a_tenant_do_not_hold_others_back() -> None:
    queue = a_queue(4, ("a0", "a", "P2"), ("b0", "b", "P2"))
    a, b = begin_all(queue)
    queue.refused(a, retry_at=5.0)
    queue.ended(b)
    queue.add(WaitingJob("b1", "b", "P2"))
    assert [job.id for job in begin_all(queue)] == ["b1"]
