"""The order of jobs: lanes, arrival, blocked heads and shares."""

from itertools import pairwise

from inferry.domain.lanes import Lane
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, end, first_token, offer, placements, sent
from support.builders import a_job, a_policy, a_view


def drain(scheduler: Scheduler) -> list[str]:
    """Run until nothing moves, one plan after the other; the order in which jobs went."""
    order: list[str] = []
    while sent_ids := sent(scheduler.tick(0.0)):
        order += sent_ids
        end(scheduler, *sent_ids)
    return order


def test_a_higher_lane_goes_first() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("2", lane=Lane.P2), a_job("1", lane=Lane.P1), a_job("0", lane=Lane.P0))
    assert drain(scheduler) == ["0", "1", "2"]


def test_within_a_lane_jobs_go_by_arrival_across_routes() -> None:
    scheduler = a_scheduler(a_view(models=("m", "n"), sequences=1))
    offer(scheduler, a_job("1"), a_job("2", model="n"), a_job("3"), a_job("4", model="n"))
    assert drain(scheduler) == ["1", "2", "3", "4"]


def test_arrival_counts_and_not_the_order_of_offers() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("2", at=2.0), a_job("1", at=1.0), a_job("3", at=2.0), a_job("0", at=0.5), now=3.0)
    assert drain(scheduler) == ["0", "1", "2", "3"]


def test_no_job_overtakes_a_blocked_head_of_its_lane_and_route() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60), a_job("large", tokens=90), a_job("small", tokens=10))
    assert sent(scheduler.tick(0.0)) == ["running"]
    end(scheduler, "running")
    assert sent(scheduler.tick(0.0)) == ["large", "small"]


