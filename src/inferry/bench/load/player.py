"""Plays runs against a server, open loop: a call is sent at its time, whatever the others do.

Everything belongs to one event loop. A run begins at its time and its steps follow one another, each when the tool
before it is through; that moment is when the call was due, and all its times count from there. Requests are written
before they are due. What may hold a call back is only what was asked for: a cap on calls in flight, or pods that have
one call in flight each; such waiting counts as time the caller waited, not as lateness of the generator.
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Sequence
from random import Random

from msgspec import Struct

from inferry.adapters.workers.http1 import Client, Connection, Request
from inferry.bench.load.requests import RequestMaker
from inferry.bench.load.stream import Counters, Try
from inferry.sim.calls import Run, Step
from inferry.sim.prompts import length

LEAD_S = 0.25
"""How long before its time a run is taken up, to write its first request."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_SPREAD = 0.5, 8.0, 0.25
"""The official SDKs wait so long before they try again, doubling, less up to a quarter by chance."""
LONGEST_RETRY_AFTER_S = 60.0


class Limits(Struct, frozen=True, kw_only=True):
    """What holds calls back, and for how long they are waited for. None: nothing does."""

    retries: int = 2
    concurrency_cap: int | None = None
    pods: int | None = None
    patience_s: float = 300.0


class Call:
    """One call as its client saw it. Times are of `perf_counter`."""

    __slots__ = (
        "asked",
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
        "resets",
        "run",
        "sent",
        "times",
        "told_prompt",
    )

    def __init__(self, run: Run, index: int, due: float) -> None:
        self.run = run
        self.index = index
        self.prompt = length(run.steps[index].prompt)
        self.asked = run.steps[index].output
        self.due = due
        self.late_s = 0.0
        self.sent: float | None = None
        self.ended = due
        self.times = array("d")
        self.produced = 0
        self.cached: int | None = None
        self.told_prompt: int | None = None
        self.outcome = "cancelled"
        self.detail = ""
        self.resets = self.refused = 0

    @property
    def step(self) -> Step:
        return self.run.steps[self.index]


class Played(Struct, frozen=True):
    """A run that is over: when it began and ended, whether every step was done, whether its agent walked away.

    `stopped`: it was under way when the bench was told to end.
    """

    run: Run
    began: float
    ended: float
    ok: bool
    cancelled: bool
    stopped: bool


class Player:
    """Plays once. `calls` and `played` grow meanwhile; `counters` say where it is."""

    def __init__(self, client: Client, requests: RequestMaker, limits: Limits, seed: int = 7) -> None:
        self.calls: list[Call] = []
        self.played: list[Played] = []
        self.counters = Counters()
        self.began = 0.0
        self._client = client
        self._requests = requests
        self._limits = limits
        self._draw = Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        cap = limits.concurrency_cap
        self._cap: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext() if cap is None else asyncio.Semaphore(cap)
        )
        self._pods = [asyncio.Semaphore(1) for _ in range(limits.pods or 0)]

    async def play(self, runs: Sequence[Run], lead_s: float = LEAD_S) -> None:
        """All runs, which are in order of their times, to their ends; or to where `stop` was called."""
        self.began = time.perf_counter() + lead_s
        async with asyncio.TaskGroup() as group:
            for number, run in enumerate(runs):
                if await self._stopped_by(self.began + run.at - lead_s):
                    break
                task = group.create_task(self._play(number, run))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """No more calls; those under way are dropped."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()

    async def _stopped_by(self, moment: float) -> bool:
        """Waits until then; whether it is over before."""
        delay = moment - time.perf_counter()
        if delay > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
        return self._stopping.is_set()

    async def _play(self, number: int, run: Run) -> None:
        pod = self._pods[number % len(self._pods)] if self._pods else None
        began = self.began + run.at
        ok = cancelled = False
        walks_away = None if run.cancel_after_s is None else began + run.cancel_after_s - time.perf_counter()
        try:
            async with asyncio.timeout(walks_away):
                ok = await self._steps(run, began, pod)
        except TimeoutError:
            cancelled = True
        finally:
            now = time.perf_counter()
            stopped = not ok and not cancelled and self._stopping.is_set()
            self.played.append(Played(run, began, now, ok, cancelled, stopped))

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
        # Timers are good to a millisecond: one that was early makes its call due now, not its answer early.
        call.due = min(call.due, now)
        call.late_s = now - call.due
        self.calls.append(call)
        counters = self.counters
        try:
            async with asyncio.timeout(self._limits.patience_s), pod or contextlib.nullcontext(), self._cap:
                counters.sent += 1
                counters.in_flight += 1
                try:
                    await self._until_answered(call, request)
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

    async def _until_answered(self, call: Call, request: Request) -> None:
        for attempt in range(self._limits.retries + 1):
            answer = await self._try(call, request)
            call.times = answer.times
            failure = answer.failure
            call.refused += answer.is_refusal
            call.resets += answer.is_reset
            if failure is None or not (answer.is_refusal or answer.is_reset) or attempt == self._limits.retries:
                break
            await asyncio.sleep(self._pause_s(attempt, answer.retry_after_s))
        reader = answer.reader
        call.cached, call.told_prompt, call.detail = reader.cached, reader.prompt_tokens, answer.detail
        call.produced = len(answer.times) if reader.output_tokens is None else reader.output_tokens
        if failure is None and self._requests.form.end and reader.output_tokens is not None:
            failure = f"{reader.finish} too early" if call.produced < call.asked else None
        call.outcome = failure or "done"

    async def _try(self, call: Call, request: Request) -> Try:
        answer = Try(self.counters)
        connection: Connection | None = None
        try:
            connection = self._client.free() or await self._client.connect()
            if call.sent is None:
                call.sent = time.perf_counter()
            answer.send(connection, request)
            await answer.over
        except OSError as error:
            answer.on_lost(error.strerror or type(error).__name__)
        except BaseException:
            # The caller is gone: so is its connection, which is how a server hears of it.
            if connection is not None:
                connection.close()
            call.times = answer.times
            call.produced = len(answer.times)
            raise
        return answer

    def _pause_s(self, attempt: int, retry_after_s: float | None) -> float:
        if retry_after_s is not None and 0 < retry_after_s <= LONGEST_RETRY_AFTER_S:
            return retry_after_s
        pause = min(FIRST_PAUSE_S * 2.0**attempt, LONGEST_PAUSE_S)
        return pause * (1 - PAUSE_SPREAD * self._draw.random())
