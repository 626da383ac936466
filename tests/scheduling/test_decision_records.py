"""Decision records: what held a job, which limit bound it, and why its worker was picked."""

import msgspec
import pytest

from inferry.domain import decisions
from inferry.domain.decisions import Decision
from inferry.domain.jobs import ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import FirstToken, Produced
from inferry.domain.workers import Phase
from inferry.scheduling.preemption import MIN_PROGRESS_TOKENS
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, expired, first_token, offer, placements, sent
from support.builders import a_job, a_policy, a_view


def decision(scheduler: Scheduler, job_id: str, now: float) -> Decision:
    found = scheduler.decision(job_id, now)
    assert found is not None
    return found


def test_a_job_that_goes_at_once_has_no_limit() -> None:
    scheduler = a_scheduler(a_view("v", models=("other",)), a_view("w"), a_view("x"))
    offer(scheduler, a_job("1"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    assert decision(scheduler, "1", 0.0) == Decision(
        picked_by="least_loaded", candidates=2, filtered={"serves_model": 1}
    )


@pytest.mark.parametrize(
    ("capacity", "policy", "limit"),
    [
        ({"sequences": 1}, {}, decisions.SEQUENCES),
        ({"kv_tokens": 100}, {}, decisions.KV_TOKENS),
        ({"prefill_tokens": 60}, {}, decisions.PREFILL_TOKENS),
        ({"batch_sequences": 1}, {}, decisions.BATCH_SEQUENCES),
        ({"sequences": 2}, {"reserve": 0.5}, decisions.LANE_RESERVE),
        ({"pads": True}, {"window": "fixed", "coalesce_ms": 0}, decisions.PADDED_BATCH),
    ],
)
def test_the_limit_that_bound_a_job(capacity: dict[str, int], policy: dict[str, object], limit: str) -> None:
    scheduler = a_scheduler(a_view("w", **capacity), P1=a_policy(**policy))  # type: ignore[arg-type]
    offer(scheduler, a_job("1"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    offer(scheduler, a_job("2", at=1.0))
    assert sent(scheduler.tick(1.0)) == []
    assert decision(scheduler, "2", 1.5).limit == limit
    end(scheduler, "1", now=3.0)
    assert sent(scheduler.tick(3.0)) == ["2"]
    record = decision(scheduler, "2", 3.0)
    assert (record.limit, record.limit_worker, record.waits) == (limit, "w", {limit: 2.0})


def test_the_prefill_rate_binds_lower_lanes() -> None:
    live = a_policy(ttft_ms=500, itl_ms=30)
    scheduler = a_scheduler(a_view("w", prefill_tokens_per_s=100.0), P0=live)
    offer(scheduler, a_job("live", lane=Lane.P0))
    scheduler.tick(0.0)
    first_token(scheduler, "live")
    offer(scheduler, a_job("large", tokens=4096), a_job("2", tokens=200))
    assert sent(scheduler.tick(0.0)) == ["large"]
    assert decision(scheduler, "2", 0.0).limit == decisions.PREFILL_RATE


def test_jobs_behind_a_blocked_head_wait_for_the_same_limits_since_they_were_ready() -> None:
    scheduler = a_scheduler(a_view("w", sequences=2, kv_tokens=1000))
    offer(scheduler, a_job("1", tokens=500), a_job("2", tokens=10))
    assert sent(scheduler.tick(0.0)) == ["1", "2"]
    offer(scheduler, a_job("3", tokens=700, at=1.0))
    scheduler.tick(1.0)  # no free sequence
    offer(scheduler, a_job("4", at=2.0))
    scheduler.tick(2.0)
    end(scheduler, "2", now=4.0)
    assert sent(scheduler.tick(4.0)) == []  # a sequence is free, the KV tokens are not
    end(scheduler, "1", now=9.0)
    assert sent(scheduler.tick(9.0)) == ["3", "4"]
    assert decision(scheduler, "3", 9.0).waits == {decisions.SEQUENCES: 3.0, decisions.KV_TOKENS: 5.0}
    assert decision(scheduler, "4", 9.0).waits == {decisions.SEQUENCES: 2.0, decisions.KV_TOKENS: 5.0}
    assert decision(scheduler, "4", 9.0).limit == decisions.KV_TOKENS


def test_an_empty_queue_forgets_its_limit() -> None:
    scheduler = a_scheduler(a_view("w", sequences=1))
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    end(scheduler, "1", now=1.0)
    scheduler.tick(1.0)
    end(scheduler, "2", now=2.0)
    offer(scheduler, a_job("3", at=2.0))
    assert sent(scheduler.tick(2.0)) == ["3"]
    assert decision(scheduler, "3", 2.0).limit is None


def test_a_lower_lane_waits_for_the_job_ahead() -> None:
    scheduler = a_scheduler(a_view("w", kv_tokens=1000))
    offer(scheduler, a_job("1", tokens=500))
    scheduler.tick(0.0)
    offer(scheduler, a_job("head", tokens=900, lane=Lane.P0), a_job("small", tokens=1, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == []
    assert decision(scheduler, "head", 0.0).limit == decisions.KV_TOKENS
    assert decision(scheduler, "small", 0.0).limit == decisions.JOB_AHEAD


@pytest.mark.parametrize(
    ("view", "limit"),
    [
        (a_view("w", models=("other",)), decisions.NO_WORKER),
        (a_view("w", phase=Phase.DOWN), decisions.WORKER_DOWN),
        (msgspec.structs.replace(a_view("w", phase=Phase.DOWN), breaker_open=True), decisions.BREAKER),
        (a_view("w", group="batch"), decisions.WORKER_GROUP),
    ],
    ids=["model", "down", "breaker", "group"],
)
def test_a_job_without_a_worker(view: object, limit: str) -> None:
    scheduler = a_scheduler(view, P1=a_policy(groups=("live",)))  # type: ignore[arg-type]
    offer(scheduler, a_job("1"), a_job("2"))
    scheduler.tick(0.0)
    record = decision(scheduler, "2", 2.0)
    assert (record.limit, record.limit_worker, record.candidates, record.waits) == (limit, None, 0, {limit: 2.0})
    assert record.picked_by is None


def test_a_held_job_names_its_rule_and_time() -> None:
    scheduler = a_scheduler(a_view(), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("1"))
    scheduler.tick(0.0)
    assert decision(scheduler, "1", 0.004).held_s == pytest.approx(0.004)
    assert sent(scheduler.tick(0.010)) == ["1"]
    record = decision(scheduler, "1", 0.010)
    assert (record.held_by, record.limit) == (decisions.WINDOW, None)
    assert record.held_s == pytest.approx(0.010)


def test_a_hold_and_a_wait_for_capacity_are_told_apart() -> None:
    scheduler = a_scheduler(a_view("w", sequences=2), P1=a_policy(window="fixed", coalesce_ms=10))
    offer(scheduler, a_job("0", lane=Lane.P0), a_job("1", lane=Lane.P0))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2"))
    scheduler.tick(0.0)
    scheduler.tick(0.010)
    end(scheduler, "1", now=0.110)
    assert sent(scheduler.tick(0.110)) == ["2"]
    record = decision(scheduler, "2", 0.110)
    assert record.held_s == pytest.approx(0.010)
    assert record.waits == pytest.approx({decisions.SEQUENCES: 0.1})


def test_the_time_until_preempted_jobs_have_left() -> None:
    scheduler = a_scheduler(
        a_view("w", sequences=1), P0=a_policy(may_preempt=(Lane.P2,)), P2=a_policy(preemptible=True)
    )
    offer(scheduler, a_job("batch", lane=Lane.P2, resume=ResumeMode.CONTINUE))
    scheduler.tick(0.0)
    scheduler.progress("batch", FirstToken(), 0.0)
    scheduler.progress("batch", Produced(MIN_PROGRESS_TOKENS), 0.0)
    offer(scheduler, a_job("live", lane=Lane.P0, at=1.0))
    assert [job.job_id for job in scheduler.tick(1.0).evictions] == ["batch"]
    end(scheduler, "batch", now=1.5)
    assert sent(scheduler.tick(1.5)) == ["live"]
    record = decision(scheduler, "live", 1.5)
    assert (record.picked_by, record.limit, record.waits) == ("preemption", "preemption", {"preemption": 0.5})


def test_a_cached_prefix_names_the_expected_tokens() -> None:
    scheduler = a_scheduler(a_view("v"), a_view("w"))
    offer(scheduler, a_job("1", tokens=100, prefix=("a", "b")))
    worker = placements(scheduler.tick(0.0))["1"]
    offer(scheduler, a_job("2", tokens=100, prefix=("a", "c")))
    assert placements(scheduler.tick(0.0)) == {"2": worker}
    record = decision(scheduler, "2", 0.0)
    assert (record.picked_by, record.cached_tokens, record.candidates) == ("cached_prefix", 50, 2)


def test_siblings_go_together() -> None:
    scheduler = a_scheduler(a_view("v"), a_view("w"))
    offer(scheduler, a_job("1", prefix=("a",)), a_job("2", prefix=("a",)))
    scheduler.tick(0.0)
    assert decision(scheduler, "2", 0.0).picked_by == "sibling"


def test_an_expired_job_keeps_the_record_of_its_wait() -> None:
    scheduler = a_scheduler(a_view("w", sequences=1))
    offer(scheduler, a_job("1"), a_job("2", deadline=5.0))
    scheduler.tick(0.0)
    assert expired(scheduler.tick(5.0)) == ["2"]
    record = decision(scheduler, "2", 5.0)
    assert (record.picked_by, record.limit, record.waits) == (None, decisions.SEQUENCES, {decisions.SEQUENCES: 5.0})


def test_a_limit_is_determined_again_after_a_while_only() -> None:
    scheduler = a_scheduler(a_view("w", sequences=2, kv_tokens=1000))
    offer(scheduler, a_job("1", tokens=500), a_job("2", tokens=10), a_job("3", tokens=700))
    scheduler.tick(0.0)
    end(scheduler, "2", now=0.001)
    scheduler.tick(0.001)
    assert decision(scheduler, "3", 0.001).limit == decisions.SEQUENCES
    scheduler.progress("1", FirstToken(), 0.5)
    scheduler.tick(0.5)
    assert decision(scheduler, "3", 0.5).limit == decisions.KV_TOKENS
