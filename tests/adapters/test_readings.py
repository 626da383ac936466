"""What an engine's page says and what is believed of it: zeros, several engines, an engine that started again."""

import asyncio
import json

import msgspec
import pytest

from inferry.adapters.workers.beliefs import CROWDED, LOOKS, STALE_S, Beliefs, excess
from inferry.adapters.workers.bodies import continued_body, tokens_left
from inferry.adapters.workers.profiles import MetricNames
from inferry.adapters.workers.readings import Reading, Steps, read_metrics
from inferry.adapters.workers.seams import Seams
from inferry.adapters.workers.values import EngineSteps
from inferry.domain.jobs import SoFar
from inferry.domain.workers import Load
from support.http_jobs import a_call

NAMES = MetricNames(running=b"running", waiting=b"waiting", kv_usage=b"usage", kv_capacity=b"capacity")


def test_an_idle_engine_is_read_and_what_it_does_not_say_is_not_zero() -> None:
    reading = read_metrics(b"running 0\nwaiting 0\nusage 0\n", NAMES)
    assert reading is not None
    assert (reading.running, reading.waiting, reading.kv_usage, reading.kv_capacity) == (0, 0, 0.0, None)
    silent = read_metrics(b"running 0\nwaiting 0\n", NAMES)
    assert silent is not None
    assert silent.kv_usage is None
    assert read_metrics(b"running 0\n", NAMES) is None


def test_engines_of_one_server_are_added_up_and_their_caches_averaged() -> None:
    page = (
        b'running{engine="0"} 2\nrunning{engine="1"} 3\nwaiting 1\nusage{e="0"} 0.5\nusage{e="1"} 0.9\ncapacity 100\n'
    )
    reading = read_metrics(page, NAMES)
    assert reading is not None
    assert reading.kv_usage == pytest.approx(0.7)
    assert (reading.running, reading.kv_tokens) == (5, 70)


def a_reading(running: int = 0, waiting: int = 0, **more: object) -> Reading:
    return Reading(running=running, waiting=waiting, **more)  # type: ignore[arg-type]


def test_an_engine_that_started_again_counts_on_and_never_backwards() -> None:
    beliefs = Beliefs()
    beliefs.learn(a_reading(preemptions=5.0, steps=Steps(100, 1000)), 0, 0.0)
    beliefs.learn(a_reading(preemptions=8.0, steps=Steps(110, 1200)), 0, 1.0)
    assert (beliefs.preemptions, beliefs.steps) == (3, EngineSteps(10.0, 20.0))
    beliefs.learn(a_reading(preemptions=1.0, steps=Steps(4, 30)), 0, 2.0)
    assert (beliefs.preemptions, beliefs.steps) == (3, EngineSteps(10.0, 20.0)), "it began anew"
    beliefs.learn(a_reading(preemptions=2.0, steps=Steps(4, 30)), 0, 3.0)
    assert (beliefs.preemptions, beliefs.steps) == (4, EngineSteps(0.0, 0.0)), "no step is no step"


@pytest.mark.parametrize(("own", "tolerated"), [(0, 2), (40, 4)])
def test_a_little_more_than_ones_own_may_be_a_race_and_one_more_is_somebody_elses(own: int, tolerated: int) -> None:
    assert excess(a_reading(own + tolerated), own) == Load()
    assert excess(a_reading(own + tolerated + 1), own).running == tolerated + 1


def test_use_is_somebody_elses_when_it_was_there_in_as_many_readings_as_it_takes() -> None:
    beliefs = Beliefs()
    for number in range(LOOKS):
        assert beliefs.foreign(float(number)) == Load()
        beliefs.learn(a_reading(10), 0, float(number))
    assert beliefs.foreign(float(LOOKS)).running == 10
    assert beliefs.load(3, LOOKS - 1 + STALE_S) == Load(10, 0, 0), "a reading is of use for as long as it says"
    assert beliefs.load(3, LOOKS - 1 + STALE_S + 0.1) == Load(running=3)


def test_how_many_an_engine_runs_is_known_after_as_many_crowded_readings_as_it_takes() -> None:
    beliefs = Beliefs()
    for number in range(CROWDED):
        assert beliefs.engine_sequences is None
        beliefs.learn(a_reading(8, 1), 9, float(number))
    assert beliefs.engine_sequences == 8


# -- going on --------------------------------------------------------------------------------------------------------


def continued(so_far: SoFar, left: int = 5, **fields: object) -> dict[str, object]:
    body: dict[str, object] = json.loads(continued_body(a_call(**fields), so_far, left, b""))  # type: ignore[arg-type]
    return body


def test_a_continuation_chooses_tokens_as_the_beginning_did_zeros_included() -> None:
    body = continued(SoFar((1,), (2,)), temperature=0, seed=0, top_k=0, presence_penalty=0, top_p=None)
    assert {name: body[name] for name in ("temperature", "seed", "top_k", "presence_penalty")} == {
        "temperature": 0,
        "seed": 0,
        "top_k": 0,
        "presence_penalty": 0,
    }
    assert "top_p" not in body


@pytest.mark.parametrize(("least", "sent"), [(3, None), (4, 1), (9, 5), (8, 5), (7, 4)])
def test_a_minimum_counts_what_was_written_and_is_never_more_than_is_left(least: int, sent: int | None) -> None:
    assert continued(SoFar((1,), (2, 3, 4)), left=5, min_tokens=least).get("min_tokens") == sent


@pytest.mark.parametrize(("context", "left"), [(None, 5), (100, 5), (11, 5), (10, 4), (6, 0), (5, -1)])
def test_what_is_left_is_bounded_by_the_limit_and_by_the_context(context: int | None, left: int) -> None:
    assert tokens_left(a_call(tokens=8), SoFar((1, 2, 3), (4, 5, 6)), context) == left


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
def test_up_to_three_tokens_of_a_character_that_is_not_whole_are_written_again(cut: int) -> None:
    data = b"ab" + "😀".encode()
    ids = tuple(range(len(data) - cut))
    seams = Seams(Server(data), b"/detokenize", b"")  # type: ignore[arg-type]
    whole = len(data) if cut == 0 else 2
    assert asyncio.run(seams.whole_characters("m", ids)) == whole
