"""The work queue in memory, in the time of the event loop: the rules of `cluster.work_scripts` in Python."""

import asyncio
import itertools
from collections.abc import Sequence

from inferry.domain.work_queue import (
    MAX_DELIVERIES,
    NewWork,
    QueueEntry,
    QueueUnavailable,
    Renewal,
    Wanted,
    quoted,
)


class _Entry:
    def __init__(self, id: str) -> None:
        self.id = id
        self.holder: str | None = None
        self.deliveries = 0
        self.renewed_at = 0.0


class MemoryWorkQueue:
    """`is_up = False`: nothing answers. `lose()` forgets everything, as a Redis without persistence does."""

    def __init__(self) -> None:
        self.is_up = True
        self.failures = 0
        self._numbers: dict[str, itertools.count[int]] = {}
        self.lose()

    def lose(self) -> None:
        self.ids: set[str] = set()
        self.streams: dict[str, dict[str, _Entry]] = {}
        self._workers: dict[str, float] = {}

    async def add(self, work: Sequence[NewWork]) -> int:
        self._check()
        fresh = [one for one in dict.fromkeys(work) if one.id not in self.ids]
        for one in fresh:
            self._append(one.stream, one.id)
        return len(fresh)

    async def take(self, consumer: str, wanted: Wanted) -> list[QueueEntry]:
        self._check()
        found: list[QueueEntry] = []
        for lane, free in wanted.lanes:
            names = self._names(lane, wanted)
            while free > 0 and names:
                for name in list(names):
                    waiting = [(key, one) for key, one in self.streams[name].items() if one.holder is None]
                    if not waiting:
                        names.remove(name)
                    elif free > 0:
                        key, one = waiting[0]
                        self._hold(one, consumer)
                        found.append(QueueEntry(name, key, one.id))
                        free -= 1
                        self.streams[name] = self.streams.pop(name)  # the order of the dict is the order of turns
        return found

    async def wait(self, position: str, timeout_s: float) -> str:
        self._check()
        await asyncio.sleep(timeout_s)
        return position

    async def renew(self, consumer: str, entries: Sequence[QueueEntry], *, is_pull_worker: bool = False) -> Renewal:
        self._check()
        now, lost = asyncio.get_running_loop().time(), set()
        for entry in entries:
            one = self.streams.get(entry.stream, {}).get(entry.entry)
            if one is not None and one.holder == consumer:
                one.renewed_at = now
            elif one is not None:
                lost.add(entry.key)
        if is_pull_worker:
            self._workers[consumer] = now
        return Renewal(frozenset(lost), len(self.ids), sum(now - at <= 10 for at in self._workers.values()))

    async def claim(self, consumer: str, wanted: Wanted, idle_s: float, *, is_dead: bool = False) -> list[QueueEntry]:
        self._check()
        now, found = asyncio.get_running_loop().time(), []
        for lane, free in wanted.lanes:
            for name in self._names(lane, wanted):
                for key, one in self.streams[name].items():
                    is_idle = one.holder is not None and now - one.renewed_at >= idle_s
                    if free > 0 and is_idle and (one.deliveries >= MAX_DELIVERIES) == is_dead:
                        former = str(one.holder)
                        self._hold(one, consumer)
                        found.append(QueueEntry(name, key, one.id, one.deliveries, former))
                        free -= 1
        return found

    async def done(self, entries: Sequence[QueueEntry]) -> None:
        self._check()
        for entry in entries:
            self._remove(entry)

    async def put_back(self, consumer: str, entries: Sequence[QueueEntry]) -> None:
        self._check()
        for entry in entries:
            one = self.streams.get(entry.stream, {}).get(entry.entry)
            if one is not None and one.holder == consumer:
                self._remove(entry)
                self._append(entry.stream, entry.id)

    async def close(self) -> None:
        pass

    def _check(self) -> None:
        if not self.is_up:
            self.failures += 1
            raise QueueUnavailable("away")

    def _append(self, stream: str, id: str) -> None:
        self.ids.add(id)
        # Streams of Redis number their entries by the time: several have the same numbers.
        self.streams.setdefault(stream, {})[str(next(self._numbers.setdefault(stream, itertools.count())))] = _Entry(id)

    def _remove(self, entry: QueueEntry) -> None:
        self.ids.discard(entry.id)
        stream = self.streams.get(entry.stream, {})
        stream.pop(entry.entry, None)
        if not stream:
            self.streams.pop(entry.stream, None)

    def _hold(self, one: _Entry, consumer: str) -> None:
        one.holder, one.renewed_at = consumer, asyncio.get_running_loop().time()
        one.deliveries += 1

    def _names(self, lane: str, wanted: Wanted) -> list[str]:
        found = []
        for name in self.streams:
            its_lane, model, _ = name.split(":")
            is_wanted = wanted.models is None or model in map(quoted, wanted.models)
            if its_lane == lane and is_wanted and model not in map(quoted, wanted.skipped) and name not in wanted.busy:
                found.append(name)
        return found
