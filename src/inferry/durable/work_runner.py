"""Runs work from the queue: at every gateway that shares Redis, and at pull-workers.

Belongs to the event loop it is started on. An entry is acknowledged after its result is stored. The queue may deliver
work twice, and a holder that was paused may go on with work that another one has: the database stores the first
result, and the ledger charges a try once.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from inferry.domain.clock import Clock
from inferry.domain.work_queue import QueueEntry, QueueUnavailable, Renewal, Wanted, WorkQueue
from inferry.durable.execute import CallAnswer, Execute
from inferry.durable.retries import call_once, is_refusal, retry_delay_s
from inferry.durable.stored_work import StoredWork

log = logging.getLogger(__name__)

RENEW_S = 1.0
IDLE_S = 6.0
"""Work whose holder has not renewed it for this long is claimed."""
RETRY_S = 0.5
WAIT_S = 1.0
CLAIMED_AT_ONCE = 64


class WorkRefused(Exception):
    """The work cannot be loaded or reported, and to repeat it does not help. The message quotes nothing of it."""


class WorkSource(Protocol):
    """Where work is kept. `finish` returns once the result is stored, or another one was. Its methods may raise."""

    async def load(self, ids: Sequence[str]) -> Mapping[str, StoredWork]:
        """The work that has not ended, by id."""

    async def ended(self, ids: Sequence[str]) -> Collection[str]:
        """Those of the ids whose work has ended."""

    async def begin_try(self, work: StoredWork, tries: int) -> None: ...

    async def finish(self, work: StoredWork, answer: CallAnswer) -> None: ...

    async def expire(self, work: StoredWork) -> None: ...


class _Held:
    """An entry that this consumer holds, and its task once its work is loaded.

    `is_finishing`: its end is being stored. The task is not cancelled then, because it reports the end.
    """

    def __init__(self, entry: QueueEntry) -> None:
        self.entry = entry
        self.task: asyncio.Task[None] | None = None
        self.is_finishing = False


class RenewalStreak:
    """Whether renewals have succeeded for long enough without a break. Until then silence of other holders means
    nothing: while the queue was away they could not renew either. Pure.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._since: float | None = None
        self._last = 0.0

    def succeeded(self, now: float) -> None:
        # A gap without a failure: this process itself was paused.
        if self._since is None or now - self._last > self._length_s / 2:
            self._since = now
        self._last = now

    def failed(self) -> None:
        self._since = None

    def is_complete(self, now: float) -> bool:
        return (
            self._since is not None and now - self._since >= self._length_s and now - self._last <= self._length_s / 2
        )


