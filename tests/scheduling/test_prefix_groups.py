"""Jobs with a common prefix are sent together."""

import pytest

from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from scheduling.scheduler_harness import a_scheduler, batches, end, offer, placements, reasons, sent
from support.builders import a_job, a_policy, a_view

SHARED = ("s1", "s2")


def test_siblings_of_one_run_go_together_before_other_runs() -> None:
    scheduler = a_scheduler(a_view(sequences=3))
    offer(scheduler, a_job("a1", run_id="a", prefix=SHARED), a_job("b1", run_id="b"), a_job("b2", run_id="b"))
    offer(scheduler, a_job("a2", run_id="a", prefix=(*SHARED, "x")), a_job("a3", run_id="a", prefix=("other",)))
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["a1", "a2"], ["b1"]], ["sibling", "immediate"])


def test_siblings_of_one_template_go_together_across_runs() -> None:
    scheduler = a_scheduler(a_view("x"), a_view("y"))
    jobs = [a_job(f"{n}", run_id=f"{n}", template_id="t", prefix=SHARED) for n in range(4)]
    offer(scheduler, *jobs)
    tick = scheduler.tick(0.0)
    assert (batches(tick), reasons(tick)) == ([["0", "1", "2", "3"]], ["sibling"])


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"run_id": "b"}, {"prefix": ("z",)}], ids=["tenant", "run", "prefix"]
)
def test_unrelated_jobs_are_not_siblings(other: dict[str, str]) -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, a_job("1", prefix=SHARED), a_job("2", **({"prefix": SHARED} | other)))  # type: ignore[arg-type]
    assert reasons(scheduler.tick(0.0)) == ["immediate"]


def test_siblings_stay_within_the_capacity() -> None:
    scheduler = a_scheduler(a_view("x", sequences=2), a_view("y", sequences=2))
    offer(scheduler, *(a_job(f"{n}", prefix=SHARED) for n in range(3)))
    assert batches(scheduler.tick(0.0)) == [["0", "1"], ["2"]]


def test_siblings_take_at_most_a_quantum_out_of_order() -> None:
    scheduler = a_scheduler(a_view(sequences=4))
    offer(scheduler, *(a_job(f"a{n}", tenant="a", tokens=2_000, prefix=("s", f"{n}")) for n in range(9)))
    offer(scheduler, *(a_job(f"b{n}", tenant="b", tokens=1_000) for n in range(9)))
    sent_ids = sent(scheduler.tick(0.0))
    # Half of each prompt is warm after the first: 2,000 and then two of 1,000 go before the other tenant.
    assert sent_ids == ["a0", "a1", "a2", "b0"]
    assert QUANTUM_TOKENS // 1_000 == 2


def test_a_job_past_its_max_wait_takes_no_siblings() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("1", prefix=SHARED, max_wait_s=0.001), a_job("2", prefix=SHARED, max_wait_s=0.001))
    assert batches(scheduler.tick(0.001)) == [["1"], ["2"]]


def test_a_cancelled_sibling_stays_behind() -> None:
    scheduler = a_scheduler(a_view())
    offer(scheduler, *(a_job(f"{n}", prefix=SHARED) for n in range(3)))
    scheduler.cancel("1")
    assert batches(scheduler.tick(0.0)) == [["0", "2"]]


def test_between_equals_the_longest_warm_prefix_goes_first() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("before", run_id="r", prefix=("p1", "p2")))
    end(scheduler, *sent(scheduler.tick(0.0)))
    offer(scheduler, a_job("cold", run_id="x", prefix=("q1", "q2")))
    offer(scheduler, a_job("lukewarm", run_id="y", prefix=("p1", "z")))
    offer(scheduler, a_job("warm", run_id="z", prefix=("p1", "p2", "p3")))
    order = []
    while sent_ids := sent(scheduler.tick(0.0)):
        order += sent_ids
        end(scheduler, *sent_ids)
    assert order == ["warm", "lukewarm", "cold"]


def test_siblings_follow_the_first_to_its_worker() -> None:
    scheduler = a_scheduler(*(a_view(name, sequences=8) for name in "xyz"))
    offer(scheduler, *(a_job(f"{n}", prefix=SHARED) for n in range(6)))
    assert len(set(placements(scheduler.tick(0.0)).values())) == 1