def test_no_lower_lane_takes_the_capacity_a_blocked_head_needs() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60, lane=Lane.P0))
    scheduler.tick(0.0)
    offer(scheduler, a_job("large", tokens=90, lane=Lane.P0), a_job("small", tokens=10, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "running")
    assert sent(scheduler.tick(0.0)) == ["large", "small"]


def test_prefill_of_a_lower_lane_never_blocks_a_higher_lane() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100))
    offer(scheduler, a_job("low", tokens=100, lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["low"]
    offer(scheduler, a_job("more", tokens=1, lane=Lane.P2), a_job("middle", tokens=60), a_job("second", tokens=60))
    assert sent(scheduler.tick(0.0)) == ["middle"]
    offer(scheduler, a_job("best", tokens=100, lane=Lane.P0), a_job("another", tokens=1, lane=Lane.P0))
    assert sent(scheduler.tick(0.0)) == ["best"]
    first_token(scheduler, "best")
    assert sent(scheduler.tick(0.0)) == ["another"]


def test_lanes_without_slo_are_limited_to_batch_sequences() -> None:
    scheduler = a_scheduler(a_view(sequences=10, batch_sequences=2), P1=a_policy(ttft_ms=100.0, itl_ms=10.0))
    offer(scheduler, *(a_job(f"low-{n}", lane=Lane.P2) for n in range(4)))
    assert sent(scheduler.tick(0.0)) == ["low-0", "low-1"]
    offer(scheduler, *(a_job(f"live-{n}") for n in range(3)))
    assert sent(scheduler.tick(0.0)) == ["live-0", "live-1", "live-2"]
    end(scheduler, "low-0", "low-1", "live-0")
    assert sent(scheduler.tick(0.0)) == []
    end(scheduler, "live-1")
    assert sent(scheduler.tick(0.0)) == ["low-2"]


def test_service_in_order_counts_against_a_lane_share() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P2=a_policy(share=0.5))
    offer(scheduler, *(a_job(f"early-{n}", tokens=1000, lane=Lane.P2) for n in range(9)))
    for n in range(8):
        assert sent(scheduler.tick(0.0)) == [f"early-{n}"]
        if n < 7:
            end(scheduler, f"early-{n}")
    offer(scheduler, *(a_job(f"live-{n}", tokens=1000, lane=Lane.P0) for n in range(20)))
    end(scheduler, "early-7")
    sent_ids = drain(scheduler)
    assert sent_ids.index("early-8") == 9, "eight for the eight it had in advance, and one for its own turn"


def test_a_blocked_head_does_not_close_workers_it_cannot_use() -> None:
    scheduler = a_scheduler(a_view("m", prefill_tokens=100), a_view("n", models=("n",), prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60))
    scheduler.tick(0.0)
    offer(scheduler, a_job("large", tokens=90), a_job("other", tokens=90, model="n", lane=Lane.P2))
    assert placements(scheduler.tick(0.0)) == {"other": "n"}


def test_a_later_route_does_not_take_the_worker_an_earlier_one_waits_for() -> None:
    scheduler = a_scheduler(a_view(models=("m", "n"), prefill_tokens=100))
    offer(scheduler, a_job("running", tokens=60))
    scheduler.tick(0.0)
    offer(scheduler, a_job("large", tokens=90), a_job("small", tokens=10, model="n"))
    assert sent(scheduler.tick(0.0)) == []


def test_a_blocked_head_closes_its_workers_to_overlapping_routes() -> None:
    scheduler = a_scheduler(a_view("m", sequences=1), a_view("both", models=("m", "n"), prefill_tokens=100))
    offer(scheduler, a_job("1", lane=Lane.P0), a_job("2", tokens=60, lane=Lane.P0))
    scheduler.tick(0.0)
    offer(scheduler, a_job("large", tokens=90, lane=Lane.P0), a_job("small", tokens=10, model="n", lane=Lane.P1))
    assert sent(scheduler.tick(0.0)) == []
    scheduler.cancel("large")
    assert placements(scheduler.tick(0.0)) == {"small": "both"}


def test_a_job_retries_a_worker_once_its_reservation_ends() -> None:
    scheduler = a_scheduler(
        a_view("m", sequences=1), a_view("both", models=("m", "n"), prefill_tokens=100), a_view("n", models=("n",))
    )
    offer(scheduler, a_job("1", lane=Lane.P0), a_job("2", tokens=60, lane=Lane.P0))
    scheduler.tick(0.0)
    scheduler.observe(a_view("n", models=("n",), sequences=0), 0.0)
    offer(scheduler, a_job("large", tokens=90, lane=Lane.P0), a_job("small", tokens=10, model="n", lane=Lane.P1))
    assert sent(scheduler.tick(0.0)) == []
    assert sent(scheduler.tick(0.0)) == []
    scheduler.cancel("large")
    assert placements(scheduler.tick(0.0)) == {"small": "both"}


def test_an_unserved_route_blocks_no_other_route() -> None:
    scheduler = a_scheduler(a_view(), P2=a_policy(share=0.5))
    offer(scheduler, a_job("lost", model="n", lane=Lane.P0), a_job("lost too", model="n", lane=Lane.P2))
    offer(scheduler, a_job("1"), a_job("2", lane=Lane.P2))
    assert sent(scheduler.tick(0.0)) == ["1", "2"]


def test_without_a_share_a_lower_lane_waits_for_all_higher_ones() -> None:
    scheduler = a_scheduler(a_view(sequences=1))
    offer(scheduler, a_job("low", lane=Lane.P2), *(a_job(f"{n}", tokens=5000, lane=Lane.P0) for n in range(20)))
    assert drain(scheduler)[-1] == "low"


def test_a_share_is_proportional_to_the_tokens_of_higher_lanes() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P2=a_policy(share=0.2))
    for n in range(400):
        offer(scheduler, a_job(f"high-{n}", tokens=100, lane=Lane.P0), a_job(f"low-{n}", tokens=50, lane=Lane.P2))
    sent_ids = drain(scheduler)[:300]
    high = 100 * sum(name.startswith("high") for name in sent_ids)
    low = 50 * sum(name.startswith("low") for name in sent_ids)
    assert abs(low / (low + high) - 0.2) < 0.01


def test_a_job_larger_than_a_quantum_leaves_its_lane_in_debt() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P2=a_policy(share=0.5))
    size = 4 * QUANTUM_TOKENS
    offer(scheduler, *(a_job(f"low-{n}", tokens=size, lane=Lane.P2) for n in range(20)))
    offer(scheduler, *(a_job(f"high-{n}", tokens=QUANTUM_TOKENS, lane=Lane.P0) for n in range(100)))
    sent_ids = drain(scheduler)[:50]
    high = sum(name.startswith("high") for name in sent_ids)
    low = sum(name.startswith("low") for name in sent_ids)
    assert abs(high - 4 * low) <= 4


