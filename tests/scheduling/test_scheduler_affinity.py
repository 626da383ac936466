"""Sessions and prefixes return to their workers, and affinity never delays a job."""

from collections import Counter

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.plans import CapacityUse
from inferry.domain.workers import Phase
from inferry.scheduling.placement.cached_prefix import PREFIX_TOKENS_PER_SEQUENCE
from inferry.scheduling.placement.prefix_index import PrefixIndex
from inferry.scheduling.placement.rendezvous_hash import RendezvousHash
from inferry.scheduling.scheduler import Scheduler
from inferry.scheduling.worker_state import WorkerState
from scheduling.scheduler_harness import a_scheduler, end, offer, placements, sent
from support.builders import a_job, a_policy, a_view

FLEET = tuple(f"w{n}" for n in range(8))


def a_fleet(**capacity: int) -> Scheduler:
    return a_scheduler(*(a_view(name, **capacity) for name in FLEET))  # type: ignore[arg-type]


def where(scheduler: Scheduler, **shape: object) -> str:
    """Where a job of this shape goes when nothing else runs."""
    job = a_job(**shape)  # type: ignore[arg-type]
    offer(scheduler, job)
    place = placements(scheduler.tick(0.0))[job.job_id]
    end(scheduler, job.job_id)
    return place


def test_a_session_goes_to_the_same_worker_again() -> None:
    scheduler = a_fleet(sequences=8)
    homes = {f"s{n}": where(scheduler, session=f"s{n}") for n in range(20)}
    assert homes == {session: where(scheduler, session=session) for session in homes}
    assert len(set(homes.values())) > 3


def test_sessions_of_two_tenants_are_two_sessions() -> None:
    scheduler = a_fleet(sequences=8)
    assert any(
        where(scheduler, session=f"{n}", tenant="a") != where(scheduler, session=f"{n}", tenant="b") for n in range(9)
    )


def test_when_a_worker_leaves_only_its_own_sessions_move() -> None:
    scheduler = a_fleet(sequences=8)
    homes = {f"s{n}": where(scheduler, session=f"s{n}") for n in range(40)}
    scheduler.observe(a_view("w3", sequences=8, phase=Phase.DRAINING), 0.0)
    for session, home in homes.items():
        place = where(scheduler, session=session)
        assert place == home if home != "w3" else place != "w3"


def test_a_prefix_finds_the_worker_where_it_is_warm() -> None:
    scheduler = a_fleet(sequences=8)
    home = where(scheduler, session="somebody", prefix=("p1", "p2"))
    assert where(scheduler, session="somebody else", prefix=("p1", "p2", "p3")) == home


def test_the_longest_warm_prefix_decides() -> None:
    scheduler = a_fleet(sequences=8)
    short = where(scheduler, session="a", prefix=("p1",))
    other = next(s for s in map(str, range(99)) if where(scheduler, session=s) != short)
    offer(scheduler, a_job("keeps it busy", session="a", prefix=("p1",)))
    scheduler.tick(0.0)
    long = where(scheduler, session=other, prefix=("p1", "p2"))
    end(scheduler, "keeps it busy")
    assert long != short
    assert where(scheduler, session="a", prefix=("p1", "p2", "p3")) == long


def test_a_popular_prefix_does_not_pile_up_on_one_worker() -> None:
    scheduler = a_fleet(sequences=64)
    for n in range(80):  # one by one, so that they are no siblings
        offer(scheduler, a_job(f"{n}", run_id=f"{n}", prefix=("p",)))
        scheduler.tick(0.0)
    loads = Counter({name: scheduler.use(name).sequences for name in FLEET})
    assert max(loads.values()) <= 1.25 * 80 / len(FLEET) + 1


def test_prefill_that_is_saved_may_load_a_worker_beyond_its_part() -> None:
    scheduler = a_fleet(sequences=64)
    homes: list[str] = []
    for n in range(6):
        offer(scheduler, a_job(f"{n}", run_id=f"{n}", tokens=4 * PREFIX_TOKENS_PER_SEQUENCE, prefix=("p",)))
        homes += placements(scheduler.tick(0.0)).values()
    assert homes[:5] == [homes[0]] * 5
    assert homes[5] != homes[0]


def test_affinity_never_delays_a_job() -> None:
    scheduler = a_scheduler(a_view("x", sequences=1), a_view("y", sequences=1))
    offer(scheduler, a_job("1", session="s"), a_job("2", session="s"))
    assert sorted(placements(scheduler.tick(0.0)).values()) == ["x", "y"]


def test_a_warm_prefix_is_charged_as_little_as_it_should_cost() -> None:
    scheduler = a_scheduler(a_view("w", sequences=8))
    offer(scheduler, a_job("1", tokens=1_000, prefix=("p1", "p2", "p3", "p4")))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2", tokens=1_000, tenant="b", prefix=("p1", "p2", "p3", "x")))
    scheduler.tick(0.0)
    assert scheduler.service() == {"a": 1_000, "b": 250}
    assert scheduler.use("w") == CapacityUse(2, 2_020, 1_250)


