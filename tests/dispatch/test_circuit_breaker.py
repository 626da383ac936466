"""The circuit breaker: when it opens, when it probes, and how capacity returns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.dispatch.circuit_breaker import BreakerState, CircuitBreaker
from inferry.dispatch.values import HealthPolicy
from inferry.domain.workers import Capacity

POLICY = HealthPolicy(
    failure_threshold=3, failure_window_s=30, initial_backoff_s=1, max_backoff_s=8, jitter=0.0, slow_start_share=0.1
)


def a_closed_breaker(policy: HealthPolicy = POLICY, at: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(policy)
    breaker.end_probe(True, at)
    return breaker


def test_a_worker_has_no_capacity_before_its_first_success_and_all_of_it_after() -> None:
    breaker = CircuitBreaker(POLICY)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.end_probe(True, 5.0)
    assert (breaker.state, breaker.share(5.0), breaker.opens) == (BreakerState.CLOSED, 1.0, 0)


def test_one_job_lost_repeatedly_never_opens_the_breaker() -> None:
    breaker = a_closed_breaker()
    assert not any(breaker.lost("poison", now) for now in range(1000))
    assert breaker.state is BreakerState.CLOSED


def test_different_jobs_lost_in_a_row_open_the_breaker() -> None:
    breaker = a_closed_breaker()
    assert [breaker.lost(job, 1.0) for job in ("a", "b", "c")] == [False, False, True]
    assert (breaker.state, breaker.opens, breaker.probe_at) == (BreakerState.OPEN, 1, 2.0)


def test_a_served_job_resets_the_count_of_losses_in_a_row() -> None:
    breaker = a_closed_breaker()
    for now in range(100):
        for _ in range(8):
            breaker.served()
        assert not breaker.lost(f"a{now}", now)
        assert not breaker.lost(f"b{now}", now)
    assert breaker.state is BreakerState.CLOSED


def test_half_of_the_jobs_lost_within_the_window_open_the_breaker() -> None:
    breaker = a_closed_breaker()
    opened = []
    for now in range(6):
        opened.append(breaker.lost(f"job-{now}", now))
        breaker.served()
    assert opened == [False, False, True, False, False, False]


def test_losses_older_than_the_window_are_forgotten() -> None:
    breaker = a_closed_breaker()
    for n in range(50):
        now = 20.0 * n  # never more than two within thirty seconds
        assert not breaker.lost(f"job-{n}", now)
        breaker.served()
        breaker.advance(now)


def test_successes_before_the_window_do_not_offset_losses_in_it() -> None:
    breaker = a_closed_breaker()
    for _ in range(10_000):
        breaker.served()
    for second in range(60):
        breaker.advance(float(second))
    for n in range(2):
        assert not breaker.lost(f"job-{n}", 60.0)
        breaker.served()
    assert breaker.lost("job-2", 60.0)


def test_losses_while_the_breaker_is_open_change_nothing() -> None:
    breaker = a_closed_breaker()
    breaker.trip(0.0)
    before = breaker.probe_at
    assert not any(breaker.lost(f"job-{n}", 0.5) for n in range(20))
    assert (breaker.probe_at, breaker.opens) == (before, 1)


def test_the_backoff_doubles_up_to_its_maximum_and_resets_after_a_full_recovery() -> None:
    breaker = a_closed_breaker()
    breaker.trip(0.0)
    now, pauses = 0.0, [breaker.probe_at]
    for _ in range(5):
        now = breaker.probe_at
        breaker.begin_probe()
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.end_probe(False, now)
        pauses.append(breaker.probe_at - now)
    assert pauses == [1, 2, 4, 8, 8, 8]
    breaker.end_probe(True, 100.0)
    breaker.advance(104.0)
    breaker.trip(105.0)
    assert breaker.probe_at == 106.0


def test_a_worker_that_fails_during_slow_start_backs_off_longer_each_time() -> None:
    breaker = a_closed_breaker()
    now, pauses = 0.0, []
    for _ in range(4):
        breaker.trip(now)
        pauses.append(breaker.probe_at - now)
        breaker.end_probe(True, breaker.probe_at)
        now = breaker.probe_at + 0.5
        breaker.advance(now)
    assert pauses == [1, 2, 4, 8]
    assert breaker.opens == 4


def test_capacity_ramps_from_a_tenth_to_all_and_is_never_zero() -> None:
    breaker = a_closed_breaker()
    breaker.trip(0.0)
    breaker.end_probe(True, 10.0)
    shares = [breaker.share(10.0 + second) for second in range(6)]
    assert shares == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    capacities = [breaker.capacity(Capacity(sequences=64, kv_tokens=9), 10.0 + second) for second in range(5)]
    assert [capacity.sequences for capacity in capacities] == [6, 12, 25, 51, 64]
    assert {capacity.kv_tokens for capacity in capacities} == {9}
    assert breaker.capacity(Capacity(sequences=3), 10.0).sequences == 1
    assert breaker.capacity(Capacity(), 10.0).sequences is None


def test_probe_times_are_jittered_and_repeatable_by_seed() -> None:
    def probe_at(seed: int) -> float:
        breaker = CircuitBreaker(HealthPolicy(initial_backoff_s=1.0, jitter=0.2), seed)
        breaker.end_probe(True, 0.0)
        breaker.trip(0.0)
        return breaker.probe_at

    pauses = [probe_at(seed) for seed in range(50)]
    assert pauses == [probe_at(seed) for seed in range(50)]
    assert len(set(pauses)) > 40
    assert 0.8 <= min(pauses) < 0.9 < 1.1 < max(pauses) <= 1.2


steps = st.one_of(
    st.tuples(st.just("served"), st.integers(1, 5)),
    st.tuples(st.just("lost"), st.integers(0, 6)),
    st.tuples(st.just("wait"), st.integers(1, 20)),
    st.tuples(st.just("probe"), st.integers(0, 1)),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=80))
def test_the_breaker_opens_exactly_as_its_model_does(script: list[tuple[str, int]]) -> None:
    """Beside a plain model that remembers everything that happened since it closed."""
    breaker = a_closed_breaker()
    now, ends = 0.0, list[tuple[float, str | None]]()
    for what, number in script:
        if what == "wait":
            now += number
            breaker.advance(now)
        elif what == "probe" and breaker.state is not BreakerState.CLOSED:
            breaker.begin_probe()
            breaker.end_probe(bool(number), now)
            ends.clear()
        elif breaker.state is BreakerState.CLOSED and what == "served":
            for _ in range(number):
                breaker.served()
                ends.append((now, None))
        elif breaker.state is BreakerState.CLOSED and what == "lost":
            ends.append((now, f"job-{number}"))
            row: set[str] = set()
            for _, job in reversed(ends):
                if job is None:
                    break
                row.add(job)
            in_window = {job for at, job in ends if job is not None and at >= now - POLICY.failure_window_s}
            # What was served is counted in steps of a sixteenth of the window, so the model asks with a margin.
            fewest = sum(job is None for at, job in ends if at > now - POLICY.failure_window_s)
            most = sum(job is None for at, job in ends if at >= now - POLICY.failure_window_s * 17 / 16 - 20)
            opened = breaker.lost(f"job-{number}", now)
            if len(row) >= 3 or (len(in_window) >= 3 and len(in_window) >= most):
                assert opened
            elif len(in_window) < 3 or len(in_window) < fewest:
                assert not opened
            assert (breaker.state.value == "open") == opened
