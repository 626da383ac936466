"""`@inferry.batched` of synchronous functions, which run on threads."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

import inferry
from inferry.pipelines.batched import thread_runner

LIMIT_S = 60.0
"""For a wait that ends with an event: only a test that fails reaches it."""


class Blocked:
    """A synchronous function that runs only while it may, and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.started = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.started.set()
        assert self.may_run.wait(LIMIT_S)
        return [10 * item for item in items]


def test_threads_share_the_batches_of_a_synchronous_function() -> None:
    function = Blocked()
    tenfold = inferry.batched(max_batch=16)(function)
    first = tenfold.submit(0)
    assert function.started.wait(LIMIT_S)
    futures = [tenfold.submit(item) for item in range(1, 20)]
    function.may_run.set()
    assert [future.result(LIMIT_S) for future in [first, *futures]] == [10 * item for item in range(20)]
    assert [len(batch) for batch in function.batches] == [1, 16, 3]
    assert tenfold(7) == 70


def test_event_loops_and_threads_share_them_too() -> None:
    function = Blocked()
    tenfold = inferry.batched(function)
    first = tenfold.submit(0)
    assert function.started.wait(LIMIT_S)

    async def main() -> list[int]:
        calls = [asyncio.create_task(tenfold.acall(item)) for item in (1, 2)]
        await asyncio.sleep(0)
        tenfold.submit(3)
        function.may_run.set()
        return await asyncio.gather(*calls)

    assert asyncio.run(main()) == [10, 20]
    assert first.result(LIMIT_S) == 0
    assert function.batches == [[0], [1, 2, 3]]


def test_cancelled_items_of_a_synchronous_function_do_not_run() -> None:
    function = Blocked()
    tenfold = inferry.batched(function)
    running = tenfold.submit(0)
    assert function.started.wait(LIMIT_S)
    waiting = [tenfold.submit(item) for item in (1, 2)]
    assert waiting[0].cancel()
    assert not running.cancel(), "it has started"

    async def timed_out() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tenfold.acall(3), 0.001)

    asyncio.run(timed_out())
    function.may_run.set()
    assert waiting[1].result(LIMIT_S) == 20
    assert function.batches == [[0], [2]]
    with pytest.raises(CancelledError):
        waiting[0].result()


def test_close_of_a_synchronous_function_serves_what_waits() -> None:
    function = Blocked()
    tenfold = inferry.batched(function)
    futures = [tenfold.submit(0)]
    assert function.started.wait(LIMIT_S)
    futures.append(tenfold.submit(1))
    function.may_run.set()
    tenfold.close()
    assert [future.result(0) for future in futures] == [0, 10]
    with pytest.raises(RuntimeError, match="Blocked is closed"):
        tenfold(1)


def test_errors_and_exits_of_a_synchronous_function_reach_the_callers_only() -> None:
    @inferry.batched
    def failing(items: list[str]) -> list[str]:
        if "exit" in items:
            raise SystemExit(3)
        return [item.upper() for item in items]

    with pytest.raises(SystemExit):
        failing("exit")
    with pytest.raises(AttributeError):
        failing(3)  # type: ignore[arg-type]
    assert failing("still served") == "STILL SERVED"


def test_concurrency_of_a_synchronous_function_is_a_number_of_threads() -> None:
    together = threading.Barrier(3)

    @inferry.batched(max_batch=1, concurrency=3)
    def meeting(items: list[int]) -> list[int]:
        together.wait(LIMIT_S)
        return items

    assert [future.result(LIMIT_S) for future in [meeting.submit(item) for item in range(3)]] == [0, 1, 2]


def test_an_idle_thread_ends_and_the_next_item_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_runner, "IDLE_S", 0.001)
    threads: list[threading.Thread] = []

    @inferry.batched
    def same(items: list[int]) -> list[int]:
        threads.append(threading.current_thread())
        return items

    for item in range(3):
        assert same(item) == item
        threads[-1].join(LIMIT_S)
        assert not threads[-1].is_alive()
    assert len(set(threads)) == 3
