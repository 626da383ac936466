"""`@inferry.batched`: callers on event loops and threads, cancellation, limits, close."""

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import inferry
from support.virtual_time import run_virtual

LIMIT_S = 60.0
"""For a wait that ends with an event: only a test that fails reaches it."""


# -- asynchronous functions ------------------------------------------------------------------------------------------


def test_callers_that_start_together_share_batches() -> None:
    batches: list[int] = []

    @inferry.batched(max_batch=16)
    async def tenfold(items: list[int]) -> list[int]:
        batches.append(len(items))
        await asyncio.sleep(0.01)
        return [10 * item for item in items]

    async def main() -> list[int]:
        return await asyncio.gather(*(tenfold(item) for item in range(40)))

    assert run_virtual(main()) == [10 * item for item in range(40)]
    assert batches == [16, 16, 8]


def test_p0_goes_before_p2() -> None:
    order: list[str] = []

    @inferry.batched(max_batch=1, lane="P2")
    async def record(items: list[str]) -> list[None]:
        order.extend(items)
        await asyncio.sleep(0.01)
        return [None]

    async def main() -> None:
        calls = [asyncio.create_task(record(f"batch {number}")) for number in range(3)]
        await asyncio.sleep(0.005)
        await asyncio.gather(*calls, record("standard", lane="P1"), record("live", lane="P0"))

    run_virtual(main())
    assert order == ["batch 0", "live", "standard", "batch 1", "batch 2"]


def test_a_fixed_window_waits_for_later_callers() -> None:
    batches: list[list[int]] = []

    @inferry.batched(window="fixed", window_ms=20)
    async def same(items: list[int]) -> list[int]:
        batches.append(items)
        return items

    async def later(delay_s: float, item: int) -> None:
        await asyncio.sleep(delay_s)
        await same(item)

    async def main() -> float:
        started_at = asyncio.get_running_loop().time()
        await asyncio.gather(later(0, 1), later(0.015, 2), later(0.03, 3))
        return asyncio.get_running_loop().time() - started_at

    assert run_virtual(main()) == pytest.approx(0.05)
    assert batches == [[1, 2], [3]]


def test_concurrency_runs_batches_side_by_side() -> None:
    @inferry.batched(max_batch=2, concurrency=3)
    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(1)
        return items

    async def main() -> float:
        started_at = asyncio.get_running_loop().time()
        await asyncio.gather(*(slow(item) for item in range(6)))
        return asyncio.get_running_loop().time() - started_at

    assert run_virtual(main()) == pytest.approx(1)


def test_an_error_belongs_to_its_item() -> None:
    @inferry.batched
    async def odd(items: list[int]) -> list[int | Exception]:
        if 2 in items:
            raise KeyError(2)
        return [item if item % 2 else ValueError(item) for item in items]

    async def main() -> list[Any]:
        return await asyncio.gather(*(odd(item) for item in range(4)), return_exceptions=True)

    assert [repr(one) for one in run_virtual(main())] == ["ValueError(0)", "1", "KeyError(2)", "3"]


def test_a_cancelled_caller_removes_its_item_and_no_other() -> None:
    batches: list[list[int]] = []

    @inferry.batched(window="fixed", window_ms=10)
    async def same(items: list[int]) -> list[int]:
        batches.append(items)
        await asyncio.sleep(1)
        return items

    async def main() -> int:
        calls = [asyncio.create_task(same(item)) for item in range(3)]
        await asyncio.sleep(0.005)
        calls[1].cancel()
        await asyncio.sleep(0.5)
        calls[0].cancel()  # it has started: its batch goes on without it
        return await calls[2]

    assert run_virtual(main()) == 2
    assert batches == [[0, 2]]


def test_a_function_that_is_cancelled_cancels_its_callers() -> None:
    @inferry.batched
    async def cancelled(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    async def main() -> list[Any]:
        return await asyncio.gather(*(cancelled(item) for item in (1, 2)), return_exceptions=True)

    assert [type(one) for one in run_virtual(main())] == [asyncio.CancelledError] * 2


def test_the_queue_has_a_limit() -> None:
    @inferry.batched(max_batch=1, max_queue=2)
    async def same(items: list[int]) -> list[int]:
        await asyncio.sleep(1)
        return items

    async def main() -> list[Any]:
        running = asyncio.create_task(same(0))
        await asyncio.sleep(0.5)
        waiting = [asyncio.create_task(same(item)) for item in (1, 2, 3)]
        ended = [await running, *await asyncio.gather(*waiting, return_exceptions=True)]
        return [*ended, await same(4)]

    results = run_virtual(main())
    assert isinstance(results.pop(3), inferry.QueueFull)
    assert results == [0, 1, 2, 4]


def test_close_serves_what_waits_and_refuses_what_comes_later() -> None:
    @inferry.batched(max_batch=2, window="fixed", window_ms=60_000)
    async def same(items: list[int]) -> list[int]:
        await asyncio.sleep(1)
        return items

    async def main() -> list[Any]:
        calls = [asyncio.create_task(same(item)) for item in range(3)]
        await asyncio.sleep(0)
        await same.aclose()
        assert all(call.done() for call in calls)
        with pytest.raises(RuntimeError, match=r"same is closed"):
            await same(4)
        return [call.result() for call in calls]

    assert run_virtual(main()) == [0, 1, 2]


def test_every_event_loop_has_its_own_batches_and_leaves_nothing_behind() -> None:
    loops: list[Any] = []

    @inferry.batched
    async def where(items: list[int]) -> list[int]:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        return items

    asyncio.run(where(1))
    asyncio.run(where(2))
    gc.collect()
    assert [loop() for loop in loops] == [None, None]


def test_threads_call_an_asynchronous_function_on_its_own_loop() -> None:
    threads: set[int] = set()

    @inferry.batched(max_batch=4)
    async def tenfold(items: list[int]) -> list[int]:
        threads.add(threading.get_ident())
        return [10 * item for item in items]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tenfold.call, range(50))) == [10 * item for item in range(50)]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert tenfold.submit(5, lane="P0").result(LIMIT_S) == 50
    tenfold.close()
    with pytest.raises(RuntimeError, match="is closed"):
        tenfold.call(1)
    wait_until(lambda: not any(thread.ident in threads for thread in threading.enumerate()))


