"""The items that wait for a batch, by lane. Pure: time is an argument.

A batch takes the items of higher lanes first. While a higher lane alone fills every batch, lower lanes keep the share
of the items that `DEFAULT_LANES` guarantees them, so none of them starves.
"""

import asyncio
import concurrent.futures
from collections import deque
from typing import Any, Final, Literal

from inferry.domain.errors import QueueFull
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.scheduling.batching.pass_hold import MIN_EXPECTED_FOLLOWERS, PASS_FRACTION
from inferry.scheduling.batching.pass_window import EWMA_ALPHA, FollowerStats

Window = Literal["adaptive", "fixed", "off"]
AnyFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]

_SHARES: Final = tuple(DEFAULT_LANES[lane].share for lane in Lane)


class Entry:
    """One item and the future of its result. The caller cancels the future to remove an item that has not started."""

    __slots__ = ("item", "result")

    def __init__(self, item: Any, result: AnyFuture) -> None:
        self.item = item
        self.result = result

    def start(self) -> bool:
        """The item joins a batch. False where its caller has cancelled it."""
        result = self.result
        return not result.cancelled() if isinstance(result, asyncio.Future) else result.set_running_or_notify_cancel()


class BatchQueue:
    """`max_batch` items form a batch; `max_queue` items may wait (None: no limit).

    `window` says how long a first item is held for others while the function is idle. `fixed` holds it for `window_s`.
    `adaptive` follows the scheduler's rule for passes (`scheduling.batching.pass_hold`): an item is held only where
    others were seen to follow soon, for a quarter of the function's duration and for `window_s` at most. `off` holds
    no item. Items that arrive while the function runs wait for its end in any case.
    """

    def __init__(self, *, max_batch: int, window: Window, window_s: float, max_queue: int | None) -> None:
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._window = window
        self._window_s = window_s
        self._waiting: tuple[deque[Entry], ...] = tuple(deque() for _ in Lane)
        self._credits = [0.0 for _ in Lane]
        self._held_until = 0.0
        self._followers = FollowerStats()
        self._pass_s: float | None = None
        self.size = 0

    @property
    def is_full_batch(self) -> bool:
        return self.size >= self._max_batch

    def offer(self, entry: Entry, lane: Lane, now: float, is_idle: bool) -> None:
        """Queue an item. `is_idle`: a batch could start now. Raises `QueueFull`."""
        if self._max_queue is not None and self.size >= self._max_queue:
            self._drop_cancelled()
            if self.size >= self._max_queue:
                raise QueueFull(f"{self.size} items wait, which is the limit (max_queue)")
        hold_until = self._hold_until(now, is_idle)
        if not self.size:
            self._held_until = hold_until
        self._waiting[lane].append(entry)
        self.size += 1

    def _hold_until(self, now: float, is_idle: bool) -> float:
        if self._window == "off":
            return now
        if self._window == "fixed":
            return now + self._window_s
        is_follower = self._followers.arrived(now)
        if not is_idle:
            return now
        if not is_follower:
            pass_s = self._pass_s
            window_s = self._window_s if pass_s is None else min(self._window_s, PASS_FRACTION * pass_s)
            self._followers.open_window(now + window_s)
        ends_at = self._followers.window_ends_at
        return now if ends_at is None or self._followers.expected_followers < MIN_EXPECTED_FOLLOWERS else ends_at

    def release_at(self) -> float | None:
        """When the next batch is due; None while no item waits."""
        if not self.size:
            return None
        return self._held_until if self.size < self._max_batch else 0.0

    def take(self) -> list[Entry]:
        """Remove the items of the next batch, higher lanes first. Items of cancelled callers are dropped."""
        guaranteed: list[Entry] = []
        ahead = len(self._waiting[0])
        for lane in range(1, len(self._waiting)):
            waiting = len(self._waiting[lane])
            if waiting and ahead >= self._max_batch:
                self._credits[lane] += _SHARES[lane] * self._max_batch
                places = int(self._credits[lane])
                self._credits[lane] -= places
                self._move(lane, guaranteed, len(guaranteed) + places)
            else:
                self._credits[lane] = 0.0
            ahead += waiting
        batch: list[Entry] = []
        for lane in range(len(self._waiting)):
            self._move(lane, batch, self._max_batch - len(guaranteed))
        return batch + guaranteed

    def record_pass(self, seconds: float) -> None:
        """The function took this long for a batch. Windows adapt to it."""
        self._pass_s = seconds if self._pass_s is None else self._pass_s + EWMA_ALPHA * (seconds - self._pass_s)

    def _move(self, lane: int, batch: list[Entry], most: int) -> None:
        waiting = self._waiting[lane]
        while waiting and len(batch) < most:
            entry = waiting.popleft()
            self.size -= 1
            if entry.start():
                batch.append(entry)

    def _drop_cancelled(self) -> None:
        for waiting in self._waiting:
            alive = [entry for entry in waiting if not entry.result.cancelled()]
            self.size -= len(waiting) - len(alive)
            waiting.clear()
            waiting.extend(alive)
