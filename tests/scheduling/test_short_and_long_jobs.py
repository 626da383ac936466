"""Short and long jobs, by predicted output, on workers of their own."""

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.routes import OutputLength
from inferry.domain.workers import Phase
from scheduling.scheduler_harness import a_scheduler, batches, offer, placements
from support.builders import a_job, a_policy, a_view

LENGTHS: tuple[OutputLength, ...] = ("short", "long")


def test_short_and_long_jobs_are_kept_apart() -> None:
    scheduler = a_scheduler(a_view("a", output_length="short"), a_view("b", output_length="long"))
    offer(scheduler, *(a_job(f"{length}-{n}", length=length) for n in range(4) for length in LENGTHS))
    placed = placements(scheduler.tick(0.0))
    assert {worker for job, worker in placed.items() if job.startswith("short")} == {"a"}
    assert {worker for job, worker in placed.items() if job.startswith("long")} == {"b"}


def test_a_worker_without_a_length_takes_both() -> None:
    scheduler = a_scheduler(a_view("a", output_length="short", sequences=1), a_view("b", sequences=2))
    offer(scheduler, *(a_job(f"{length}-{n}", length=length) for n in range(2) for length in LENGTHS))
    placed = placements(scheduler.tick(0.0))
    assert placed["long-0"] == "b"
    assert set(placed.values()) == {"a", "b"}


def test_a_long_job_waits_for_its_worker_while_that_is_up() -> None:
    scheduler = a_scheduler(a_view("a", output_length="short"), a_view("b", output_length="long", sequences=1))
    offer(scheduler, a_job("1", length="long"), a_job("2", length="long"))
    assert placements(scheduler.tick(0.0)) == {"1": "b"}


def test_without_a_worker_of_its_length_a_job_uses_any() -> None:
    scheduler = a_scheduler(a_view("a", output_length="short"), a_view("b", output_length="long"))
    scheduler.observe(a_view("b", output_length="long", phase=Phase.DOWN), 0.0)
    offer(scheduler, a_job("1", length="long"))
    assert placements(scheduler.tick(0.0)) == {"1": "a"}


def test_short_and_long_jobs_share_no_padded_pass() -> None:
    scheduler = a_scheduler(a_view("a", pads=True), a_view("b", pads=True), P1=a_policy(window="fixed"))
    offer(scheduler, *(a_job(f"{length}-{n}", length=length) for n in range(2) for length in LENGTHS))
    assert batches(scheduler.tick(0.02)) == [["short-0", "short-1"], ["long-0", "long-1"]]


def test_a_job_without_a_length_uses_every_worker() -> None:
    scheduler = a_scheduler(
        a_view("a", output_length="short", sequences=1), a_view("b", output_length="long", sequences=1)
    )
    offer(scheduler, a_job("1"), a_job("2"))
    assert set(placements(scheduler.tick(0.0)).values()) == {"a", "b"}


@pytest.mark.parametrize(
    ("long_output_tokens", "expected_tokens", "length"),
    [(None, 10_000, None), (256, 255, "short"), (256, 256, "long")],
)
def test_a_lane_says_from_where_a_job_is_long(
    long_output_tokens: int | None, expected_tokens: int, length: OutputLength | None
) -> None:
    config = parse({"lanes": {"P1": {"long_output_tokens": long_output_tokens}}})
    assert config.lane_policies()[Lane.P1].output_length(expected_tokens) == length


def test_no_lane_separates_by_default() -> None:
    assert {policy.output_length(10_000) for policy in DEFAULT_LANES.values()} == {None}


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lanes\.P1\.long_output_tokens must be at least 1"):
        parse({"lanes": {"P1": {"long_output_tokens": 0}}})