class WorkRunner:
    """`lanes` bounds the work in flight of each lane. `models`: what a pull-worker serves; None: all but `skipped`.
    `give_up` ends work that was delivered too often; None: other consumers do. It may raise.
    """

    def __init__(
        self,
        queue: WorkQueue,
        source: WorkSource,
        execute: Execute,
        clock: Clock,
        *,
        consumer: str,
        lanes: Mapping[str, int],
        models: Sequence[str] | None = None,
        skipped: Callable[[], Sequence[str]] = tuple,
        give_up: Callable[[QueueEntry], Awaitable[None]] | None = None,
        idle_s: float = IDLE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._queue = queue
        self._source = source
        self._execute = execute
        self._clock = clock
        self._consumer = consumer
        self._lanes = lanes
        self._models = models
        self._skipped = skipped
        self._give_up = give_up
        self._idle_s = idle_s
        self._renew_s = renew_s
        self._held: dict[tuple[str, str], _Held] = {}
        self._running: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._done: list[QueueEntry] = []
        self._acknowledging: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._position = "0-0"
        self._streak = RenewalStreak(idle_s)
        self.renewal = Renewal(frozenset(), 0, 0)
        self.deliveries: Counter[str] = Counter()
        """What became of deliveries: `taken`, `claimed`, `done`, `dead`, `lost`, `put_back`."""

    def start(self) -> None:
        # Each in a task of its own: what waits for the database or a gateway must not delay a renewal.
        steps = (self._take, self._listen, self._renew, self._stop_ended, self._claim)
        self._loops = [self._spawn(self._repeat(step)) for step in steps]

    @property
    def in_flight(self) -> int:
        return len(self._held)

    def stop_work(self, id: str) -> None:
        """The work has ended in the database: stop it if it runs here."""
        for held in list(self._held.values()):
            if held.entry.id == id and not held.is_finishing:
                self._drop(held)

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more, let what runs end for `drain_s`, and put the rest back for other consumers."""
        renewing = self._loops[2:4]
        await _cancel(*(loop for loop in self._loops if loop not in renewing))
        if drain_s and (tasks := [held.task for held in self._held.values() if held.task is not None]):
            await asyncio.wait(tasks, timeout=drain_s)
        await _cancel(*renewing)
        left = list(self._held.values())
        self._held.clear()
        await _cancel(*(held.task for held in left))
        if self._acknowledging is not None:
            await self._acknowledging
        if left:
            with suppress(QueueUnavailable):
                await self._queue.put_back(self._consumer, [held.entry for held in left])
                self.deliveries["put_back"] += len(left)
        self._loops = []

    # -- loops -------------------------------------------------------------------------------------------------------

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except QueueUnavailable:  # the queue logs and counts it
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                log.error("work of the queue is delayed: %s: %s", step.__name__.strip("_"), type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def _take(self) -> None:
        self._wake.clear()
        wanted = self._wanted()
        if any(count for _, count in wanted.lanes) and (found := await self._queue.take(self._consumer, wanted)):
            self.deliveries["taken"] += len(found)
            await self._begin(found)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._wake.wait()

    async def _listen(self) -> None:
        position, self._position = self._position, "0-0"  # after a failure its stream may begin again
        self._position = await self._queue.wait(position, WAIT_S)
        self._wake.set()

    async def _renew(self) -> None:
        """Renew what is held, and stop what another consumer holds."""
        await asyncio.sleep(self._renew_s)
        entries = [held.entry for held in self._held.values()]
        is_pull_worker = self._models is not None
        try:
            self.renewal = await self._queue.renew(self._consumer, entries, is_pull_worker=is_pull_worker)
        except BaseException:
            self._streak.failed()
            raise
        self._streak.succeeded(asyncio.get_running_loop().time())
        for key in self.renewal.lost:
            held = self._held.get(key)
            if held is not None and not held.is_finishing:
                del self._held[key]
                self.deliveries["lost"] += 1
                if held.task is not None:
                    held.task.cancel()

    async def _stop_ended(self) -> None:
        await asyncio.sleep(self._renew_s)
        ids = [held.entry.id for held in self._held.values()]
        for id in await self._source.ended(ids) if ids else ():
            self.stop_work(id)

    async def _claim(self) -> None:
        """Claim what is left behind."""
        await asyncio.sleep(self._renew_s)
        if not self._streak.is_complete(asyncio.get_running_loop().time()):
            return
        found = await self._queue.claim(self._consumer, self._wanted(), self._idle_s)
        if found:
            self.deliveries["claimed"] += len(found)
            log.warning("claimed %d entries of the work queue from silent holders", len(found))
            await self._begin(found)
        if self._give_up is not None:
            everything = Wanted(lanes=[(lane, CLAIMED_AT_ONCE) for lane in self._lanes])
            for entry in await self._queue.claim(self._consumer, everything, self._idle_s, is_dead=True):
                await self._give_up(entry)
                self.deliveries["dead"] += 1
                self._acknowledge(entry)

    def _wanted(self) -> Wanted:
        lanes = [(lane, max(0, most - self._running[lane])) for lane, most in self._lanes.items()]
        busy = [stream for stream, count in self._refused.items() if count]
        return Wanted(lanes=lanes, models=self._models, skipped=self._skipped(), busy=busy)

    # -- work --------------------------------------------------------------------------------------------------------

    async def _begin(self, entries: Sequence[QueueEntry]) -> None:
        begun = self._hold(entries)
        works = await self._load([held.entry.id for held in begun]) if begun else {}
        for held in begun:
            entry, work = held.entry, None if works is None else works.get(held.entry.id)
            is_held = self._held.get(entry.key) is held
            if is_held and work is not None:
                held.task = self._spawn(self._run(held, work))
                held.task.add_done_callback(partial(self._free, entry.lane))
                continue
            self._free(entry.lane)
            if is_held and works is None:
                del self._held[entry.key]  # renewed no longer: it is claimed, or becomes a dead letter
            elif is_held:
                self._drop(held)  # it has ended, or is no work of this consumer

    def _hold(self, entries: Sequence[QueueEntry]) -> list[_Held]:
        """Hold the entries; return those whose work is new here. Work that runs here goes on under its new entry: a
        queue that lost its data delivers it again, as does a claim after a pause of this process.
        """
        held_ids = {held.entry.id: held for held in self._held.values()}
        begun: list[_Held] = []
        for entry in entries:
            held = held_ids.get(entry.id)
            if held is None:
                held = held_ids[entry.id] = _Held(entry)
                begun.append(held)
                self._running[entry.lane] += 1
            else:
                del self._held[held.entry.key]
                held.entry = entry
            self._held[entry.key] = held
        return begun

    async def _load(self, ids: Sequence[str]) -> Mapping[str, StoredWork] | None:
        """The work; None where it cannot be loaded at all."""
        while True:
            try:
                return await self._source.load(ids)
            except WorkRefused as error:
                log.error("cannot load stored work: %s", error)
                return None
            except Exception as error:
                log.error("cannot load stored work (next try in %g s): %s", RETRY_S, type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def _run(self, held: _Held, work: StoredWork) -> None:
        try:
            await self._execute_work(held, work)
        except Exception as error:
            # The entry is renewed no longer: it is claimed, or becomes a dead letter.
            log.error("work %s is interrupted: %s", held.entry.id, type(error).__name__)
            self._held.pop(held.entry.key, None)
        else:
            held.task = None
            self._drop(held)

    def _free(self, lane: str, _: asyncio.Task[None] | None = None) -> None:
        self._running[lane] -= 1
        self._wake.set()

    async def _execute_work(self, held: _Held, work: StoredWork) -> None:
        failures, tries = 0, work.tries
        while (left_s := work.deadline - self._clock.wall()) > 0:
            answer = await call_once(self._execute, work.call(self._clock.wall()), tries)
            failures += not is_refusal(answer)
            delay_s = retry_delay_s(answer, failures)
            if delay_s is None:
                held.is_finishing = True
                await self._source.finish(work, answer)
                return
            if not work.is_charged:  # else every further try has the job id that was charged
                tries += 1
                await self._source.begin_try(work, tries)
            if is_refusal(answer):
                await self._wait_refused(held.entry, min(delay_s, left_s))
            else:
                await asyncio.sleep(delay_s)
        held.is_finishing = True
        await self._source.expire(work)

    async def _wait_refused(self, entry: QueueEntry, delay_s: float) -> None:
        """Wait with a refused item. Its place is free for other streams, and its own stream is not read meanwhile."""
        self._running[entry.lane] -= 1
        self._refused[entry.stream] += 1
        self._wake.set()
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._running[entry.lane] += 1
            self._refused[entry.stream] -= 1
            if not self._refused[entry.stream]:
                del self._refused[entry.stream]

    def _drop(self, held: _Held) -> None:
        """The work has ended."""
        if self._held.pop(held.entry.key, None) is not None:
            if held.task is not None:
                held.task.cancel()
            self.deliveries["done"] += 1
            self._acknowledge(held.entry)

    # -- acknowledgement ---------------------------------------------------------------------------------------------

    def _acknowledge(self, entry: QueueEntry) -> None:
        """Several at a time: what is added during a request goes into the next."""
        self._done.append(entry)
        if self._acknowledging is None:
            self._acknowledging = self._spawn(self._acknowledge_all())

    async def _acknowledge_all(self) -> None:
        try:
            while self._done:
                entries, self._done = self._done, []
                with suppress(QueueUnavailable):  # its entries are delivered again, and found ended
                    await self._queue.done(entries)
        finally:
            self._acknowledging = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
