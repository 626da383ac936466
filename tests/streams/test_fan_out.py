"""One execution with several readers: each gets the whole output once and in order, whenever it joined."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Delta, Done, End, FinishReason, Usage
from inferry.streams.fan_out import DELTA_OVERHEAD_BYTES, RESERVE_STEP_BYTES, FanOut, HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter
from support.builders import a_job

pytestmark = pytest.mark.plain

DONE = Done("j", FinishReason.STOP, Usage(3, 0, 2))


class Listener:
    """A client: what it has been told, as it would show it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.text = ""
        self.indexes: list[int] = []
        self.ends: list[End] = []
        self.has_left = False
        self._restarts = reader.restarts

    def take(self) -> None:
        delta, end = self.reader.take_nowait()
        if self._restarts != self.reader.restarts:
            assert not self.reader.job.stream, "what was streamed cannot be taken back"
            self._restarts = self.reader.restarts
            self.text, self.indexes = "", []
        if delta is not None:
            self.text += delta.text
            self.indexes.append(delta.index)
        if end is not None:
            self.ends.append(end)


class RecordingFanOut(FanOut):
    """Tells everybody of the end, and remembers who was torn off."""

    __slots__ = ("detached",)

    def __init__(self, source: JobStream, history_budget: HistoryBudget) -> None:
        self.detached: list[Reader] = []
        super().__init__(source, history_budget)

    def _on_end(self, end: End) -> None:
        for reader in self.readers:
            reader.finish(end)

    def _on_reader_detached(self, reader: Reader) -> None:
        self.detached.append(reader)


class FanOutHarness:
    """A worker on one side, readers on the other."""

    def __init__(self, *, history_budget: HistoryBudget | None = None, streams: bool = False) -> None:
        self.job = a_job("j", run_id="run", step_id="step", stream=streams)
        self.source = JobStream(Attempt(self.job), MergeCounter())
        self.history_budget = history_budget or HistoryBudget(1 << 20, 1 << 20)
        self.shared = RecordingFanOut(self.source, self.history_budget)
        self.listeners: list[Listener] = []
        self._next = 0

    def add_listener(self, *, streams: bool = False) -> Listener:
        reader = Reader(a_job(stream=streams), self.source.attempt, self.shared.merge_counter, "j")
        listener = Listener(reader)
        self.shared.join(reader)
        self.listeners.append(listener)
        return listener

    def push_text(self, text: str, *, tokens: int = 1, **more: Any) -> None:
        self.source.push(Delta("j", "run", "step", self._next, text, (), tokens, **more))
        self._next += 1

    def lose_attempt(self, *, from_start: bool) -> None:
        self.source.begin_attempt(Attempt(self.job), from_start=from_start)
        self._next = 0


def test_a_late_reader_gets_the_stream_from_the_beginning() -> None:
    harness = FanOutHarness()
    early = harness.add_listener()
    harness.push_text("", tokens=0)
    harness.push_text("one")
    late = harness.add_listener(streams=True)
    harness.push_text(" two", is_last=True)
    harness.source.finish(DONE)
    for listener in (early, late):
        listener.take()
        assert (listener.text, listener.ends) == ("one two", [DONE])


def test_a_reader_that_leaves_hears_no_more_and_the_others_go_on() -> None:
    harness = FanOutHarness()
    first, second = harness.add_listener(), harness.add_listener()
    harness.push_text("one")
    first.take()
    harness.shared.leave(first.reader)
    harness.push_text(" two")
    harness.source.finish(DONE)
    first.take()
    second.take()
    assert (first.text, first.ends) == ("one", [])
    assert (second.text, second.ends) == ("one two", [DONE])


def test_a_restarted_execution_resets_whole_responses_and_fails_streams() -> None:
    harness = FanOutHarness()
    merged_history, streaming = harness.add_listener(), harness.add_listener(streams=True)
    harness.push_text("void")
    merged_history.take()
    streaming.take()
    harness.lose_attempt(from_start=True)
    harness.push_text("one")
    harness.source.finish(DONE)
    merged_history.take()
    streaming.take()
    assert (merged_history.text, merged_history.ends) == ("one", [DONE])
    assert harness.shared.detached == [streaming.reader]
    assert (streaming.text, streaming.ends) == ("void", [])


