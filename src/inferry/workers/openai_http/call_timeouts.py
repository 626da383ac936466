"""Timeouts of calls: until the first token, and between tokens."""

import asyncio
from collections.abc import Mapping
from typing import Final

from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerTimeout
from inferry.workers.openai_http.calls import Call

MAX_SWEEP_INTERVAL_S: Final = 1.0


class CallTimeouts:
    """Fails calls of `calls` that were silent for too long.

    One timer serves all calls: rescheduling one per chunk would cost more than reading the chunk.
    """

    def __init__(
        self, worker: str, calls: Mapping[str, Call], clock: Clock, first_token_s: float, inter_token_s: float
    ) -> None:
        self._worker = worker
        self._calls = calls
        self._clock = clock
        self._first_token_s = first_token_s
        self._inter_token_s = min(inter_token_s, first_token_s)
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Start the timer. It runs while there are calls."""
        if self._timer is None:
            delay_s = min(MAX_SWEEP_INTERVAL_S, self._inter_token_s / 4)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        now = self._clock.now()
        for call in list(self._calls.values()):
            limit_s = self._inter_token_s if call.has_tokens else self._first_token_s
            if call.last_activity_at < now - limit_s:
                call.connection_lost(WorkerTimeout(f"worker {self._worker} sent no token for {limit_s:g} s"))
        if self._calls:
            self.arm()