def test_an_idle_lane_earns_no_credit() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P2=a_policy(share=0.5))
    offer(scheduler, *(a_job(f"{n}", tokens=1000, lane=Lane.P0) for n in range(10)))
    for n in range(5):
        scheduler.tick(0.0)
        end(scheduler, f"{n}")
    offer(scheduler, a_job("low", tokens=1000, lane=Lane.P2))
    assert drain(scheduler)[:3] == ["5", "low", "6"]


def test_credit_is_capped_at_a_quantum() -> None:
    scheduler = a_scheduler(a_view("m", sequences=1), a_view("n", models=("n",), sequences=1), P2=a_policy(share=0.5))
    offer(scheduler, a_job("running", model="n", lane=Lane.P0))
    offer(scheduler, *(a_job(f"low-{n}", model="n", tokens=QUANTUM_TOKENS, lane=Lane.P2) for n in range(9)))
    offer(scheduler, *(a_job(f"m-{n}", tokens=QUANTUM_TOKENS, lane=Lane.P0) for n in range(9)))
    drained = 0
    while sent_ids := sent(scheduler.tick(0.0)):  # the other model's traffic earns credit while `running` is stuck
        drained += len(sent_ids)
        end(scheduler, *(name for name in sent_ids if name != "running"))
    assert drained == 10
    offer(scheduler, a_job("live-1", model="n", tokens=1, lane=Lane.P0))
    offer(scheduler, a_job("live-2", model="n", tokens=1, lane=Lane.P0))
    end(scheduler, "running")
    assert drain(scheduler)[:3] == ["low-0", "live-1", "live-2"]


def test_a_p0_job_waits_for_at_most_one_quantum_even_if_two_lanes_have_credit() -> None:
    half = a_policy(share=0.45)
    scheduler = a_scheduler(a_view(sequences=1), P1=half, P2=half)
    for n in range(50):
        offer(scheduler, a_job(f"0-{n}", tokens=3000, lane=Lane.P0))
        offer(scheduler, a_job(f"1-{n}", tokens=1500, lane=Lane.P1))
        offer(scheduler, a_job(f"2-{n}", tokens=1500, lane=Lane.P2))
    sent_ids = drain(scheduler)
    live = [n for n, name in enumerate(sent_ids) if name.startswith("0")]
    assert all(later - earlier <= 2 for earlier, later in pairwise(live))
    assert {name[0] for name in sent_ids[:10]} == {"0", "1", "2"}


def test_an_owed_job_without_capacity_reserves_a_worker() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100), P2=a_policy(share=0.5))
    offer(scheduler, a_job("low", tokens=90, lane=Lane.P2), *(a_job(f"{n}", tokens=50, lane=Lane.P0) for n in range(6)))
    assert sent(scheduler.tick(0.0)) == ["0", "1"]
    first_token(scheduler, "0")
    assert sent(scheduler.tick(0.0)) == []
    first_token(scheduler, "1")
    assert sent(scheduler.tick(0.0)) == ["low", "2", "3"]


def test_a_reservation_ends_when_its_job_is_removed() -> None:
    scheduler = a_scheduler(a_view(prefill_tokens=100), P2=a_policy(share=0.5))
    offer(scheduler, a_job("low", tokens=90, lane=Lane.P2), *(a_job(f"{n}", tokens=50, lane=Lane.P0) for n in range(6)))
    scheduler.tick(0.0)
    first_token(scheduler, "0")
    scheduler.cancel("low")
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_an_empty_lane_has_no_credit() -> None:
    scheduler = a_scheduler(a_view(sequences=1), P2=a_policy(share=0.5))
    offer(scheduler, a_job("high", tokens=100, lane=Lane.P0))
    offer(scheduler, *(a_job(f"low-{n}", tokens=100, lane=Lane.P2) for n in range(3)))
    assert drain(scheduler)[:2] == ["high", "low-0"]
    offer(scheduler, a_job("low-x", tokens=100, lane=Lane.P2), a_job("high-x", tokens=100, lane=Lane.P0))
    assert drain(scheduler) == ["high-x", "low-x"]
