"""Fair share inside a lane, in tokens: over tenants, then over their runs."""

from collections import Counter

import pytest

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, FirstToken, Produced
from inferry.scheduling.queues.fair_share import jain_index
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, offer, placements, sent
from support.builders import a_job, a_policy, a_view


def drain(scheduler: Scheduler, count: int = 1_000) -> list[str]:
    """Run one plan after the other; the order in which jobs went."""
    order: list[str] = []
    while len(order) < count and (sent_ids := sent(scheduler.tick(0.0))):
        order += sent_ids
        end(scheduler, *sent_ids)
    return order


def served_by(scheduler: Scheduler, seconds: float, agents: dict[str, int], slots: int) -> Counter[str]:
    """Tokens each tenant got from an engine in virtual time: `slots` sequences, a token each per 10 ms.

    Every agent of every tenant always has one call waiting or running.
    """
    tokens: Counter[str] = Counter()
    running: dict[str, tuple[InferenceJob, int]] = {}
    number, now = 0, 0.0

    def call(tenant: str, agent: int) -> None:
        nonlocal number
        number += 1
        shape = {"tokens": 50 + 37 * number % 300, "output": 5 + 11 * number % 40}
        scheduler.offer(a_job(f"{number}", tenant=tenant, run_id=f"{agent}", at=now, **shape), now)  # type: ignore[arg-type]

    for tenant, count in agents.items():
        for agent in range(count):
            call(tenant, agent)
    while now < seconds:
        for plan in scheduler.tick(now).plans:
            for job in plan.jobs:
                running[job.job_id] = (job, 0)
                scheduler.progress(job.job_id, FirstToken(job.footprint.prefill_tokens), now)
                tokens[job.tenant] += job.footprint.prefill_tokens
        assert len(running) <= slots
        now += 0.01
        for job_id, (job, written) in list(running.items()):
            running[job_id] = (job, written + 1)
            tokens[job.tenant] += 1
            scheduler.progress(job_id, Produced(1), now)
            if written + 1 == job.footprint.output.expected:
                del running[job_id]
                prompt = job.footprint.prompt.expected
                scheduler.progress(job_id, Ended(prompt, 0, written + 1), now, attempt=1)
                call(job.tenant, int(job.run_id))
    assert scheduler.service() == tokens
    return tokens


def test_a_tenant_with_fifty_agents_gets_one_tenants_share() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    tokens = served_by(scheduler, 200.0, {"fleet": 50, "single": 1}, slots=1)
    assert tokens["fleet"] / tokens["single"] == pytest.approx(1.0, abs=0.1)
    assert jain_index(tokens.values()) >= 0.98


def test_ten_tenants_of_any_size_share_a_full_engine_equally() -> None:
    scheduler = a_scheduler(a_view(sequences=8))
    tokens = served_by(scheduler, 100.0, {f"t{n}": 4 + 8 * n for n in range(10)}, slots=8)
    assert jain_index(tokens.values()) >= 0.99


def test_a_weight_is_a_share() -> None:
    scheduler = Scheduler({Lane.P1: a_policy()}, {"heavy": 3.0})
    scheduler.observe(a_view(sequences=2), 0.0)
    tokens = served_by(scheduler, 100.0, {"heavy": 20, "light": 20}, slots=2)
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3.0, rel=0.05)


def test_weights_may_be_a_function_and_must_be_positive() -> None:
    scheduler = Scheduler({Lane.P1: a_policy()}, lambda tenant: 2.0 if tenant == "b" else 1.0)
    scheduler.observe(a_view(sequences=1), 0.0)
    for n in range(9):
        offer(scheduler, a_job(f"a{n}", tenant="a"), a_job(f"b{n}", tenant="b"))
    assert Counter(name[0] for name in drain(scheduler, 9)) == {"a": 3, "b": 6}
    with pytest.raises(ValueError, match="more than 0"):
        Scheduler({Lane.P1: a_policy()}, {"a": 0.0})


