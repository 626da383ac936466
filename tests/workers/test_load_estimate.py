"""The load estimate: zeros, several engines, a restarted engine."""

import asyncio
import json

import msgspec
import pytest

from inferry.domain.jobs import ResumePoint
from inferry.domain.workers import Load
from inferry.workers.openai_http.load_estimate import (
    FOREIGN_LOAD_SNAPSHOTS,
    SATURATED_SNAPSHOTS,
    STALE_S,
    LoadEstimate,
    excess,
)
from inferry.workers.openai_http.metrics_parser import MetricsSnapshot, read_metrics
from inferry.workers.openai_http.profiles import MetricNames
from inferry.workers.openai_http.request_bodies import remaining_tokens, resumed_body
from inferry.workers.openai_http.resume_points import ResumePoints
from support.http_jobs import a_call

NAMES = MetricNames(running=b"running", waiting=b"waiting", kv_usage=b"usage", kv_capacity=b"capacity")


def test_missing_metrics_of_an_idle_engine_are_none_not_zero() -> None:
    snapshot = read_metrics(b"running 0\nwaiting 0\nusage 0\n", NAMES)
    assert snapshot is not None
    assert (snapshot.running, snapshot.waiting, snapshot.kv_usage, snapshot.kv_capacity) == (0, 0, 0.0, None)
    silent = read_metrics(b"running 0\nwaiting 0\n", NAMES)
    assert silent is not None
    assert silent.kv_usage is None
    assert read_metrics(b"running 0\n", NAMES) is None


def test_engines_of_one_server_are_added_up_and_their_caches_averaged() -> None:
    page = (
        b'running{engine="0"} 2\nrunning{engine="1"} 3\nwaiting 1\nusage{e="0"} 0.5\nusage{e="1"} 0.9\ncapacity 100\n'
    )
    snapshot = read_metrics(page, NAMES)
    assert snapshot is not None
    assert snapshot.kv_usage == pytest.approx(0.7)
    assert (snapshot.running, snapshot.kv_tokens) == (5, 70)


def a_snapshot(running: int = 0, waiting: int = 0, **more: object) -> MetricsSnapshot:
    return MetricsSnapshot(running=running, waiting=waiting, **more)  # type: ignore[arg-type]


def test_an_engine_that_started_again_counts_on_and_never_backwards() -> None:
    estimate = LoadEstimate()
    estimate.update(a_snapshot(preemptions=5.0), 0, 0.0)
    estimate.update(a_snapshot(preemptions=8.0), 0, 1.0)
    assert estimate.preemptions == 3
    estimate.update(a_snapshot(preemptions=1.0), 0, 2.0)
    assert estimate.preemptions == 3, "it began anew"
    estimate.update(a_snapshot(preemptions=2.0), 0, 3.0)
    assert estimate.preemptions == 4


@pytest.mark.parametrize(("own_calls", "tolerated"), [(0, 2), (40, 4)])
def test_excess_up_to_the_tolerance_is_a_race_and_beyond_it_is_foreign(own_calls: int, tolerated: int) -> None:
    assert excess(a_snapshot(own_calls + tolerated), own_calls) == Load()
    assert excess(a_snapshot(own_calls + tolerated + 1), own_calls).running == tolerated + 1


def test_load_is_foreign_after_enough_snapshots() -> None:
    estimate = LoadEstimate()
    for number in range(FOREIGN_LOAD_SNAPSHOTS):
        assert estimate.foreign(float(number)) == Load()
        estimate.update(a_snapshot(10), 0, float(number))
    assert estimate.foreign(float(FOREIGN_LOAD_SNAPSHOTS)).running == 10
    assert estimate.load(3, FOREIGN_LOAD_SNAPSHOTS - 1 + STALE_S) == Load(10, 0, 0), (
        "a reading is of use for as long as it says"
    )
    assert estimate.load(3, FOREIGN_LOAD_SNAPSHOTS - 1 + STALE_S + 0.1) == Load(running=3)


def test_the_engines_sequence_limit_is_known_after_enough_saturated_snapshots() -> None:
    estimate = LoadEstimate()
    for number in range(SATURATED_SNAPSHOTS):
        assert estimate.engine_sequences is None
        estimate.update(a_snapshot(8, 1), 9, float(number))
    assert estimate.engine_sequences == 8


# -- resuming --------------------------------------------------------------------------------------------------------


def continued(resume_point: ResumePoint, left: int = 5, **fields: object) -> dict[str, object]:
    body: dict[str, object] = json.loads(resumed_body(a_call(**fields), resume_point, left, b""))  # type: ignore[arg-type]
    return body


def test_a_continuation_chooses_tokens_as_the_beginning_did_zeros_included() -> None:
    body = continued(ResumePoint((1,), (2,)), temperature=0, seed=0, top_k=0, presence_penalty=0, top_p=None)
    assert {name: body[name] for name in ("temperature", "seed", "top_k", "presence_penalty")} == {
        "temperature": 0,
        "seed": 0,
        "top_k": 0,
        "presence_penalty": 0,
    }
    assert "top_p" not in body


@pytest.mark.parametrize(("least", "sent"), [(3, None), (4, 1), (9, 5), (8, 5), (7, 4)])
def test_a_minimum_counts_what_was_written_and_is_never_more_than_is_left(least: int, sent: int | None) -> None:
    assert continued(ResumePoint((1,), (2, 3, 4)), left=5, min_tokens=least).get("min_tokens") == sent


@pytest.mark.parametrize(("context", "left"), [(None, 5), (100, 5), (11, 5), (10, 4), (6, 0), (5, -1)])
def test_what_is_left_is_bounded_by_the_limit_and_by_the_context(context: int | None, left: int) -> None:
    assert remaining_tokens(a_call(tokens=8), ResumePoint((1, 2, 3), (4, 5, 6)), context) == left


class Server:
    """Reads tokens as bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def post(self, path: bytes, headers: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        ids = msgspec.json.decode(body)["tokens"]
        text = bytes(self.data[number] for number in ids).decode(errors="replace")
        return 200, msgspec.json.encode({"prompt": text})


@pytest.mark.plain
@pytest.mark.parametrize("cut", range(5))
def test_up_to_three_tokens_of_an_incomplete_character_are_rewritten(cut: int) -> None:
    data = b"ab" + "😀".encode()
    ids = tuple(range(len(data) - cut))
    seams = ResumePoints(Server(data), b"/detokenize", b"")  # type: ignore[arg-type]
    whole = len(data) if cut == 0 else 2
    assert asyncio.run(seams.complete_characters("m", ids)) == whole
