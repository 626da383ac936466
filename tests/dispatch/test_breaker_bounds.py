"""The circuit breaker exactly at its bounds, and what of its counts survives a recovery."""

from inferry.dispatch.circuit_breaker import BreakerState, CircuitBreaker
from inferry.dispatch.values import HealthPolicy
from inferry.domain.workers import Capacity

POLICY = HealthPolicy(
    failure_threshold=3,
    failure_window_s=30,
    failure_ratio=0.5,
    initial_backoff_s=1,
    max_backoff_s=8,
    jitter=0.0,
    slow_start_share=0.1,
)


def a_breaker() -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    breaker.end_probe(True, 0.0)
    return breaker


def play(breaker: CircuitBreaker, script: str, now: float) -> list[bool]:
    """Dots are jobs that were served, letters are jobs that were lost: whether each loss opened it."""
    opened: list[bool] = []
    for letter in script:
        if letter == ".":
            breaker.served()
        else:
            opened.append(breaker.lost(letter, now))
    return opened


def test_the_row_that_is_too_long_opens_it_however_many_were_served_before() -> None:
    assert play(a_breaker(), "." * 100 + "abc", 1.0) == [False, False, True]


def test_exactly_the_share_that_is_too_much_opens_it_and_less_does_not() -> None:
    assert play(a_breaker(), ".a.b.c", 1.0) == [False, False, True]
    assert play(a_breaker(), ".a.b..c", 1.0) == [False, False, False]


def test_what_was_lost_and_served_before_a_recovery_counts_for_nothing_after_it() -> None:
    breaker = a_breaker()
    play(breaker, "." * 100 + "abc", 1.0)
    assert breaker.state is BreakerState.OPEN
    breaker.end_probe(True, 2.0)
    assert play(breaker, "d", 2.5) == [False], "three were lost before, but that is over"
    assert play(breaker, ".e.f", 3.0) == [False, True], "a hundred were served before, but that is over"


def test_how_often_it_opened_and_how_long_it_pauses_survive_a_recovery() -> None:
    breaker = a_breaker()
    pauses = []
    now = 0.0
    for fall in range(1, 4):
        play(breaker, "abc", now)
        assert breaker.opens == fall
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.begin_probe()
        breaker.end_probe(True, now)
        assert breaker.share(now) == POLICY.slow_start_share, "and it begins with little room each time"
    assert pauses == [1.0, 2.0, 4.0]


def test_failed_probes_make_pauses_longer_and_do_not_count_as_falls() -> None:
    breaker = a_breaker()
    play(breaker, "abc", 0.0)
    pauses = []
    for _ in range(4):
        breaker.begin_probe()
        breaker.end_probe(False, 10.0)
        pauses.append(breaker.probe_at - 10.0)
    assert pauses == [2.0, 4.0, 8.0, 8.0]
    assert breaker.opens == 1


def test_a_worker_of_few_places_has_one_of_them_after_a_recovery() -> None:
    breaker = a_breaker()
    play(breaker, "abc", 0.0)
    breaker.end_probe(True, 1.0)
    assert breaker.capacity(Capacity(sequences=4), 1.0).sequences == 1
    assert breaker.capacity(Capacity(sequences=40), 1.0).sequences == 4
    assert breaker.capacity(Capacity(sequences=None), 1.0).sequences is None
