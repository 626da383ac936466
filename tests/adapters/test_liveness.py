"""What is heard of a server, and when that is too little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.adapters.workers.liveness import LONGEST_IDLE_S, LONGEST_S, MISSES, Liveness, Verdict

SECONDS = st.floats(0.0, 1e4)


def test_one_question_left_open_is_a_doubt_and_two_in_a_row_are_silence() -> None:
    life = Liveness(1.5)
    life.heard(10.0)
    assert life.judge(11.0) is Verdict.DOUBT
    assert life.is_in_doubt
    assert not life.is_silent
    assert life.judge(11.75) is Verdict.FELL_SILENT
    assert life.is_silent
    assert life.judge(13.5) is Verdict.SILENT


def test_any_sign_of_life_during_a_question_ends_the_doubt_and_the_silence() -> None:
    life = Liveness(1.5)
    life.judge(1.0)
    life.heard(2.1)
    assert life.judge(2.0) is Verdict.HEARD
    assert life.judge(3.0) is Verdict.DOUBT, "what was missed before is forgotten"
    life.judge(4.0)
    assert life.is_silent
    life.answered(0.1, 5.1)
    assert life.judge(5.0) is Verdict.HEARD
    assert not life.is_silent


def test_both_questions_together_take_the_time_that_was_set() -> None:
    assert MISSES * Liveness(1.5).question_s() == 1.5


def test_a_server_that_answers_slowly_is_given_more_time_and_in_the_end_no_more() -> None:
    life = Liveness(1.0)
    life.answered(0.9, 1.0)
    assert MISSES * life.question_s() == pytest.approx(2.7)
    for number in range(100):
        life.answered(0.01, 2.0 + number)
    assert MISSES * life.question_s() == 1.0
    life.answered(1000.0, 200.0)
    assert MISSES * life.question_s() == LONGEST_S


def test_how_slow_it_was_under_load_does_not_count_for_long_while_it_is_idle() -> None:
    life = Liveness(1.5)
    life.answered(5.0, 1.0)
    assert MISSES * life.question_s(None) == LONGEST_IDLE_S
    assert MISSES * Liveness(1.5).question_s(None) == 1.5


def test_a_burst_of_long_prompts_is_given_time_to_be_read() -> None:
    life = Liveness(1.5)
    assert life.question_s(48 * 1000) < 1.05 * life.question_s()
    assert MISSES * life.question_s(64 * 400_000) > 10.0


@given(st.lists(st.tuples(st.booleans(), SECONDS, SECONDS), max_size=30))
def test_silence_takes_two_questions_in_a_row_with_nothing_heard_since_the_first(
    story: list[tuple[bool, float, float]],
) -> None:
    life, now, missed = Liveness(1.0), 0.0, 0
    for is_heard, wait_s, took_s in story:
        asked_at = now = now + wait_s + 1e-3
        now += took_s + 1e-3
        if is_heard:
            life.heard(now)
        life.judge(asked_at)
        missed = 0 if is_heard else missed + 1
        assert life.is_silent == (missed >= MISSES)
