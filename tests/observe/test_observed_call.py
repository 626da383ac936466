"""What `inferry observe` records of a call: attainment against a target that grows with the uncached prompt."""

import json
from typing import Any

import pytest

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.ledger import LedgerEntry
from inferry.domain.values import replace
from inferry.observe.observed_call import CallDescriber

LANES = DEFAULT_LANES | {Lane.P0: replace(DEFAULT_LANES[Lane.P0], ttft_ms=500, ttft_ms_per_1k_tokens=100.0)}


def an_entry(counts: dict[str, Any] | None, after_s: float) -> LedgerEntry:
    """A call whose whole answer comes at once."""
    describer = CallDescriber(b"salt", LANES)
    headers = {b"x-inferry-lane": b"p0"}
    lane, fields = describer.lane_of(headers, b"{}")
    times = describer.times(lane)
    times.arrived(json.dumps({"usage": counts}).encode(), after_s)
    return describer.entry(
        "job", headers, lane, fields, times,
        status=200, is_aborted=False, arrived_at=0.0, ended_at=after_s, wall=0.0, body_bytes=80_000,
    )  # fmt: skip


def test_cached_tokens_do_not_extend_the_target() -> None:
    counts = {"prompt_tokens": 20_000, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 18_000}}
    entry = an_entry(counts, 0.6)
    assert (entry.prompt_tokens, entry.cached_tokens, entry.attained) == (20_000, 18_000, True)
    assert an_entry(counts, 0.8).attained is False
    assert an_entry(counts | {"prompt_tokens_details": None}, 2.4).attained is True


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"input_tokens": 900, "input_tokens_details": {"cached_tokens": 512}, "output_tokens": 5}, (900, 512, 5)),
        ({"prompt_tokens": 900, "completion_tokens": 5}, (900, 0, 5)),
        (
            {"prompt_tokens": 900, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9_999}},
            (900, 900, 5),
        ),
        ({"input_tokens": 388, "cache_read_input_tokens": 512, "output_tokens": 5}, (388, 0, 5)),
    ],
    ids=["responses", "none reported", "more than the prompt", "Messages: input tokens are the uncached ones"],
)
def test_tokens_are_read_as_each_api_reports_them(counts: dict[str, Any], expected: tuple[int, int, int]) -> None:
    entry = an_entry(counts, 0.1)
    assert (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens) == expected


def test_without_usage_the_whole_prompt_counts_as_uncached() -> None:
    entry = an_entry(None, 2.4)
    assert (entry.prompt_tokens, entry.cached_tokens, entry.attained) == (20_000, 0, True)
