"""The data of plots."""

from inferry.domain.lanes import Lane
from inferry.sim.calls import CallRow
from inferry.sim.curves import first_token_curve, open_calls


def a_row(at: float, sent_s: float | None, end_s: float, ttft_s: float | None = 0.1, lane: Lane = Lane.P0) -> CallRow:
    return CallRow("r", "s", "t", lane, 10, 5, at, ttft_s, end_s, 0.1, "done", 5, 0, sent_s)


def test_the_curve_rises_to_one_over_the_calls_of_its_lane() -> None:
    rows = [a_row(0, 0.0, 1.0, ttft_s=number / 1000) for number in range(1, 2001)] + [a_row(0, 0.0, 1.0, 50.0, Lane.P2)]
    curve = first_token_curve(rows, Lane.P0)
    assert len(curve) < 300
    assert curve == sorted(curve)
    assert curve[-1] == (2.0, 1.0)
    assert first_token_curve(rows, Lane.P1) == []


def test_calls_wait_until_they_are_sent_and_run_until_they_end() -> None:
    """Two come at 0, one is sent at once and ends at 4, the other waits until 4 and ends at 8."""
    waiting, running = open_calls([a_row(0.0, 0.0, 4.0), a_row(0.0, 4.0, 8.0)], 8.0)
    assert [count for at, count in waiting if at < 3.9] == [1] * sum(at < 3.9 for at, _ in waiting)
    assert max(count for _, count in running) == 1
    assert [count for at, count in waiting if at > 4.1] == [0] * sum(at > 4.1 for at, _ in waiting)
    assert running[-1] == (8.0, 1)


def test_a_call_that_was_never_sent_waits_until_it_is_over() -> None:
    waiting, running = open_calls([a_row(1.0, None, 2.0, None)], 10.0)
    assert max(count for _, count in running) == 0
    assert sum(count for _, count in waiting) > 0
    assert waiting[-1] == (10.0, 0)


def test_short_bursts_are_not_lost_between_points() -> None:
    rows = [a_row(50.0, 0.0, 0.001) for _ in range(30)]
    assert max(count for _, count in open_calls(rows, 1_000.0)[1]) == 30