def test_what_the_gateway_knows_to_be_cached_is_deducted_once() -> None:
    """Its slices may be of any length: three of four are warm, and they are a tenth of the prompt."""
    scheduler = a_scheduler(a_view("w", sequences=8))
    offer(scheduler, a_job("1", tokens=1_000, prefix=("p1", "p2", "p4", "p8")))
    scheduler.tick(0.0)
    offer(scheduler, a_job("2", tokens=1_000, cached=100, tenant="b", prefix=("p1", "p2", "p4", "x")))
    scheduler.tick(0.0)
    assert scheduler.service() == {"a": 1_000, "b": 900}


@pytest.mark.parametrize(("on_the_other", "charged"), [(("p1",), 750), (("p1", "p2"), 500), (("q",), 1_000)])
def test_a_job_is_charged_by_how_much_of_its_prefix_its_own_worker_has(
    on_the_other: tuple[str, ...], charged: int
) -> None:
    scheduler = a_scheduler(a_view("x", sequences=2), a_view("y", sequences=2))
    offer(scheduler, a_job("warms x", tokens=1_000, prefix=("p1", "p2", "p4")), a_job("fills", tokens=10))
    homes = placements(scheduler.tick(0.0))
    warm, other = homes["warms x"], homes["fills"]
    assert warm != other
    offer(scheduler, a_job("fills x", tokens=10, session="s"))
    while placements(scheduler.tick(0.0)).get("fills x") == other:
        end(scheduler, "fills x")
        offer(scheduler, a_job("fills x", tokens=10))
    end(scheduler, "fills")
    offer(scheduler, a_job("warms the other", tokens=1_000, prefix=on_the_other))
    assert placements(scheduler.tick(0.0)) == {"warms the other": other}
    end(scheduler, "warms the other")
    offer(scheduler, a_job("job", tokens=1_000, tenant="b", cached=900, prefix=("p1", "p2", "p4")))
    assert placements(scheduler.tick(0.0)) == {"job": other}
    assert scheduler.use(other).prefill_tokens == charged


def test_a_forgotten_worker_returns_cold() -> None:
    scheduler = a_scheduler(a_view("w"))
    where(scheduler, tokens=100, prefix=("p",))
    scheduler.forget("w")
    scheduler.observe(a_view("w"), 0.0)
    where(scheduler, tokens=100, prefix=("p",))
    assert scheduler.service() == {"a": 200}


def test_the_memory_of_prefixes_is_bounded() -> None:
    prefix_index, worker = PrefixIndex(limit=100), WorkerState("w")
    for n in range(1_000):
        prefix_index.sent((f"{n}",), worker)
    assert prefix_index.find(("999",)) == (1, (worker,))
    assert prefix_index.find(("0",)) == (0, ())
    assert len(prefix_index._young) + len(prefix_index._old) <= 202


def test_keys_spread_over_the_workers() -> None:
    rendezvous = RendezvousHash([WorkerState(name) for name in FLEET])
    homes = Counter(rendezvous.ranking(f"key-{n}")[0].name for n in range(4_000))
    assert len(homes) == len(FLEET)
    assert max(homes.values()) < 2 * 4_000 / len(FLEET)


@pytest.mark.parametrize(("wanted", "has", "goes"), [("fp8", "fp8", True), ("fp8", "bf16", False), (None, "fp8", True)])
def test_a_named_precision_is_required(wanted: str | None, has: str, goes: bool) -> None:
    scheduler = a_scheduler(a_view(precision=has))
    offer(scheduler, a_job("1", precision=wanted))
    assert sent(scheduler.tick(0.0)) == (["1"] if goes else [])


def test_a_lane_uses_its_groups_in_order() -> None:
    scheduler = Scheduler(
        {
            Lane.P0: a_policy(groups=("live",)),
            Lane.P1: a_policy(),
            Lane.P2: a_policy(groups=("batch", "live")),
        }
    )
    for name, group in (("b", "batch"), ("l", "live"), ("o", "other")):
        scheduler.observe(a_view(name, group=group, sequences=1), 0.0)
    offer(scheduler, *(a_job(f"batch-{n}", lane=Lane.P2) for n in range(3)))
    assert placements(scheduler.tick(0.0)) == {"batch-0": "b", "batch-1": "l"}
    end(scheduler, "batch-0", "batch-1")
    offer(scheduler, a_job("live-0", lane=Lane.P0), a_job("live-1", lane=Lane.P0), a_job("any"))
    assert placements(scheduler.tick(0.0)) == {"live-0": "l", "any": "b"}
