"""Which jobs would be late on own workers, by their predicted wait."""

from inferry.domain.attempts import Attempt
from inferry.domain.decisions import MISSES_DEADLINE, MISSES_TARGET, Overflow
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.prediction.overflow_rule import OverflowRule
from support.builders import a_job


def an_ended_attempt(job: InferenceJob, *, first_token_s: float, output_tokens: int) -> Attempt:
    attempt = Attempt(job)
    attempt.sent_at = 0.0
    attempt.first_token_at = first_token_s
    attempt.output_tokens = output_tokens
    return attempt


def test_a_wait_beyond_the_ttft_target_misses_it() -> None:
    rule = OverflowRule(DEFAULT_LANES)
    job = a_job(lane=Lane.P0, at=10.0)
    assert rule.missed(job, 0.49, 10.0) is None
    assert rule.missed(job, 0.51, 10.0) == MISSES_TARGET
    assert rule.missed(replace(job, ttft_allowance_s=0.1), 0.51, 10.0) is None
    assert rule.missed(job, 0.3, 10.3) == MISSES_TARGET, "the time since its arrival counts"


def test_a_batch_job_without_a_deadline_misses_nothing() -> None:
    assert OverflowRule(DEFAULT_LANES).missed(a_job(lane=Lane.P2), 1e9, 0.0) is None


def test_a_deadline_is_for_the_whole_answer() -> None:
    rule = OverflowRule(DEFAULT_LANES)
    job = a_job(lane=Lane.P2, output=100, deadline=10.0)
    assert rule.missed(job, 9.0, 0.0) is None
    rule.ended(an_ended_attempt(a_job(lane=Lane.P2), first_token_s=1.0, output_tokens=11), 1.5)
    assert rule.missed(job, 4.9, 0.0) is None
    assert rule.missed(job, 5.1, 0.0) == MISSES_DEADLINE
    assert rule.missed(job, 5.1, 11.0) is None, "a deadline that has passed is missed everywhere"


def test_the_time_to_the_first_token_after_sending_is_learned_from_own_workers() -> None:
    rule = OverflowRule(DEFAULT_LANES)
    job = a_job(lane=Lane.P0)
    hosted = an_ended_attempt(
        replace(a_job(lane=Lane.P0), overflow=Overflow("target", 1.0)), first_token_s=9.0, output_tokens=2
    )
    rule.first_token(hosted, 9.0)
    assert rule.missed(job, 0.4, 0.0) is None
    rule.first_token(an_ended_attempt(job, first_token_s=0.2, output_tokens=2), 0.2)
    assert rule.missed(job, 0.4, 0.0) == MISSES_TARGET


def test_without_a_queue_no_job_overflows_for_its_target_however_slow_own_workers_are() -> None:
    rule = OverflowRule(DEFAULT_LANES)
    rule.first_token(an_ended_attempt(a_job(lane=Lane.P0), first_token_s=5.0, output_tokens=2), 5.0)
    assert rule.missed(a_job(lane=Lane.P0), 0.05, 0.0) is None
    assert rule.missed(a_job(lane=Lane.P0, deadline=5.5), 0.05, 0.0) is None


def test_without_a_queue_a_job_overflows_for_a_deadline_that_only_hosted_workers_are_fast_enough_for() -> None:
    rule = OverflowRule(DEFAULT_LANES)
    job = a_job(lane=Lane.P0, output=100, deadline=5.0)
    own = an_ended_attempt(a_job(lane=Lane.P0), first_token_s=1.0, output_tokens=11)
    rule.first_token(own, 1.0)
    rule.ended(own, 1.5)
    assert rule.missed(job, 0.0, 0.0) == MISSES_DEADLINE, "6 s; of hosted workers nothing is known yet"
    hosted = an_ended_attempt(
        replace(a_job(lane=Lane.P0), overflow=Overflow("deadline", 0.0)), first_token_s=1.5, output_tokens=11
    )
    rule.first_token(hosted, 1.5)
    rule.ended(hosted, 1.8)
    assert rule.missed(job, 0.0, 0.0) == MISSES_DEADLINE, "hosted workers take 4.5 s"
    assert rule.missed(replace(job, deadline=4.0), 0.0, 0.0) is None, "they would miss this one too"
    assert rule.missed(replace(job, deadline=4.0), 0.1, 0.0) == MISSES_DEADLINE, "own workers have other jobs"
    assert rule.missed(replace(job, deadline=6.5), 0.0, 0.0) is None
