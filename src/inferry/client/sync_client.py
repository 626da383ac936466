"""`Client` and `Run`: the same calls for programs without asyncio.

The work is done by an `AsyncClient` on an event loop in a thread of its own. Several threads may share a client, and an
interrupted call closes its connection.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from inferry.client.async_client import DEFAULT_URL, AsyncClient, AsyncRun
from inferry.client.calls import AsyncCalls, AsyncStream
from inferry.client.completions import Completion, Piece, Prompt, Result
from inferry.client.tools import Timer, ToolTimes

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, started with the first work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. An exception in the waiting thread, such as KeyboardInterrupt, cancels it."""
        loop = self._started()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda task: _copy_end(task, result))
            tasks.append(task)

        try:
            loop.call_soon_threadsafe(begin)
            return result.result()
        except BaseException:
            # An interrupt may come at any point. Callbacks run in order, so a `begin` that was scheduled runs first.
            if not result.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel() if tasks else work.close())
            raise

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="inferry-client", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels the tasks that are left
        runner.get_loop().run_forever()


def _copy_end(task: asyncio.Task[T], result: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        result.cancel()
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


class Calls:
    """Calls of a client or of a run. Parameters are those of `AsyncCalls`."""

    def __init__(self, thread: LoopThread, calls: AsyncCalls) -> None:
        self._thread = thread
        self._calls = calls

    @property
    def url(self) -> str:
        return self._calls.url

    @property
    def api_key(self) -> str | None:
        return self._calls.api_key

    @property
    def headers(self) -> dict[str, str]:
        return self._calls.headers

    def complete(self, prompt: Prompt, *, model: str, **options: Any) -> Completion:
        """One answer."""
        return self._thread.run(self._calls.complete(prompt, model=model, **options))

    def stream(self, prompt: Prompt, *, model: str, **options: Any) -> "Stream":
        """One answer, piece by piece. Use it with `with`: leaving the block ends the call."""
        return Stream(self._thread, self._calls.stream(prompt, model=model, **options))

    def concurrent_complete(self, prompts: Iterable[Prompt], *, model: str, **options: Any) -> list[Result]:
        """One call for each prompt, at most `concurrency` at once; results in order."""
        return self._thread.run(self._calls.concurrent_complete(prompts, model=model, **options))

    def batch_complete(self, prompts: Iterable[Prompt], *, model: str, **options: Any) -> list[Result]:
        """As `concurrent_complete`, in lane P2, with retries without limit."""
        return self._thread.run(self._calls.batch_complete(prompts, model=model, **options))


class Client(Calls):
    """A client of one gateway. `options` are those of `AsyncClient`. May be used from several threads."""

    def __init__(self, url: str = DEFAULT_URL, **options: Any) -> None:
        self._client = AsyncClient(url, **options)
        super().__init__(LoopThread(), self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, id: str | None = None, **options: Any) -> "Run":
        """A run; `options` are those of `AsyncRun`. Without an id it gets a random one."""
        return Run(self._thread, self._client.run(id, **options))

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer of any JSON endpoint of the gateway, such as `GET /v1/models`."""
        return self._thread.run(self._client.request(method, path, body))

    def close(self) -> None:
        self._thread.run(self._client.close())
        self._thread.close()


class Run(Calls):
    """A run and its scope; see `AsyncRun`. `cancel` may be called from another thread than the calls."""

    def __init__(self, thread: LoopThread, run: AsyncRun) -> None:
        super().__init__(thread, run)
        self._run = run

    @property
    def id(self) -> str:
        return self._run.id

    @property
    def tools(self) -> ToolTimes:
        return self._run.tools

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.run(self._run.__aexit__(kind, error, tb))

    def sub_run(self, id: str | None = None, **options: Any) -> "Run":
        """A run whose parent is this one. It is cancelled with it."""
        return Run(self._thread, self._run.sub_run(id, **options))

    def tool(self, name: str) -> Timer:
        """`with run.tool("search"):` adds the time of the block to `run.tools`."""
        return self._run.tool(name)

    def status(self) -> dict[str, Any]:
        """The run as the gateway sees it."""
        return self._thread.run(self._run.status())

    def cancel(self, wait_ms: int = 1000) -> dict[str, Any]:
        """Cancel the run with its sub-runs."""
        return self._thread.run(self._run.cancel(wait_ms))

    def finish(self) -> None:
        """End the tool time of the run, and tell the gateway about its tools."""
        self._thread.run(self._run.finish())


class Stream:
    """A streamed answer."""

    def __init__(self, thread: LoopThread, stream: AsyncStream) -> None:
        self._thread = thread
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self._thread.run(self._next())
        if piece is None:
            raise StopIteration
        return piece

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended."""
        return self._stream.completion

    def close(self) -> None:
        """Close the connection, unless the stream has ended."""
        self._thread.run(self._stream.close())

    async def _next(self) -> Piece | None:
        return await anext(self._stream, None)
