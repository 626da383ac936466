"""Errors as header lines."""

from inferry.domain.errors import DeadlineInfeasible, InvalidRequest, QueueFull
from inferry.ingress.problems import error_headers


def test_a_full_queue_says_when_to_come_back_and_how_long_the_wait_would_be() -> None:
    error = QueueFull("full", retry_after_s=3.2)
    error.predicted_wait_s = 0.0415
    lines = error_headers(error).split(b"\r\n")
    assert b"retry-after: 4" in lines
    assert b"x-inferry-predicted-wait-ms: 42" in lines


def test_a_deadline_that_cannot_be_met_says_when_it_could() -> None:
    error = DeadlineInfeasible("too late", retry_after_s=7.0)
    lines = error_headers(error).split(b"\r\n")
    assert b"retry-after: 7" in lines
    assert b"x-should-retry: false" in lines


def test_a_full_queue_that_knows_nothing_still_says_something() -> None:
    assert b"retry-after: 1\r\n" in error_headers(QueueFull("full"))


def test_what_cannot_be_cured_by_waiting_says_nothing_of_it() -> None:
    assert b"retry-after" not in error_headers(InvalidRequest("wrong"))
