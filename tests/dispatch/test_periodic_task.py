"""A periodic task calls its function at intervals, survives exceptions and ends when it is closed."""

import asyncio

import pytest

from inferry.dispatch.periodic_task import PeriodicTask
from support.virtual_time import run_virtual


def test_an_exception_is_logged_and_the_next_call_follows(caplog: pytest.LogCaptureFixture) -> None:
    called_at: list[float] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def poll() -> None:
            called_at.append(round(loop.time() - start, 6))
            if len(called_at) == 1:
                raise RuntimeError("disk")

        task = PeriodicTask(poll, 2.0, "the file")
        task.start()
        await asyncio.sleep(5.0)
        await task.close()
        await asyncio.sleep(5.0)

    run_virtual(scenario())
    assert called_at == [2.0, 4.0]
    assert caplog.text.count("failed to poll the file") == 1


def test_a_task_that_was_never_started_can_be_closed() -> None:
    async def poll() -> None:
        raise AssertionError

    async def scenario() -> None:
        await PeriodicTask(poll, 1.0, "nothing").close()

    run_virtual(scenario())
