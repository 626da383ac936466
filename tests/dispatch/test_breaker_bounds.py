"""The circuit breaker exactly at its bounds, and the counts that survive a recovery."""

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


def test_too_many_losses_in_a_row_open_the_breaker_after_any_number_of_successes() -> None:
    assert play(a_breaker(), "." * 100 + "abc", 1.0) == [False, False, True]


def test_the_breaker_opens_exactly_at_the_failure_ratio() -> None:
    assert play(a_breaker(), ".a.b.c", 1.0) == [False, False, True]
    assert play(a_breaker(), ".a.b..c", 1.0) == [False, False, False]


def test_outcomes_before_a_recovery_do_not_count_after_it() -> None:
    breaker = a_breaker()
    play(breaker, "." * 100 + "abc", 1.0)
    assert breaker.state is BreakerState.OPEN
    breaker.end_probe(True, 2.0)
    assert play(breaker, "d", 2.5) == [False], "three were lost before, but that is over"
    assert play(breaker, ".e.f", 3.0) == [False, True], "a hundred were served before, but that is over"


def test_the_open_count_and_the_backoff_survive_a_recovery() -> None:
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


def test_failed_probes_lengthen_the_backoff_and_do_not_count_as_openings() -> None:
    breaker = a_breaker()
    play(breaker, "abc", 0.0)
    pauses = []
    for _ in range(4):
        breaker.begin_probe()
        breaker.end_probe(False, 10.0)
        pauses.append(breaker.probe_at - 10.0)
    assert pauses == [2.0, 4.0, 8.0, 8.0]
    assert breaker.opens == 1


def test_a_worker_with_few_sequences_gets_at_least_one_after_a_recovery() -> None:
    breaker = a_breaker()
    play(breaker, "abc", 0.0)
    breaker.end_probe(True, 1.0)
    assert breaker.capacity(Capacity(sequences=4), 1.0).sequences == 1
    assert breaker.capacity(Capacity(sequences=40), 1.0).sequences == 4
    assert breaker.capacity(Capacity(sequences=None), 1.0).sequences is None
