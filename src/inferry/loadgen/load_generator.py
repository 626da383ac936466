"""Plays runs against a server, open loop: a call is sent when it is due, independent of other calls. Or closed loop:
each client sends its next call when its last one has ended.

Everything belongs to one event loop. A run begins at its time; each step is due when the tool time before it has
passed, and all times of the call count from there. Requests are written before they are due. Only an explicit option
delays a call: a cap on calls in flight, or pods with one call in flight each. That delay counts as waiting time of the
client, not as lateness of the generator.
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Iterator, Sequence
from random import Random

from msgspec import Struct

from inferry.loadgen.requests import RequestMaker
from inferry.loadgen.stream import Counters, Exchange
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import length
from inferry.workers.http_client import Client, Connection, Request

LEAD_TIME_S = 0.25
"""Seconds before its start at which the first request of a run is written."""
INITIAL_BACKOFF_S, MAX_BACKOFF_S, BACKOFF_JITTER = 0.5, 8.0, 0.25
"""Delays of the official SDKs before a retry: doubling, minus up to a quarter at random."""
MAX_RETRY_AFTER_S = 60.0
FAILED_CALL_PAUSE_S = 0.5
"""Seconds that a client of a closed loop waits after a failed call."""


class ClientLimits(Struct, frozen=True, kw_only=True):
    """Limits of the client. None: no limit."""

    retries: int = 2
    concurrency_cap: int | None = None
    pods: int | None = None
    call_timeout_s: float = 300.0


class Call:
    """One call as its client saw it. Times are of `perf_counter`."""

    __slots__ = (
        "cached",
        "detail",
        "due",
        "ended",
        "index",
        "late_s",
        "outcome",
        "produced",
        "prompt",
        "refused",
        "reported_prompt_tokens",
        "requested_tokens",
        "resets",
        "run",
        "sent",
        "times",
    )

    def __init__(self, run: Run, index: int, due: float) -> None:
        self.run = run
        self.index = index
        self.prompt = length(run.steps[index].prompt)
        self.requested_tokens = run.steps[index].output
        self.due = due
        self.late_s = 0.0
        self.sent: float | None = None
        self.ended = due
        self.times = array("d")
        self.produced = 0
        self.cached: int | None = None
        self.reported_prompt_tokens: int | None = None
        self.outcome = "cancelled"
        self.detail = ""
        self.resets = self.refused = 0

    @property
    def step(self) -> Step:
        return self.run.steps[self.index]


class RunRecord(Struct, frozen=True):
    """A run that has ended: its begin and end, whether every step was done, and whether its agent cancelled it.

    `stopped`: it was in progress when the load test was stopped.
    """

    run: Run
    began: float
    ended: float
    ok: bool
    cancelled: bool
    stopped: bool


class LoadGenerator:
    """Plays once. `calls` and `run_records` grow meanwhile; `counters` has the progress."""

    def __init__(self, client: Client, requests: RequestMaker, limits: ClientLimits, seed: int = 7) -> None:
        self.calls: list[Call] = []
        self.run_records: list[RunRecord] = []
        self.counters = Counters()
        self.began = 0.0
        self._client = client
        self._requests = requests
        self._limits = limits
        self._rng = Random(seed)
        self._tasks: set[asyncio.Task[bool] | asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        cap = limits.concurrency_cap
        self._cap: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext() if cap is None else asyncio.Semaphore(cap)
        )
        self._pods = [asyncio.Semaphore(1) for _ in range(limits.pods or 0)]

    async def play(self, runs: Sequence[Run], lead_s: float = LEAD_TIME_S) -> None:
        """Play all runs, in order of their times, to their ends or until `stop` is called."""
        self.began = time.perf_counter() + lead_s
        async with asyncio.TaskGroup() as group:
            for number, run in enumerate(runs):
                if await self._wait_until(self.began + run.at - lead_s):
                    break
                task = group.create_task(self._play(number, run))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def play_closed(self, runs: Iterator[Run], clients: int) -> None:
        """Each of `clients` plays the next of `runs` when its last one has ended, until they end or until `stop`.

        Each run begins when it is taken: its `at` is the time since `began`.
        """
        self.began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                task = group.create_task(self._play_next(runs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _play_next(self, runs: Iterator[Run]) -> None:
        for run in runs:
            if self._stopping.is_set():
                break
            if not await self._play(0, run):
                # A server that refuses at once would otherwise be flooded.
                await asyncio.sleep(FAILED_CALL_PAUSE_S)

    def stop(self) -> None:
        """Send no more calls and drop those in progress."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()

    async def _wait_until(self, deadline: float) -> bool:
        """Wait until this time; whether the load test was stopped before."""
        delay = deadline - time.perf_counter()
        if delay > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
        return self._stopping.is_set()

    async def _play(self, number: int, run: Run) -> bool:
        pod = self._pods[number % len(self._pods)] if self._pods else None
        began = self.began + run.at
        ok = cancelled = False
        cancel_in_s = None if run.cancel_after_s is None else began + run.cancel_after_s - time.perf_counter()
        try:
            async with asyncio.timeout(cancel_in_s):
                ok = await self._steps(run, began, pod)
        except TimeoutError:
            cancelled = True
        finally:
            now = time.perf_counter()
            stopped = not ok and not cancelled and self._stopping.is_set()
            self.run_records.append(RunRecord(run, began, now, ok, cancelled, stopped))
        return ok

    async def _steps(self, run: Run, due: float, pod: asyncio.Semaphore | None) -> bool:
        for index, step in enumerate(run.steps):
            call = await self._call(Call(run, index, due), pod)
            if call.outcome != "done":
                return False
            due = call.ended + step.tool_s
        return True

    async def _call(self, call: Call, pod: asyncio.Semaphore | None) -> Call:
        request = self._requests.make(call.run, call.index)
        await asyncio.sleep(max(0.0, call.due - time.perf_counter()))
        now = time.perf_counter()
        # Timers have millisecond precision: if one fires early, the call is due now.
        call.due = min(call.due, now)
        call.late_s = now - call.due
        self.calls.append(call)
        counters = self.counters
        try:
            async with asyncio.timeout(self._limits.call_timeout_s), pod or contextlib.nullcontext(), self._cap:
                counters.sent += 1
                counters.in_flight += 1
                try:
                    await self._run_call(call, request)
                finally:
                    counters.in_flight -= 1
        except TimeoutError:
            call.outcome = "timeout"
        finally:
            call.ended = time.perf_counter()
            if call.outcome == "done":
                counters.done += 1
            elif call.outcome != "cancelled":
                counters.failed += 1
        return call

    async def _run_call(self, call: Call, request: Request) -> None:
        for attempt in range(self._limits.retries + 1):
            exchange = await self._exchange(call, request)
            call.times = exchange.times
            failure = exchange.failure
            call.refused += exchange.is_refusal
            call.resets += exchange.is_reset
            if failure is None or not (exchange.is_refusal or exchange.is_reset) or attempt == self._limits.retries:
                break
            await asyncio.sleep(self._backoff_s(attempt, exchange.retry_after_s))
        reader = exchange.reader
        call.cached, call.reported_prompt_tokens, call.detail = reader.cached, reader.prompt_tokens, exchange.detail
        call.produced = len(exchange.times) if reader.output_tokens is None else reader.output_tokens
        if failure is None and self._requests.form.end and reader.output_tokens is not None:
            failure = f"{reader.finish} too early" if call.produced < call.requested_tokens else None
        call.outcome = failure or "done"

    async def _exchange(self, call: Call, request: Request) -> Exchange:
        exchange = Exchange(self.counters)
        connection: Connection | None = None
        try:
            connection = self._client.free() or await self._client.connect()
            if call.sent is None:
                call.sent = time.perf_counter()
            exchange.send(connection, request)
            await exchange.finished
        except OSError as error:
            exchange.on_lost(error.strerror or type(error).__name__)
        except BaseException:
            # The client is gone: its connection is closed, which tells the server.
            if connection is not None:
                connection.close()
            call.times = exchange.times
            call.produced = len(exchange.times)
            raise
        return exchange

    def _backoff_s(self, attempt: int, retry_after_s: float | None) -> float:
        if retry_after_s is not None and 0 < retry_after_s <= MAX_RETRY_AFTER_S:
            return retry_after_s
        backoff = min(INITIAL_BACKOFF_S * 2.0**attempt, MAX_BACKOFF_S)
        return backoff * (1 - BACKOFF_JITTER * self._rng.random())
