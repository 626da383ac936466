"""One stream per job: in order, without loss, with one end, whatever the pace of its reader."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.attempts import Attempt
from inferry.domain.errors import WorkerLost
from inferry.domain.streams import Delta, End, Failed
from inferry.domain.values import replace
from inferry.streams.mailbox import MERGE_THRESHOLD, MergeCounter, StreamProtocolError, merge
from streams.builders import DONE, a_delta, a_stream
from support.builders import a_job

MOST_UNREAD_BYTES = 8 * 1024 * 1024
"""What a reader may leave by default before it is given up."""


# -- the reader ------------------------------------------------------------------------------------------------------


def test_a_reader_that_keeps_up_gets_every_delta_as_it_came() -> None:
    async def main() -> None:
        merge_counter = MergeCounter()
        stream = a_stream(merge_counter)
        for index in range(3):
            delta = a_delta(index, f"{index}")
            stream.push(delta)
            assert await stream.take() == (delta, None)
        assert merge_counter.deltas == 0

    asyncio.run(main())


def test_unread_deltas_of_a_slow_reader_are_merged() -> None:
    async def main() -> None:
        merge_counter = MergeCounter()
        stream = a_stream(merge_counter)
        for index, text in enumerate(("one ", "two ", "three")):
            stream.push(a_delta(index, text, raw=b"data: %d\n\n" % index))
        delta, end = await stream.take()
        raw = b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert delta == Delta("j", "run", "step", 0, "one two three", (0, 1, 2), 3, raw)
        assert end is None
        assert merge_counter.deltas == 2, "three deltas became one"

    asyncio.run(main())


@pytest.mark.parametrize("left", [MERGE_THRESHOLD - 1, MERGE_THRESHOLD, MERGE_THRESHOLD + 1, 5 * MERGE_THRESHOLD + 3])
def test_a_reader_loses_nothing_whatever_it_leaves_unread(left: int) -> None:
    merge_counter = MergeCounter()
    stream = a_stream(merge_counter)
    deltas = [a_delta(index, f"{index} ", raw=b"data: %d\n\n" % index) for index in range(left)]
    for delta in deltas:
        stream.push(delta)
    assert stream.unread_bytes == sum(len(delta.raw) + len(delta.text) for delta in deltas)
    assert stream.take_nowait() == (merge(deltas), None)
    assert merge_counter.deltas == left - 1
    stream.push(a_delta(left, "next"))
    assert stream.take_nowait() == (a_delta(left, "next"), None)


def test_a_reader_that_does_not_read_costs_the_others_no_more_than_one_that_does() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (b"lamp " * 30)
    count = MOST_UNREAD_BYTES // len(event)
    deltas = [Delta("j", "run", "step", index, "", (), 1, event) for index in range(count)]

    def seconds(reads: bool) -> tuple[float, float]:
        """What all pushes cost, and what the reader costs that comes back in the end."""
        stream = a_stream()
        began = time.thread_time()
        for delta in deltas:
            stream.push(delta)
            if reads:
                stream.take_nowait()
        pushed = time.thread_time()
        stream.take_nowait()
        return pushed - began, time.thread_time() - pushed

    slow = [seconds(reads=False) for _ in range(3)]
    kept_up = min(seconds(reads=True)[0] for _ in range(3))
    assert min(pushing for pushing, _ in slow) < 3 * kept_up
    # Nothing else runs meanwhile: all of it at once has to be short.
    assert min(coming_back for _, coming_back in slow) < 0.05


def test_the_end_is_taken_with_the_unread_deltas() -> None:
    async def main() -> None:
        stream = a_stream()
        stream.push(a_delta(0, "last"))
        stream.finish(DONE)
        assert await stream.take() == (a_delta(0, "last"), DONE)

    asyncio.run(main())


def test_an_end_may_come_alone() -> None:
    async def main() -> None:
        stream = a_stream()
        failed = Failed("j", WorkerLost("gone"))
        stream.finish(failed)
        assert await stream.take() == (None, failed)

    asyncio.run(main())


def test_a_waiting_reader_wakes_for_a_delta_and_for_the_end() -> None:
    async def main() -> None:
        stream = a_stream()
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.push(a_delta(0, "x"))
        assert await reading == (a_delta(0, "x"), None)
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.finish(DONE)
        assert await reading == (None, DONE)

    asyncio.run(main())


def test_deltas_that_arrive_between_wake_and_take_are_taken() -> None:
    async def main() -> None:
        stream = a_stream()
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.push(a_delta(0, "a"))
        stream.push(a_delta(1, "b"))
        stream.finish(DONE)
        delta, end = await reading
        assert delta is not None
        assert (delta.text, end) == ("ab", DONE)

    asyncio.run(main())


def test_a_listener_hears_of_every_delta_and_of_the_end() -> None:
    stream = a_stream()
    heard: list[tuple[Delta | None, End | None]] = []
    stream.listen(lambda: heard.append(stream.take_nowait()))
    stream.push(a_delta(0, "a"))
    stream.push(a_delta(1, "b"))
    stream.finish(DONE)
    assert heard == [(a_delta(0, "a"), None), (a_delta(1, "b"), None), (None, DONE)]


def test_a_last_delta_leaves_together_with_the_end_that_follows_it() -> None:
    stream = a_stream()
    heard: list[tuple[Delta | None, End | None]] = []
    stream.listen(lambda: heard.append(stream.take_nowait()))
    stream.push(a_delta(0, "a"))
    last = replace(a_delta(1, "b"), is_last=True)
    stream.push(last)
    assert heard == [(a_delta(0, "a"), None)]
    stream.finish(DONE)
    assert heard == [(a_delta(0, "a"), None), (last, DONE)]


def test_a_late_listener_is_notified_of_unread_deltas() -> None:
    stream = a_stream()
    stream.push(a_delta(0, "a"))
    stream.finish(DONE)
    heard: list[tuple[Delta | None, End | None]] = []
    stream.listen(lambda: heard.append(stream.take_nowait()))
    assert heard == [(a_delta(0, "a"), DONE)]


def test_a_listener_that_takes_nothing_loses_nothing() -> None:
    merge_counter = MergeCounter()
    stream = a_stream(merge_counter)
    stream.listen(lambda: None)
    stream.push(a_delta(0, "a", raw=b"12345"))
    stream.push(a_delta(1, "b", raw=b"67"))
    assert stream.unread_bytes == 9
    delta, _ = stream.take_nowait()
    assert delta is not None
    assert (delta.text, stream.unread_bytes, merge_counter.deltas) == ("ab", 0, 1)
    assert stream.take_nowait() == (None, None)


def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    async def main() -> None:
        stream = a_stream()
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        stream.push(a_delta(0, "kept"))
        assert await stream.take() == (a_delta(0, "kept"), None)

    asyncio.run(main())


def test_the_producer_never_waits() -> None:
    stream = a_stream()
    for index in range(1000):
        stream.push(a_delta(index))
    stream.finish(DONE)


# -- the law of the producer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2, -1])
def test_a_delta_out_of_order_is_refused_and_changes_nothing(index: int) -> None:
    async def main() -> None:
        stream = a_stream()
        stream.push(a_delta(0, "good"))
        with pytest.raises(StreamProtocolError, match=f"delta {index} where 1 was due"):
            stream.push(a_delta(index, "bad"))
        stream.push(a_delta(1, " too"))
        delta, _ = await stream.take()
        assert delta is not None
        assert delta.text == "good too"

    asyncio.run(main())


def test_a_delta_of_another_run_or_step_is_refused() -> None:
    stream = a_stream()
    with pytest.raises(StreamProtocolError, match="another run or step"):
        stream.push(a_delta(0, run_id="other"))
    with pytest.raises(StreamProtocolError, match="another run or step"):
        stream.push(a_delta(0, step_id="other"))
    stream.push(a_delta(0))


def test_nothing_comes_after_the_end() -> None:
    stream = a_stream()
    stream.finish(DONE)
    with pytest.raises(StreamProtocolError):
        stream.push(a_delta(0))


@pytest.mark.parametrize("second", [DONE, Failed("j", WorkerLost("gone"))])
def test_a_stream_ends_once_and_keeps_its_first_end(second: End) -> None:
    async def main() -> None:
        stream = a_stream()
        stream.finish(DONE)
        with pytest.raises(StreamProtocolError, match="ended twice"):
            stream.finish(second)
        assert await stream.take() == (None, DONE)

    asyncio.run(main())


def test_protocol_errors_contain_no_output() -> None:
    stream = a_stream()
    with pytest.raises(StreamProtocolError) as caught:
        stream.push(a_delta(7, "canary"))
    assert "canary" not in str(caught.value)


# -- any interleaving ------------------------------------------------------------------------------------------------


PIECES = st.lists(st.text(max_size=5), max_size=20)


MOVES = st.lists(st.sampled_from(["push", "take", "step"]), max_size=80)


@given(PIECES, MOVES)
def test_any_interleaving_gives_the_concatenation_and_one_end_last(pieces: list[str], moves: list[str]) -> None:
    async def main() -> None:
        merge_counter = MergeCounter()
        stream = a_stream(merge_counter)
        taken: list[tuple[Delta | None, End | None]] = []

        async def read_one() -> None:
            taken.append(await stream.take())

        async def settle() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        to_push = [a_delta(index, text, raw=text.encode()) for index, text in enumerate(pieces)]
        waiting: list[Delta] = to_push[::-1]
        reader: asyncio.Task[None] | None = None
        for move in moves:
            match move:
                case "push" if waiting:
                    stream.push(waiting.pop())
                case "take" if reader is None or reader.done():
                    reader = asyncio.create_task(read_one())
                case "step":
                    await settle()
        while waiting:
            stream.push(waiting.pop())
        stream.finish(DONE)
        if reader is not None:
            await reader
        while not taken or taken[-1][1] is None:
            await read_one()

        deltas = [delta for delta, _ in taken if delta is not None]
        assert "".join(delta.text for delta in deltas) == "".join(pieces)
        assert b"".join(delta.raw for delta in deltas) == "".join(pieces).encode()
        assert [token for delta in deltas for token in delta.token_ids] == list(range(len(pieces)))
        assert sum(delta.tokens for delta in deltas) == len(pieces)
        assert merge_counter.deltas == len(pieces) - len(deltas)
        indexes = [delta.index for delta in deltas]
        assert indexes == sorted(set(indexes)), "each piece stands under the index of its first delta"
        assert [end for _, end in taken[:-1] if end is not None] == []
        assert taken[-1][1] is DONE

    asyncio.run(main())


@given(PIECES.filter(bool), st.integers(0, 20))
def test_merging_in_two_steps_is_merging_in_one(pieces: list[str], cut: int) -> None:
    deltas = [a_delta(index, text) for index, text in enumerate(pieces)]
    cut = min(cut, len(deltas))
    parts = [merge(part) for part in (deltas[:cut], deltas[cut:]) if part]
    assert merge(parts) == merge(deltas)


def test_a_role_without_text_is_delivered_before_an_empty_answer_and_not_before_an_error() -> None:
    role = replace(a_delta(0, raw=b"role"), tokens=0)
    for end, said in ((DONE, 1), (Failed("j", WorkerLost("gone")), 0)):
        stream = a_stream()
        stream.push(role)
        assert stream.take_nowait() == (None, None)
        stream.finish(end)
        delta, got = stream.take_nowait()
        assert got is end
        assert (delta is not None) == bool(said)


def test_held_back_output_of_a_lost_attempt_is_never_delivered() -> None:
    stream = a_stream()
    stream.push(replace(a_delta(0, raw=b"role"), tokens=0))
    stream.begin_attempt(Attempt(a_job("j", run_id="run", step_id="step", attempt=2)), from_start=True)
    stream.push(replace(a_delta(0, raw=b"again"), tokens=0))
    stream.push(a_delta(1, raw=b" word"))
    delta, _ = stream.take_nowait()
    assert delta is not None
    assert delta.raw == b"again word"
    assert stream.restarts == 0