def test_a_reader_that_joins_after_a_loss_gets_no_void_output() -> None:
    harness = FanOutHarness()
    harness.add_listener()
    harness.push_text("void")
    harness.lose_attempt(from_start=True)
    late = harness.add_listener(streams=True)
    harness.push_text("one")
    late.take()
    assert late.text == "one"


def test_an_execution_that_fails_over_is_one_answer_to_its_readers() -> None:
    harness = FanOutHarness()
    early = harness.add_listener(streams=True)
    harness.push_text("one")
    harness.lose_attempt(from_start=False)
    late = harness.add_listener(streams=True)
    assert late.reader.attempt is early.reader.attempt is harness.source.attempt
    harness.push_text(" two")
    harness.source.finish(DONE)
    for listener in (early, late):
        listener.take()
        assert listener.text == "one two"


def test_beyond_its_bounds_no_reader_can_join_and_current_readers_continue() -> None:
    for history_budget in (
        HistoryBudget(limit=1 << 20, limit_per_execution=RESERVE_STEP_BYTES),
        HistoryBudget(limit=RESERVE_STEP_BYTES, limit_per_execution=1 << 20),
    ):
        harness = FanOutHarness(history_budget=history_budget)
        inside = harness.add_listener()
        harness.push_text("x" * (RESERVE_STEP_BYTES - DELTA_OVERHEAD_BYTES))
        assert harness.shared.is_joinable
        assert history_budget.used == RESERVE_STEP_BYTES
        harness.push_text("y")
        assert not harness.shared.is_joinable
        assert history_budget.used == 0
        harness.push_text("z")
        harness.source.finish(DONE)
        inside.take()
        assert (inside.text.lstrip("x"), inside.ends) == ("yz", [DONE])
        assert history_budget.used == 0


def test_kept_history_is_released_at_the_end() -> None:
    harness = FanOutHarness()
    harness.add_listener()
    harness.push_text("one", raw=b"data: %b\n\n" % (b"1" * 2 * RESERVE_STEP_BYTES))
    assert harness.history_budget.used == 3 * RESERVE_STEP_BYTES
    harness.source.finish(DONE)
    assert harness.history_budget.used == 0


ACTS = st.one_of(
    st.tuples(st.just("says"), st.integers(0, 1)),
    st.tuples(st.just("joins"), st.booleans()),
    st.tuples(st.just("leaves"), st.integers(0, 5)),
    st.tuples(st.just("takes"), st.integers(0, 5)),
    st.tuples(st.just("is lost"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(acts=st.lists(ACTS, max_size=40))
def test_in_any_order_every_remaining_reader_gets_exactly_the_answer(acts: list[tuple[str, Any]]) -> None:
    harness = FanOutHarness()
    answer: list[str] = []
    said = 0
    for act, value in acts:
        listener = None
        if act in ("leaves", "takes") and value < len(harness.listeners):
            listener = harness.listeners[value]
        if act == "says":
            said += 1
            harness.push_text(f"{said} " if value else "", tokens=value)
            answer += [f"{said} "] * value
        elif act == "joins":
            harness.add_listener(streams=value)
        elif act == "leaves" and listener is not None:
            listener.has_left = True
            harness.shared.leave(listener.reader)
        elif act == "takes" and listener is not None:
            listener.take()
        elif act == "is lost":
            # Only what has begun can be gone on with.
            from_start = value or not answer
            harness.lose_attempt(from_start=from_start)
            if from_start:
                answer.clear()
    harness.source.finish(DONE)
    for listener in harness.listeners:
        if listener.has_left or listener.reader in harness.shared.detached:
            continue
        listener.take()
        assert listener.text == "".join(answer)
        assert listener.ends == [DONE]
        assert listener.indexes == sorted(set(listener.indexes))
    assert harness.history_budget.used == 0
