"""Runs a measurement of `inferry bench` on an event loop, with its progress bar and its signals."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from rich.progress import Progress, TaskID

from inferry.cli.bench_output import make_progress_bar
from inferry.cli.terminal import fail

if TYPE_CHECKING:
    from inferry.loadgen.load_test import StopHook

SERVER_UNREACHABLE, NO_CALL_COMPLETED, INTERRUPTED = 3, 4, 130
T = TypeVar("T")


def run_to_end(title: str, measure: "Callable[[Progress, TaskID, StopHook], Awaitable[T]]") -> T:
    """The result of the measurement. Ctrl-C stops it early; exits where no call was sent."""
    from inferry.ingress.http.lifecycle import raise_file_limit
    from inferry.loadgen.server import ProbeError

    raise_file_limit()
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not available on Windows
        import uvloop

        new_loop = uvloop.new_event_loop
    with make_progress_bar() as bar:
        task = bar.add_task(title, total=None, said="querying the server")
        bar.refresh()

        async def main() -> T:
            loop = asyncio.get_running_loop()

            def stop_by(stop: Callable[[], None]) -> None:
                for number in (signal.SIGINT, signal.SIGTERM):
                    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not the main thread
                        loop.add_signal_handler(number, stop)

            return await measure(bar, task, stop_by)

        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(main())
        except ProbeError as error:
            bar.stop()
            fail(str(error), SERVER_UNREACHABLE)
        except KeyboardInterrupt:
            bar.stop()
            fail("interrupted before the first call", INTERRUPTED)
