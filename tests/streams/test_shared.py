"""One execution, several readers: each gets all of it, in order and once, whenever it came."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Delta, Done, End, FinishReason, Usage
from inferry.streams.mailbox import JobStream, MergeTally
from inferry.streams.shared import DELTA_BYTES, PAGE_BYTES, Memory, Reader, Shared
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
        delta, end = self.reader.take_now()
        if self._restarts != self.reader.restarts:
            assert not self.reader.job.stream, "what was streamed cannot be taken back"
            self._restarts = self.reader.restarts
            self.text, self.indexes = "", []
        if delta is not None:
            self.text += delta.text
            self.indexes.append(delta.index)
        if end is not None:
            self.ends.append(end)


class Play(Shared):
    """Tells everybody of the end, and remembers who was torn off."""

    __slots__ = ("torn",)

    def __init__(self, source: JobStream, memory: Memory) -> None:
        self.torn: list[Reader] = []
        super().__init__(source, memory)

    def _over(self, end: End) -> None:
        for reader in self.readers:
            reader.finish(end)

    def _torn(self, reader: Reader) -> None:
        self.torn.append(reader)


class Theatre:
    """A worker on one side, readers on the other."""

    def __init__(self, *, memory: Memory | None = None, streams: bool = False) -> None:
        self.job = a_job("j", run_id="run", step_id="step", stream=streams)
        self.source = JobStream(Attempt(self.job), MergeTally())
        self.memory = memory or Memory(1 << 20, 1 << 20)
        self.shared = Play(self.source, self.memory)
        self.listeners: list[Listener] = []
        self._next = 0

    def joins(self, *, streams: bool = False) -> Listener:
        reader = Reader(a_job(stream=streams), self.source.attempt, self.shared.tally, "j")
        listener = Listener(reader)
        self.shared.join(reader)
        self.listeners.append(listener)
        return listener

    def says(self, text: str, *, tokens: int = 1, **more: Any) -> None:
        self.source.push(Delta("j", "run", "step", self._next, text, (), tokens, **more))
        self._next += 1

    def is_lost(self, *, from_start: bool) -> None:
        self.source.again(Attempt(self.job), from_start=from_start)
        self._next = 0


def test_who_comes_late_gets_it_from_the_beginning() -> None:
    theatre = Theatre()
    early = theatre.joins()
    theatre.says("", tokens=0)
    theatre.says("one")
    late = theatre.joins(streams=True)
    theatre.says(" two", is_last=True)
    theatre.source.finish(DONE)
    for listener in (early, late):
        listener.take()
        assert (listener.text, listener.ends) == ("one two", [DONE])


def test_a_reader_that_leaves_hears_no_more_and_the_others_go_on() -> None:
    theatre = Theatre()
    first, second = theatre.joins(), theatre.joins()
    theatre.says("one")
    first.take()
    theatre.shared.leave(first.reader)
    theatre.says(" two")
    theatre.source.finish(DONE)
    first.take()
    second.take()
    assert (first.text, first.ends) == ("one", [])
    assert (second.text, second.ends) == ("one two", [DONE])


def test_an_execution_that_begins_anew_resets_those_who_can_forget_and_tears_off_those_who_cannot() -> None:
    theatre = Theatre()
    whole, streaming = theatre.joins(), theatre.joins(streams=True)
    theatre.says("void")
    whole.take()
    streaming.take()
    theatre.is_lost(from_start=True)
    theatre.says("one")
    theatre.source.finish(DONE)
    whole.take()
    streaming.take()
    assert (whole.text, whole.ends) == ("one", [DONE])
    assert theatre.shared.torn == [streaming.reader]
    assert (streaming.text, streaming.ends) == ("void", [])


def test_who_comes_after_a_loss_gets_nothing_of_what_is_void() -> None:
    theatre = Theatre()
    theatre.joins()
    theatre.says("void")
    theatre.is_lost(from_start=True)
    late = theatre.joins(streams=True)
    theatre.says("one")
    late.take()
    assert late.text == "one"


def test_an_execution_that_goes_on_elsewhere_is_one_answer_to_its_readers() -> None:
    theatre = Theatre()
    early = theatre.joins(streams=True)
    theatre.says("one")
    theatre.is_lost(from_start=False)
    late = theatre.joins(streams=True)
    assert late.reader.attempt is early.reader.attempt is theatre.source.attempt
    theatre.says(" two")
    theatre.source.finish(DONE)
    for listener in (early, late):
        listener.take()
        assert listener.text == "one two"


def test_beyond_its_bounds_nobody_can_join_and_those_inside_go_on() -> None:
    for memory in (Memory(limit=1 << 20, of_one=PAGE_BYTES), Memory(limit=PAGE_BYTES, of_one=1 << 20)):
        theatre = Theatre(memory=memory)
        inside = theatre.joins()
        theatre.says("x" * (PAGE_BYTES - DELTA_BYTES))
        assert theatre.shared.is_joinable
        assert memory.used == PAGE_BYTES
        theatre.says("y")
        assert not theatre.shared.is_joinable
        assert memory.used == 0
        theatre.says("z")
        theatre.source.finish(DONE)
        inside.take()
        assert (inside.text.lstrip("x"), inside.ends) == ("yz", [DONE])
        assert memory.used == 0


def test_what_was_kept_is_given_back_at_the_end() -> None:
    theatre = Theatre()
    theatre.joins()
    theatre.says("one", raw=b"data: %b\n\n" % (b"1" * 2 * PAGE_BYTES))
    assert theatre.memory.used == 3 * PAGE_BYTES
    theatre.source.finish(DONE)
    assert theatre.memory.used == 0


ACTS = st.one_of(
    st.tuples(st.just("says"), st.integers(0, 1)),
    st.tuples(st.just("joins"), st.booleans()),
    st.tuples(st.just("leaves"), st.integers(0, 5)),
    st.tuples(st.just("takes"), st.integers(0, 5)),
    st.tuples(st.just("is lost"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(acts=st.lists(ACTS, max_size=40))
def test_whatever_the_order_every_reader_that_stays_gets_exactly_the_answer(acts: list[tuple[str, Any]]) -> None:
    theatre = Theatre()
    answer: list[str] = []
    said = 0
    for act, value in acts:
        listener = None
        if act in ("leaves", "takes") and value < len(theatre.listeners):
            listener = theatre.listeners[value]
        if act == "says":
            said += 1
            theatre.says(f"{said} " if value else "", tokens=value)
            answer += [f"{said} "] * value
        elif act == "joins":
            theatre.joins(streams=value)
        elif act == "leaves" and listener is not None:
            listener.has_left = True
            theatre.shared.leave(listener.reader)
        elif act == "takes" and listener is not None:
            listener.take()
        elif act == "is lost":
            # Only what has begun can be gone on with.
            from_start = value or not answer
            theatre.is_lost(from_start=from_start)
            if from_start:
                answer.clear()
    theatre.source.finish(DONE)
    for listener in theatre.listeners:
        if listener.has_left or listener.reader in theatre.shared.torn:
            continue
        listener.take()
        assert listener.text == "".join(answer)
        assert listener.ends == [DONE]
        assert listener.indexes == sorted(set(listener.indexes))
    assert theatre.memory.used == 0
