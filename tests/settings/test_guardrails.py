"""When a trial is rolled back: in virtual time, on drawn runs with a seed."""

import random
from math import inf

import pytest

from inferry.domain.settings_versions import Guardrails, Measure, RunTally
from inferry.settings.comparison import ATTAINMENT, COST, ERRORS, THROUGHPUT, compare, confidence_radius
from inferry.settings.guardrails import interval_error, rollback_reason

RULES = Guardrails(min_runs=20, max_trial_s=1e9)


def a_tally(version: int, run: int, *, attained: int = 1, calls: int = 1, **fields: float) -> RunTally:
    values = {"failed": 0, "output_tokens": 100 * calls, "seconds": 2.0 * calls, "cost_nanos": 0, "gpu_seconds": 0.5}
    known = {"judged": calls, **values, **fields}
    return RunTally(version=version, run=f"{version}/{run}", lane="P1", calls=calls, attained=attained, **known)  # type: ignore[arg-type]


def drawn(rng: random.Random, version: int, count: int, attainment: float) -> list[RunTally]:
    """Runs of one to five calls. A run meets all its targets or none: calls of one run are alike."""
    sizes = [rng.randint(1, 5) for _ in range(count)]
    return [
        a_tally(version, run, calls=size, attained=size if rng.random() < attainment else 0)
        for run, size in enumerate(sizes)
    ]


def reason_of(tallies: list[RunTally], rules: Guardrails = RULES, now: float = 0.0) -> str | None:
    return rollback_reason(compare(tallies, 1, 2, interval_error(rules)), rules, 0.0, now)


def looks_until_rollback(seed: int, before: float, after: float, runs: int, rules: Guardrails = RULES) -> int | None:
    """Looks after every tenth run of each version; the runs of each at the look that rolls back."""
    rng = random.Random(seed)
    stable, tried = drawn(rng, 1, runs, before), drawn(rng, 2, runs, after)
    for count in range(10, runs + 1, 10):
        if reason_of([*stable[:count], *tried[:count]], rules) is not None:
            return count
    return None


def test_equal_versions_are_rolled_back_no_more_often_than_stated_however_often_one_looks() -> None:
    rules = Guardrails(min_runs=20, max_trial_s=1e9, max_attainment_drop=0.0, false_alarm=0.05)
    alarms = sum(looks_until_rollback(seed, 0.9, 0.9, 400, rules) is not None for seed in range(80))
    assert alarms / 80 <= 0.05


def test_a_much_worse_version_is_rolled_back_soon_and_a_slightly_worse_one_later() -> None:
    much = [looks_until_rollback(seed, 0.95, 0.3, 400) or inf for seed in range(20)]
    slightly = [looks_until_rollback(seed, 0.95, 0.8, 2000) or inf for seed in range(5)]
    assert max(much) <= 60
    assert max(slightly) < inf
    assert min(slightly) > 60


def test_a_better_version_is_never_rolled_back() -> None:
    assert all(looks_until_rollback(seed, 0.8, 0.95, 300) is None for seed in range(30))


def test_nothing_is_decided_before_both_versions_have_enough_runs() -> None:
    tallies = [a_tally(1, run) for run in range(500)] + [a_tally(2, run, attained=0) for run in range(19)]
    assert reason_of(tallies) is None
    assert "attainment of P1 fell from 100.0% to 0.0%" in str(reason_of([*tallies, a_tally(2, 19, attained=0)]))


def test_failed_calls_and_cost_are_guarded_too() -> None:
    stable = [a_tally(1, run) for run in range(200)]
    failing = [a_tally(2, run, failed=run % 2) for run in range(200)]
    assert "failed calls rose" in str(reason_of([*stable, *failing]))
    costly = [a_tally(2, run, gpu_seconds=0.8) for run in range(200)]
    assert "cost per output token rose" in str(reason_of([*stable, *costly]))


def test_a_trial_that_is_not_ended_is_rolled_back_after_its_time() -> None:
    rules = Guardrails(max_trial_s=60.0)
    assert reason_of([], rules, now=59.9) is None
    assert reason_of([], rules, now=60.0) == "the trial was not ended within 60 s"


def test_measures_have_both_versions_their_difference_and_an_interval() -> None:
    stable = [a_tally(1, run, seconds=2.0 + run % 3) for run in range(100)]
    tried = [a_tally(2, run, seconds=4.0 + run % 3, attained=run % 4 != 0) for run in range(100)]
    found = {one.name: one for one in compare([*stable, *tried], 1, 2, 0.05)}
    assert set(found) == {ATTAINMENT, ERRORS, COST, THROUGHPUT}
    for one in found.values():
        assert one.low <= one.difference <= one.high
        assert (one.active_runs, one.candidate_runs) == (100, 100)
    attainment: Measure = found[ATTAINMENT]
    assert (attainment.active, attainment.candidate) == (1.0, 0.75)
    assert found[THROUGHPUT].difference == pytest.approx(3 / 5 - 1, abs=0.01)
    assert found[THROUGHPUT].high < 0


def test_calls_of_one_run_count_as_one_observation() -> None:
    alone = [a_tally(version, run, attained=run % 2) for version in (1, 2) for run in range(40)]
    together = [a_tally(version, run, calls=10, attained=10 * (run % 2)) for version in (1, 2) for run in range(40)]
    one, ten = (compare(tallies, 1, 2, 0.05)[0] for tallies in (alone, together))
    assert ten.high - ten.low == pytest.approx(one.high - one.low)


def test_intervals_are_wider_than_those_for_a_single_look() -> None:
    for variance in (0.01, 0.001, 0.0001):
        assert confidence_radius(variance, 0.05, 0.05) > 1.96 * variance**0.5
