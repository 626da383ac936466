"""The queue of a batched function: lanes, shares, windows and limits, with time as an argument."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from inferry.domain.errors import QueueFull
from inferry.domain.lanes import Lane
from inferry.pipelines.batched.batch_queue import BatchQueue, Entry, Window


def a_queue(
    max_batch: int = 4, window: Window = "off", window_s: float = 0.01, max_queue: int | None = None
) -> BatchQueue:
    return BatchQueue(max_batch=max_batch, window=window, window_s=window_s, max_queue=max_queue)


def offer(queue: BatchQueue, item: Any, lane: Lane = Lane.P1, now: float = 0.0, is_idle: bool = True) -> "Future[Any]":
    result: Future[Any] = Future()
    queue.offer(Entry(item, result), lane, now, is_idle)
    return result


def taken(queue: BatchQueue) -> list[Any]:
    return [entry.item for entry in queue.take()]


def test_higher_lanes_go_first_and_a_lane_is_first_in_first_out() -> None:
    queue = a_queue()
    for item, lane in [("c", Lane.P2), ("b", Lane.P1), ("a", Lane.P0), ("a'", Lane.P0), ("b'", Lane.P1)]:
        offer(queue, item, lane)
    assert taken(queue) == ["a", "a'", "b", "b'"]
    assert taken(queue) == ["c"]
    assert queue.size == 0


def test_lower_lanes_keep_their_share_while_a_higher_lane_fills_every_batch() -> None:
    queue = a_queue(max_batch=10)
    for number in range(2000):
        for lane in Lane:
            offer(queue, (lane, number), lane)
    lanes = [lane for _ in range(100) for lane, _ in taken(queue)]
    assert len(lanes) == 1000
    assert lanes.count(Lane.P1) == pytest.approx(100, abs=2)
    assert lanes.count(Lane.P2) == pytest.approx(50, abs=2)


def test_a_share_also_holds_with_batches_of_one() -> None:
    queue = a_queue(max_batch=1)
    for _ in range(100):
        offer(queue, "P0", Lane.P0)
    offer(queue, "P2", Lane.P2)
    order = [taken(queue)[0] for _ in range(21)]
    assert "P2" in order
    assert order[0] == "P0"


def test_a_cancelled_item_is_in_no_batch() -> None:
    queue = a_queue()
    first, second = offer(queue, 1), offer(queue, 2)
    assert first.cancel()
    assert taken(queue) == [2]
    assert not second.cancel(), "an item of a batch has started"


def test_cancelled_items_leave_the_limit() -> None:
    queue = a_queue(max_queue=2)
    first = offer(queue, 1)
    offer(queue, 2)
    with pytest.raises(QueueFull, match="2 items wait"):
        offer(queue, 3)
    first.cancel()
    offer(queue, 3)
    assert taken(queue) == [2, 3]


def test_off_holds_nothing() -> None:
    queue = a_queue(window="off")
    assert queue.release_at() is None
    offer(queue, 1, now=5.0)
    assert queue.release_at() == 5.0


def test_fixed_holds_until_the_window_of_the_oldest_item_or_a_full_batch() -> None:
    queue = a_queue(window="fixed", window_s=0.01, max_batch=3)
    offer(queue, 1, now=5.0)
    offer(queue, 2, now=5.005)
    assert queue.release_at() == pytest.approx(5.01)
    offer(queue, 3, now=5.006)
    assert queue.release_at() == 0.0


def test_adaptive_holds_only_where_items_were_seen_to_follow() -> None:
    alone = a_queue(window="adaptive")
    for now in range(20):
        offer(alone, now, now=float(now))
        assert alone.release_at() == float(now), "an item that comes alone is never held"
        alone.take()

    followed = a_queue(window="adaptive", window_s=0.01)
    for now in range(20):
        offer(followed, now, now=float(now))
        release_at = followed.release_at()
        offer(followed, now, now=now + 0.002)
        followed.take()
    assert release_at == pytest.approx(19.01)


def test_an_adaptive_window_is_at_most_a_quarter_of_the_functions_duration() -> None:
    queue = a_queue(window="adaptive", window_s=0.01)
    queue.record_pass(0.02)
    for now in range(20):
        offer(queue, now, now=float(now))
        release_at = queue.release_at()
        offer(queue, now, now=now + 0.002)
        queue.take()
    assert release_at == pytest.approx(19.005)


def test_items_that_arrive_while_the_function_runs_go_as_soon_as_it_ends() -> None:
    queue = a_queue(window="adaptive")
    offer(queue, 1, now=5.0, is_idle=False)
    assert queue.release_at() == 5.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_futures_of_asyncio_are_cancelled_in_the_same_way(loop: asyncio.AbstractEventLoop) -> None:
    queue = a_queue()
    first, second = loop.create_future(), loop.create_future()
    queue.offer(Entry(1, first), Lane.P1, 0.0, True)
    queue.offer(Entry(2, second), Lane.P1, 0.0, True)
    first.cancel()
    assert taken(queue) == [2]
