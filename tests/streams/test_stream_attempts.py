"""Streams over several attempts: contiguous indexes, correct unread bytes, no output of restarted attempts."""

import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.errors import WorkerLost
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.streams.fan_out import RESERVE_STEP_BYTES, FanOut, HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter
from support.builders import a_job

DONE = Done("j", FinishReason.STOP, Usage(3, 0, 2))
JOB = a_job("j", run_id="run", step_id="step")


def a_stream() -> JobStream:
    return JobStream(Attempt(JOB), MergeCounter())


def a_token(index: int, text: str = "x") -> Delta:
    return Delta("j", "run", "step", index, text, (index,), 1)


def without_a_token(index: int, text: str = "role") -> Delta:
    return Delta("j", "run", "step", index, text, (), 0)


def taken(stream: JobStream) -> tuple[int, str]:
    delta, _ = stream.take_nowait()
    assert delta is not None
    return delta.index, delta.text


def test_indexes_continue_over_three_attempts() -> None:
    stream = a_stream()
    stream.push(a_token(0, "a"))
    stream.push(a_token(1, "b"))
    stream.begin_attempt(Attempt(JOB), from_start=False)
    stream.push(a_token(0, "c"))
    stream.begin_attempt(Attempt(JOB), from_start=False)
    assert taken(stream) == (0, "abc")
    stream.push(a_token(0, "d"))
    assert taken(stream) == (3, "d")
    assert stream.restarts == 0


def test_held_back_output_is_not_counted_when_the_next_attempt_resumes() -> None:
    stream = a_stream()
    stream.push(without_a_token(0))
    stream.begin_attempt(Attempt(JOB), from_start=False)
    stream.push(a_token(0, "a"))
    assert taken(stream) == (0, "a")


def test_output_of_a_restarted_attempt_is_no_longer_unread() -> None:
    stream = a_stream()
    stream.push(a_token(0, "void"))
    assert stream.unread_bytes == 4
    stream.begin_attempt(Attempt(JOB), from_start=True)
    assert stream.unread_bytes == 0
    assert stream.restarts == 1
    stream.push(a_token(0, "ab"))
    assert stream.unread_bytes == 2


def test_a_resumed_attempt_delivers_text_without_tokens_at_once() -> None:
    """The rest of a text that was held back has no token of its own, and is not to be lost with an error after it."""
    stream = a_stream()
    stream.push(a_token(0, "a"))
    stream.begin_attempt(Attempt(JOB), from_start=False)
    stream.push(without_a_token(0, "rest"))
    stream.finish(Failed("j", WorkerLost("gone")))
    assert taken(stream) == (0, "arest")


# -- one execution, several readers ----------------------------------------------------------------------------------


class Play(FanOut):
    def __init__(self, source: JobStream, memory: HistoryBudget) -> None:
        self.detached: list[Reader] = []
        super().__init__(source, memory)

    def _on_end(self, end: End) -> None:
        for reader in self.readers:
            reader.finish(end)

    def _on_reader_detached(self, reader: Reader) -> None:
        self.detached.append(reader)


def a_play(memory: HistoryBudget | None = None) -> Play:
    return Play(a_stream(), memory or HistoryBudget(1 << 20, 1 << 20))


def a_reader(play: Play, *, streams: bool = False) -> Reader:
    reader = Reader(a_job(stream=streams), play.source.attempt, MergeCounter())
    play.join(reader)
    return reader


@pytest.mark.plain
def test_a_reader_of_a_restart_stays_attached_when_a_later_attempt_resumes() -> None:
    play = a_play()
    patient = a_reader(play)
    play.source.push(a_token(0, "void"))
    play.source.begin_attempt(Attempt(JOB), from_start=True)
    play.source.push(a_token(0, "a"))
    streaming = a_reader(play, streams=True)
    resumed = Attempt(a_job("j", run_id="run", step_id="step"))
    play.source.begin_attempt(resumed, from_start=False)
    play.source.push(a_token(0, "b"))
    assert play.detached == []
    assert patient.restarts == 1
    assert taken(patient) == taken(streaming) == (0, "ab")
    assert patient.attempt is resumed


@pytest.mark.plain
def test_a_restarted_attempt_has_delivered_nothing() -> None:
    play = a_play()
    reader = a_reader(play)
    play.source.push(a_token(0))
    assert play.has_started
    play.source.begin_attempt(Attempt(JOB), from_start=True)
    late = a_reader(play)
    assert not play.has_started
    assert late.take_nowait() == (None, None)
    play.source.push(a_token(0, "anew"))
    assert play.has_started
    assert taken(reader) == taken(late) == (0, "anew")


@pytest.mark.plain
def test_output_of_a_restarted_attempt_takes_no_history_budget() -> None:
    play = a_play(HistoryBudget(RESERVE_STEP_BYTES, RESERVE_STEP_BYTES))
    play.source.push(a_token(0, "v" * 3000))
    play.source.begin_attempt(Attempt(JOB), from_start=True)
    play.source.push(a_token(0, "a" * 3000))
    assert play.is_joinable
    assert taken(a_reader(play)) == (0, "a" * 3000)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("of_all", "limit_per_execution"),
    [(RESERVE_STEP_BYTES, 2 * RESERVE_STEP_BYTES), (2 * RESERVE_STEP_BYTES, RESERVE_STEP_BYTES)],
)
def test_the_last_page_that_may_be_kept_is_kept_and_the_next_is_not(of_all: int, limit_per_execution: int) -> None:
    play = a_play(HistoryBudget(of_all, limit_per_execution))
    play.source.push(a_token(0))
    assert play.is_joinable
    play.source.push(a_token(1, "x" * RESERVE_STEP_BYTES))
    assert not play.is_joinable


@pytest.mark.plain
def test_unread_bytes_of_a_follower_exclude_restarted_attempts() -> None:
    play = a_play()
    play.source.push(a_token(0, "four"))
    reader = a_reader(play)
    assert reader.unread_bytes == 4
    play.source.push(a_token(1, "six"))
    assert reader.unread_bytes == 7
    play.source.begin_attempt(Attempt(JOB), from_start=True)
    play.source.push(a_token(0, "x"))
    assert reader.unread_bytes == 1
