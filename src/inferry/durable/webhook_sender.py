"""Sends events to one receiver of the operator: signed, in order, retried with backoff, from a bounded queue.

Belongs to the event loop it is started on. Events are kept in memory only: those of a process that ends are lost.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from inferry.domain.clock import Clock
from inferry.durable.callback_client import CallbackFailed
from inferry.durable.callback_policy import CallbackPolicy, backoff_s
from inferry.durable.callback_signature import signature_headers
from inferry.durable.callbacks import Send

log = logging.getLogger(__name__)

MAX_QUEUED = 256


class _Event(NamedTuple):
    id: str
    body: bytes
    at: float


class WebhookSender:
    """`random` gives numbers from 0 to 1 for the jitter. `attempts` counts delivered, retried, failed and dropped."""

    def __init__(
        self,
        url: str,
        key: bytes,
        client: Send,
        policy: CallbackPolicy,
        clock: Clock,
        random: Callable[[], float],
    ) -> None:
        self._url = url
        self._key = key
        self._client = client
        self._policy = policy
        self._clock = clock
        self._random = random
        self._queue: deque[_Event] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.attempts: Counter[str] = Counter()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, id: str, body: bytes) -> None:
        """Queue an event. A full queue drops its oldest one."""
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self.attempts["dropped"] += 1
            log.warning("the webhook's queue is full: an event is dropped")
        self._queue.append(_Event(id, body, self._clock.now()))
        self._wake.set()

    async def _run(self) -> None:
        while True:
            while self._queue:
                await self._deliver(self._queue.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _deliver(self, event: _Event) -> None:
        """Attempt until the receiver answers with 2xx, or the time for retries has passed."""
        number = 0
        while True:
            number += 1
            if await self._post(event):
                self.attempts["delivered"] += 1
                return
            delay_s = backoff_s(number, self._policy, self._random())
            if self._clock.now() + delay_s > event.at + self._policy.retry_for_s:
                self.attempts["failed"] += 1
                log.warning("an event for the webhook is given up after %d attempts", number)
                return
            self.attempts["retried"] += 1
            await asyncio.sleep(delay_s)

    async def _post(self, event: _Event) -> bool:
        headers = signature_headers([self._key], event.id, int(self._clock.wall()), event.body)
        try:
            return 200 <= await self._client.post(self._url, headers, event.body) < 300
        except CallbackFailed:
            return False
