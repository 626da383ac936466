"""When a first job is held for siblings that are about to arrive, in front of continuous batching."""

from typing import Literal

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, FirstToken
from inferry.scheduling.batching.sibling_window import MIN_SIBLINGS, REPROBE_INTERVAL
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import a_scheduler, batches, end, offer, reasons, sent
from support.builders import a_job, a_policy, a_view

ADAPTIVE = a_policy(window="adaptive", coalesce_ms=20)
TOKENS = 4_000


def a_fleet(*, busy: bool = True) -> Scheduler:
    """Three workers, each with something to do."""
    scheduler = a_scheduler(*(a_view(name) for name in "abc"), P1=ADAPTIVE)
    if busy:
        offer(scheduler, *(a_job(f"standing-{n}", lane=Lane.P2, tokens=1) for n in range(3)))
        scheduler.tick(0.0)
    return scheduler


Retry = Literal["nobody", "strays", "everybody"]


def a_family(scheduler: Scheduler, at: float, *, size: int = 4, again: Retry = "strays") -> list[list[str]]:
    """Jobs of one run come a moment apart, and their worker says `again` who had to compute the beginning though the
    first had: strays are those who did not go with it. Return who went together.
    """
    jobs = [
        a_job(f"{at}/{n}", at=at + n * 0.001, run_id=f"{at}", prefix=(f"{at}",), tokens=TOKENS) for n in range(size)
    ]
    groups: list[list[str]] = []
    wake_at: float | None = None
    for now in (*(job.arrived_at for job in jobs), at + 0.040):
        for moment in ([wake_at] if wake_at is not None and wake_at < now else []) + [now]:
            offer(scheduler, *(job for job in jobs if job.arrived_at == moment))
            tick = scheduler.tick(moment)
            groups += batches(tick)
            wake_at = tick.wake_at
    for group in groups:
        for job_id in group:
            scheduler.progress(job_id, FirstToken(), at + 0.2)
            computes = job_id == groups[0][0] or again == "everybody" or (again == "strays" and group is not groups[0])
            scheduler.progress(job_id, Ended(TOKENS, 0 if computes else TOKENS, 1), at + 0.3)
    return [sorted(group) for group in groups]


def sizes(groups: list[list[str]]) -> list[int]:
    return [len(group) for group in groups]


def families(scheduler: Scheduler, count: int, *, at: float = 1.0, size: int = 4, again: Retry = "strays") -> None:
    for n in range(count):
        a_family(scheduler, at + n, size=size, again=again)


def test_adaptive_learns_to_hold_a_first_job_whose_siblings_would_recompute_its_prefix() -> None:
    scheduler = a_fleet()
    assert sizes(a_family(scheduler, 1.0)) == [1, 1, 1, 1]
    families(scheduler, MIN_SIBLINGS, at=2.0)
    assert sizes(a_family(scheduler, 50.0)) == [4]


def test_no_job_is_held_for_siblings_with_cached_prefixes() -> None:
    scheduler = a_fleet()
    families(scheduler, 20, again="nobody")
    assert sizes(a_family(scheduler, 50.0, again="nobody")) == [1, 1, 1, 1]


def test_no_job_is_held_for_siblings_that_do_not_arrive() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    families(scheduler, 20, at=20.0, size=1)
    offer(scheduler, a_job("1", at=50.0, prefix=("x",), tokens=TOKENS))
    assert reasons(scheduler.tick(50.0)) == ["immediate"]


def test_no_job_is_held_for_siblings_while_a_worker_is_idle() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    end(scheduler, "standing-1", now=49.0)
    scheduler.tick(49.0)
    offer(scheduler, a_job("1", at=50.0, prefix=("x",), tokens=TOKENS))
    assert reasons(scheduler.tick(50.0)) == ["immediate"]


def test_a_job_held_for_siblings_is_released_when_a_worker_becomes_idle() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    offer(scheduler, a_job("1", at=50.0, prefix=("x",), tokens=TOKENS))
    assert sent(scheduler.tick(50.0)) == []
    end(scheduler, "standing-1", now=50.001)
    assert reasons(scheduler.tick(50.001)) == ["immediate"]


@pytest.mark.parametrize(
    "shape", [{"prefix": ()}, {"template_id": "t"}, {"tenant": "b"}], ids=["no beginning", "template", "tenant"]
)
def test_sibling_statistics_are_not_shared_between_keys(shape: dict[str, object]) -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    offer(scheduler, a_job("1", at=50.0, **({"prefix": ("x",), "tokens": TOKENS} | shape)))  # type: ignore[arg-type]
    assert reasons(scheduler.tick(50.0)) == ["immediate"]


def test_every_prefix_group_is_released_when_its_own_hold_ends() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    offer(scheduler, a_job("1", at=50.0, run_id="1", prefix=("x",), tokens=TOKENS))
    until = scheduler.tick(50.0).wake_at
    assert until is not None
    assert 50.002 < until < 50.020
    offer(scheduler, a_job("2", at=50.001, run_id="2", prefix=("y",), tokens=TOKENS))
    assert sent(scheduler.tick(until)) == ["1"]
    assert sent(scheduler.tick(until + 0.001)) == ["2"]


def test_a_hold_for_siblings_is_no_longer_than_the_job_allows() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    offer(scheduler, a_job("impatient", at=50.0, prefix=("x",), tokens=TOKENS, max_wait_s=0.002))
    assert scheduler.tick(50.0).wake_at == pytest.approx(50.002)
    assert reasons(scheduler.tick(50.002)) == ["max_wait"]


def test_holding_ends_where_siblings_compute_as_much_again_together() -> None:
    scheduler = a_fleet()
    families(scheduler, 10)
    families(scheduler, 30, at=20.0, again="everybody")
    assert sizes(a_family(scheduler, 60.0)) == [1, 1, 1, 1]


def test_one_prefix_group_in_a_while_is_not_held_to_remeasure_the_benefit() -> None:
    scheduler = a_fleet()
    families(scheduler, MIN_SIBLINGS)
    held = [len(a_family(scheduler, 20.0 + n)) == 1 for n in range(2 * REPROBE_INTERVAL)]
    assert 0 < held.count(False) <= 3