def test_a_refusal_reaches_a_caller_on_a_thread() -> None:
    may_run, started = threading.Event(), threading.Event()

    @inferry.batched(max_batch=1, max_queue=1)
    async def same(items: list[int]) -> list[int]:
        started.set()
        await asyncio.to_thread(may_run.wait, LIMIT_S)
        return items

    futures = [same.submit(0)]
    assert started.wait(LIMIT_S)
    futures += [same.submit(item) for item in (1, 2)]
    assert isinstance(futures[2].exception(LIMIT_S), inferry.QueueFull)
    may_run.set()
    assert [future.result(LIMIT_S) for future in futures[:2]] == [0, 1]
    same.close()


# -- methods, options, imports ---------------------------------------------------------------------------------------


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.batches: list[list[int]] = []

    @inferry.batched
    async def scaled(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        return [self.factor * item for item in items]


def test_each_instance_has_its_own_batches() -> None:
    models = [Model(2), Model(3)]

    async def main() -> list[int]:
        return await asyncio.gather(*(model.scaled(item) for item in (1, 2) for model in models))

    assert asyncio.run(main()) == [2, 3, 4, 6]
    assert [model.batches for model in models] == [[[1, 2]], [[1, 2]]]
    gone = [weakref.ref(model) for model in models]
    models.clear()
    gc.collect()
    assert [model() for model in gone] == [None, None]


class Doubling:
    @inferry.batched
    def doubled(self, items: list[int]) -> list[int]:
        """Twice each item."""
        return [2 * item for item in items]


@pytest.mark.parametrize(("owner", "method"), [(Model, "scaled"), (Doubling, "doubled")])
def test_a_method_can_be_inspected_on_its_class(owner: type, method: str) -> None:
    members = dict(inspect.getmembers(owner))
    assert members[method] is vars(owner)[method]
    assert members[method].__name__ == method


def test_batches_of_an_instance_with_slots_need_a_dict() -> None:
    class Slotted(Doubling):
        __slots__ = ()  # its base has a `__dict__`

    class Bare:
        __slots__ = ("factor",)
        scaled = Model.scaled

    class WithDict:
        __slots__ = ("__dict__",)

        @inferry.batched
        def tripled(self, items: list[int]) -> list[int]:
            return [3 * item for item in items]

    assert (Slotted().doubled(2), WithDict().tripled(2)) == (4, 6)
    with pytest.raises(TypeError, match=r"Model\.scaled is batched per instance: add '__dict__' to the __slots__"):
        Bare().scaled  # type: ignore[call-overload] # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_queue": 0}, "max_queue"),
        ({"window_ms": -1}, "window_ms"),
        ({"window": "wide"}, "window must be"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"lane": "P9"}, "lane must be P0, P1 or P2, not 'P9'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inferry.batched(**options)


def test_a_wrong_lane_of_a_call_and_a_wrong_function_are_named() -> None:
    wrong: Any = inferry.batched
    same = wrong(lambda items: items)
    with pytest.raises(ValueError, match="not 'P9'"):
        same(1, lane="P9")
    with pytest.raises(TypeError, match="requires 3 positional arguments"):
        wrong(lambda a, b, c: [])
    with pytest.raises(AttributeError, match="has no attribute 'unbatched'"):
        inferry.unbatched  # type: ignore[attr-defined]  # noqa: B018


def test_importing_inferry_imports_nothing_else_of_it() -> None:
    script = "import inferry, sys; print(sorted(name for name in sys.modules if name.startswith('inferry')))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['inferry', 'inferry._version']"


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "batched-functions.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    printed = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True).stdout
    assert printed.split("\n") == ["8", "[4, 7, 9]", ""]


def wait_until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("the condition never held")