def test_tenants_alternate_whatever_their_number_of_jobs() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, *(a_job(f"a{n}", tenant="a") for n in range(6)), *(a_job(f"b{n}", tenant="b") for n in range(2)))
    assert drain(scheduler) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_runs_of_one_tenant_alternate_and_each_run_is_fifo() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, *(a_job(f"x{n}", run_id="x") for n in range(3)), *(a_job(f"y{n}", run_id="y") for n in range(3)))
    assert drain(scheduler) == ["x0", "y0", "x1", "y1", "x2", "y2"]


def test_fair_share_is_measured_in_tokens() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, *(a_job(f"a{n}", tenant="a", tokens=400) for n in range(3)))
    offer(scheduler, *(a_job(f"b{n}", tenant="b", tokens=100) for n in range(8)))
    assert drain(scheduler, 10) == ["a0", "b0", "b1", "b2", "b3", "a1", "b4", "b5", "b6", "b7"]


def test_output_is_charged_as_it_is_written() -> None:
    scheduler = a_scheduler(a_view(sequences=2))
    offer(scheduler, a_job("a0", tenant="a"), a_job("b0", tenant="b"), a_job("a1", tenant="a"), a_job("b1", tenant="b"))
    assert sent(scheduler.tick(0.0)) == ["a0", "b0"]
    scheduler.progress("a0", Produced(100), 0.0)
    end(scheduler, "a0")
    assert sent(scheduler.tick(0.0)) == ["b1"]


def test_unreported_output_is_charged_at_the_end() -> None:
    scheduler = a_scheduler(a_view(sequences=2))
    offer(scheduler, a_job("a0", tenant="a"), a_job("b0", tenant="b"), a_job("a1", tenant="a"), a_job("b1", tenant="b"))
    scheduler.tick(0.0)
    scheduler.progress("a0", Produced(10), 0.0)
    scheduler.progress("a0", Ended(50, 0, 100), 0.0)
    assert dict(scheduler.service()) == {"a": 150, "b": 50}
    assert sent(scheduler.tick(0.0)) == ["b1"]


def test_a_cached_prompt_is_refunded() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("a0", tenant="a", tokens=1_000))
    offer(scheduler, *(a_job(f"b{n}", tenant="b", tokens=100) for n in range(20)))
    offer(scheduler, *(a_job(f"a{n}", tenant="a", tokens=100) for n in range(1, 9)))
    assert sent(scheduler.tick(0.0)) == ["a0"]
    scheduler.progress("a0", FirstToken(prompt_tokens=1), 0.0)
    assert scheduler.service() == {"a": 1}
    end(scheduler, "a0")
    # It had been put behind by a thousand tokens; what it is owed back, its next jobs do not pay.
    order = drain(scheduler, 19)
    assert Counter(name[0] for name in order[:10]) == {"b": 10}
    assert Counter(name[0] for name in order[10:])["a"] == 8


def test_a_long_stream_earns_no_credit_for_later_jobs() -> None:
    scheduler = a_scheduler(a_view(sequences=2))
    offer(scheduler, a_job("stream", tenant="b"), *(a_job(f"a{n}", tenant="a") for n in range(40)))
    assert sent(scheduler.tick(0.0)) == ["stream", "a0"]
    for n in range(20):
        end(scheduler, f"a{n}")
        scheduler.tick(0.0)
    offer(scheduler, *(a_job(f"b{n}", tenant="b") for n in range(10)))
    end(scheduler, "a20")
    assert Counter(name[0] for name in drain(scheduler, 10)) == {"a": 5, "b": 5}


def test_idle_time_earns_nothing() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, *(a_job(f"a{n}", tenant="a") for n in range(30)))
    drain(scheduler, 20)
    offer(scheduler, *(a_job(f"b{n}", tenant="b") for n in range(10)))
    assert Counter(name[0] for name in drain(scheduler, 10)) == {"a": 5, "b": 5}


