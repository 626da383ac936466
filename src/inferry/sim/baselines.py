"""Baselines without a gateway: direct, with a cap on batch calls, or paced by the client."""

from collections import deque
from heapq import heappop, heappush

from inferry.domain.lanes import Lane
from inferry.sim.calls import Call
from inferry.sim.simulation import Simulation


class Direct:
    """Direct (FCFS): every call is sent at once, to the live engines in turn. The calls of a lost engine fail."""

    def open(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._turns = 0

    def dispatch(self, call: Call, now: float) -> None:
        live = self._simulation.live
        self._simulation.send(call, live[self._turns % len(live)], now)
        self._turns += 1

    def first_token(self, call: Call, now: float) -> None:
        pass

    def ended(self, call: Call, now: float) -> None:
        pass

    def cancel(self, call: Call, now: float) -> None:
        self._simulation.abort(call, now)

    def engine_lost(self, worker: int, now: float) -> None:
        pass


class Capped(Direct):
    """Direct, with a limit on concurrent batch calls. A batch call's clock starts when the limit admits it."""

    def __init__(self, batch_calls: int) -> None:
        self._left = batch_calls
        self._queue: deque[Call] = deque()

    def dispatch(self, call: Call, now: float) -> None:
        if call.run.lane is not Lane.P2:
            super().dispatch(call, now)
        elif self._left:
            self._left -= 1
            super().dispatch(call, now)
        else:
            self._queue.append(call)

    def ended(self, call: Call, now: float) -> None:
        if call.run.lane is Lane.P2:
            self._left += 1
            if self._queue:
                self._left -= 1
                follower = self._queue.popleft()
                follower.at = now
                super().dispatch(follower, now)

    def cancel(self, call: Call, now: float) -> None:
        if call in self._queue:
            self._queue.remove(call)
        else:
            super().cancel(call, now)


class Paced:
    """Lanes in order within a bound on prompt tokens in prefill; batch calls use the capacity that live calls leave.

    Lengths are exact; the run's longest prompt so far is assumed to be cached. With `opens`, the limit on batch calls
    is eight times as high while no live call runs.
    """

    def __init__(self, prefill_tokens: int, calls: int, batch_calls: int, *, opens: bool = True) -> None:
        self._prefill_tokens = prefill_tokens
        self._calls = calls
        self._batch_calls = batch_calls
        self._opens = opens
        self._used = self._running = self._batch = 0
        self._heap: list[tuple[Lane, int, Call]] = []
        self._warm: dict[str, int] = {}

    def open(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def dispatch(self, call: Call, now: float) -> None:
        warm = self._warm.get(call.run.run_id, 400)
        call.cost = max(64, call.prompt - warm)
        self._warm[call.run.run_id] = max(warm, call.prompt)
        heappush(self._heap, (call.run.lane, call.arrival_number, call))
        self._pump(now)

    def first_token(self, call: Call, now: float) -> None:
        self._used -= call.cost
        call.cost = 0
        self._pump(now)

    def ended(self, call: Call, now: float) -> None:
        self._used -= call.cost
        call.cost = 0
        self._running -= 1
        self._batch -= call.run.lane is Lane.P2
        self._pump(now)

    def cancel(self, call: Call, now: float) -> None:
        if call.sent_at is not None:
            self._simulation.abort(call, now)
        else:
            self._pump(now)

    def engine_lost(self, worker: int, now: float) -> None:
        pass

    def _has_capacity(self, call: Call) -> bool:
        if self._running >= self._calls or (self._used and self._used + call.cost > self._prefill_tokens):
            return False
        if call.run.lane is not Lane.P2:
            return True
        alone = self._opens and self._running == self._batch
        return self._batch < self._batch_calls * (8 if alone else 1)

    def _pump(self, now: float) -> None:
        heap = self._heap
        while heap and (heap[0][2].cancelled or self._has_capacity(heap[0][2])):
            call = heappop(heap)[2]
            if not call.cancelled:
                self._used += call.cost
                self._running += 1
                self._batch += call.run.lane is Lane.P2
                self._simulation.send(call, 0, now)
