"""Liveness of a server from its responses and missed probes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.workers.openai_http.liveness import MAX_IDLE_TIMEOUT_S, MAX_TIMEOUT_S, MISSED_PROBES, Liveness, Verdict

SECONDS = st.floats(0.0, 1e4)


def test_one_missed_probe_is_suspect_and_two_in_a_row_are_unresponsive() -> None:
    life = Liveness(1.5)
    life.on_response(10.0)
    assert life.evaluate(11.0) is Verdict.SUSPECT
    assert life.is_suspect
    assert not life.is_unresponsive
    assert life.evaluate(11.75) is Verdict.BECAME_UNRESPONSIVE
    assert life.is_unresponsive
    assert life.evaluate(13.5) is Verdict.UNRESPONSIVE


def test_any_activity_during_a_probe_makes_the_server_alive() -> None:
    life = Liveness(1.5)
    life.evaluate(1.0)
    life.on_response(2.1)
    assert life.evaluate(2.0) is Verdict.ALIVE
    assert life.evaluate(3.0) is Verdict.SUSPECT, "what was missed before is forgotten"
    life.evaluate(4.0)
    assert life.is_unresponsive
    life.on_probe_response(0.1, 5.1)
    assert life.evaluate(5.0) is Verdict.ALIVE
    assert not life.is_unresponsive


def test_both_probes_together_take_the_configured_timeout() -> None:
    assert MISSED_PROBES * Liveness(1.5).probe_timeout_s() == 1.5


def test_a_server_that_answers_slowly_is_given_more_time_and_in_the_end_no_more() -> None:
    life = Liveness(1.0)
    life.on_probe_response(0.9, 1.0)
    assert MISSED_PROBES * life.probe_timeout_s() == pytest.approx(2.7)
    for number in range(100):
        life.on_probe_response(0.01, 2.0 + number)
    assert MISSED_PROBES * life.probe_timeout_s() == 1.0
    life.on_probe_response(1000.0, 200.0)
    assert MISSED_PROBES * life.probe_timeout_s() == MAX_TIMEOUT_S


def test_response_times_under_load_do_not_count_when_idle() -> None:
    life = Liveness(1.5)
    life.on_probe_response(5.0, 1.0)
    assert MISSED_PROBES * life.probe_timeout_s(None) == MAX_IDLE_TIMEOUT_S
    assert MISSED_PROBES * Liveness(1.5).probe_timeout_s(None) == 1.5


def test_a_burst_of_long_prompts_is_given_time_to_be_read() -> None:
    life = Liveness(1.5)
    assert life.probe_timeout_s(48 * 1000) < 1.05 * life.probe_timeout_s()
    assert MISSED_PROBES * life.probe_timeout_s(64 * 400_000) > 10.0


@given(st.lists(st.tuples(st.booleans(), SECONDS, SECONDS), max_size=30))
def test_unresponsive_takes_two_missed_probes_without_activity(
    story: list[tuple[bool, float, float]],
) -> None:
    life, now, missed = Liveness(1.0), 0.0, 0
    for is_heard, wait_s, response_s in story:
        probed_at = now = now + wait_s + 1e-3
        now += response_s + 1e-3
        if is_heard:
            life.on_response(now)
        life.evaluate(probed_at)
        missed = 0 if is_heard else missed + 1
        assert life.is_unresponsive == (missed >= MISSED_PROBES)