def test_service_without_contention_is_not_charged() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("a", tenant="a", tokens=5_000))
    scheduler.tick(0.0)
    scheduler.progress("a", Ended(5_000, 0, 9_000), 0.0)
    offer(scheduler, *(a_job(f"a{n}", tenant="a") for n in range(5)), *(a_job(f"b{n}", tenant="b") for n in range(5)))
    assert Counter(name[0] for name in drain(scheduler, 6)) == {"a": 3, "b": 3}


def test_service_beside_satisfied_tenants_is_not_charged() -> None:
    scheduler = a_scheduler(a_view(sequences=2))
    offer(scheduler, a_job("a", tenant="a", tokens=5_000), a_job("b", tenant="b", tokens=10))
    assert len(sent(scheduler.tick(0.0))) == 2
    scheduler.progress("a", Produced(9_000), 0.0)
    scheduler.observe(a_view(sequences=1), 0.0)
    offer(scheduler, *(a_job(f"a{n}", tenant="a") for n in range(5)), *(a_job(f"b{n}", tenant="b") for n in range(5)))
    end(scheduler, "a", "b")
    assert Counter(name[0] for name in drain(scheduler, 6)) == {"a": 3, "b": 3}


def test_new_runs_do_not_starve_a_served_run() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, *(a_job(f"old{n}", run_id="old", tokens=500) for n in range(2)))
    order: list[str] = []
    for n in range(30):
        offer(scheduler, a_job(f"new{n}", run_id=f"new{n}", tokens=500))
        order += drain(scheduler, 1)
    assert "old1" in order[:6]


def test_idle_accounts_are_dropped() -> None:
    scheduler = a_scheduler(a_view(sequences=4))
    for n in range(5_000):
        offer(scheduler, a_job(f"{n}", tenant=f"t{n if n % 2 else n % 7}", run_id=f"r{n}", tokens=10 + n % 90))
        end(scheduler, *sent(scheduler.tick(0.0)))
    lane_queue = scheduler._lane_queue_of[Lane.P1]
    assert lane_queue is not None
    assert sum(1 + len(tenant.members) for tenant in lane_queue.accounts.members.values()) < 400


def test_lanes_are_accounts_of_their_own() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("low", tenant="a", lane=Lane.P2, tokens=5_000))
    drain(scheduler)
    offer(scheduler, a_job("a", tenant="a"), a_job("b", tenant="b"))
    assert drain(scheduler) == ["a", "b"]


@pytest.mark.parametrize(("values", "index"), [([], 1.0), ([5, 5, 5], 1.0), ([9, 0, 0], 1 / 3), ([0, 0], 1.0)])
def test_jains_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def test_small_jobs_backfill_around_a_blocked_one_and_one_worker_is_reserved() -> None:
    scheduler = a_scheduler(*(a_view(name, prefill_tokens=1_000) for name in "abc"))
    offer(scheduler, *(a_job(f"running-{n}", tokens=500) for n in range(3)))
    scheduler.tick(0.0)
    offer(scheduler, a_job("huge", tokens=5_000), *(a_job(f"{n}", tokens=100, output=10) for n in range(60)))
    sent_ids = placements(scheduler.tick(0.0))
    assert len(sent_ids) == 10
    assert set(sent_ids.values()) == {"b", "c"}
    end(scheduler, "running-0")
    assert placements(scheduler.tick(0.0)) == {"huge": "a"}


def test_backfill_around_a_blocked_job_is_bounded_by_a_quantum_per_worker() -> None:
    scheduler = a_scheduler(a_view("a", kv_tokens=10_000), a_view("b", kv_tokens=10_000))
    offer(scheduler, a_job("one", tokens=5_000), a_job("two", tokens=5_000))
    scheduler.tick(0.0)
    offer(scheduler, a_job("huge", tokens=9_000), *(a_job(f"{n}", tokens=90, output=10) for n in range(100)))
    passed = 0
    while sent_ids := sent(scheduler.tick(0.0)):
        passed += len(sent_ids)
        end(scheduler, *sent_ids)
    assert passed == 2 * 2048 // 100
