"""What the engine alone would do: a model of the same engine that gets every call at once and serves lanes in order.

The gateway holds jobs back, so it has to know how long they would wait without it. The model takes the same arrivals
and the measured step costs. Every step decodes one token of each sequence past its prompt and spends the rest of the
chunk on prompts: running ones first, then waiting ones, higher lanes first, as engines with priorities do. It learns
nothing from what the gateway does, and the same arrivals and costs give the same waits.

A job costs O(log n): its place among the decodes. A step without prompts is not taken one by one. A prompt token costs
more the longer its context is, so a job's tokens are weighted by their mean context, relative to recent jobs.
"""

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import Final

from inferry.scheduling.capacity.step_costs import StepCostModel

ATTENTION_TOKENS: Final = 25_000
"""Context at which a prompt token costs twice as much as the first one, as calibrated for an 8B model on an H200."""
WEIGHT_DECAY: Final = 0.98
"""What one job leaves of the mean weight of the jobs before it."""
RECENT_JOBS: Final = 200
"""Jobs of a lane whose waits are remembered."""
WAIT_QUANTILE: Final = 0.95
MAX_WAITING: Final = 10_000
"""Waiting jobs at which the model starts afresh: its costs must be wrong, since the queue of a lane is bounded."""


class _ModelJob:
    """A job in the model. `left` are the prompt tokens still to compute, each as long as `weight` average ones."""

    __slots__ = ("alone_s", "arrived_at", "kv_tokens", "lane", "left", "output_tokens", "weight")

    def __init__(
        self, lane: int, arrived_at: float, tokens: float, weight: float, output_tokens: int, kv_tokens: int
    ) -> None:
        self.lane = lane
        self.arrived_at = arrived_at
        self.left = tokens
        self.weight = weight
        self.output_tokens = output_tokens
        self.kv_tokens = kv_tokens
        self.alone_s = 0.0


class _RecentWaits:
    """The waits of the last `RECENT_JOBS` jobs of a lane."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, wait_s: float) -> None:
        self._recent.append(wait_s)
        insort(self._sorted, wait_s)
        if len(self._recent) > RECENT_JOBS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def quantile(self) -> float:
        return self._sorted[int(WAIT_QUANTILE * len(self._sorted))] if self._sorted else 0.0


class DirectEngine:
    """See the module. `sequences` and `kv_tokens` are what the engine can hold; None is no limit."""

    __slots__ = (
        "_backlog_tokens",
        "_chunk_tokens",
        "_chunks",
        "_costs",
        "_decoding",
        "_kv_limit",
        "_kv_used",
        "_prefilling",
        "_recent_waits",
        "_sequence_limit",
        "_step_ends_at",
        "_steps",
        "_token_sum",
        "_waiting",
        "_weight_sum",
    )

    def __init__(self, lanes: int, costs: StepCostModel) -> None:
        self._costs = costs
        self._chunk_tokens = inf
        self._sequence_limit = self._kv_limit = inf
        self._recent_waits = [_RecentWaits() for _ in range(lanes)]
        self._waiting: list[deque[_ModelJob]] = [deque() for _ in range(lanes)]
        self._backlog_tokens = [0.0] * lanes
        self._prefilling: deque[_ModelJob] = deque()
        self._chunks: list[float] = []
        # The step after which a sequence ends, and its KV.
        self._decoding: list[tuple[int, int]] = []
        self._kv_used = 0
        self._steps = 0
        self._step_ends_at = inf
        self._weight_sum = self._token_sum = 0.0

    def limit(self, sequences: int | None, kv_tokens: int | None, chunk_tokens: int | None) -> None:
        """What the engine can hold, and what it computes in one step."""
        self._sequence_limit = inf if sequences is None else sequences
        self._kv_limit = inf if kv_tokens is None else kv_tokens
        self._chunk_tokens = inf if chunk_tokens is None else chunk_tokens

    def arrived(self, lane: int, tokens: float, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A job arrived, with `tokens` of its prompt to compute."""
        self.advance(now)
        # Tokens of the engine may be more than those of the estimate; a weight is never below that of the first token.
        weight = 1.0 + (prompt_tokens - min(tokens, prompt_tokens) / 2) / ATTENTION_TOKENS
        self._weight_sum = self._weight_sum * WEIGHT_DECAY + weight * tokens
        self._token_sum = self._token_sum * WEIGHT_DECAY + tokens
        weight *= self._token_sum / self._weight_sum
        job = _ModelJob(lane, now, tokens, weight, output_tokens, prompt_tokens + output_tokens)
        job.alone_s = tokens * weight * self.token_s()
        queue = self._waiting[lane]
        if len(queue) >= MAX_WAITING:
            self.clear()
        queue.append(job)
        self._backlog_tokens[lane] += tokens
        if self._step_ends_at == inf and self._costs.known:
            self._begin_step(now)

    def clear(self) -> None:
        """The engine is idle."""
        for queue in self._waiting:
            queue.clear()
        self._backlog_tokens = [0.0] * len(self._waiting)
        self._prefilling.clear()
        self._chunks.clear()
        self._decoding.clear()
        self._kv_used = 0
        self._step_ends_at = inf

    def advance(self, now: float) -> None:
        """Take all steps that end by now."""
        if self._step_ends_at == inf and self._costs.known:
            self._begin_step(now)
        while self._step_ends_at <= now:
            at = self._step_ends_at
            if not self._chunks:
                at = self._skip_decode_steps(at, now)
            self._steps += 1
            for tokens in self._chunks:
                job = self._prefilling[0]
                job.left -= tokens
                if job.left <= 0:
                    self._prefilling.popleft()
                    self._recent_waits[job.lane].add(max(0.0, at - job.arrived_at - job.alone_s))
                    heappush(self._decoding, (self._steps + job.output_tokens, job.kv_tokens))
            while self._decoding and self._decoding[0][0] <= self._steps:
                self._kv_used -= heappop(self._decoding)[1]
            self._begin_step(at)

    def _skip_decode_steps(self, at: float, now: float) -> float:
        """Take the steps before the next end of a sequence at once, as far as they end by now; return the last end."""
        step_s = self._costs.step_s(len(self._decoding))
        steps = min(self._decoding[0][0] - self._steps - 1, int((now - at) / step_s))
        if steps <= 0 or sum(self._backlog_tokens) > 0:
            return at
        self._steps += steps
        return at + steps * step_s

    def _begin_step(self, at: float) -> None:
        budget = self._chunk_tokens - len(self._decoding)
        chunks = self._chunks = []
        step_s = self._costs.step_s(len(self._decoding))
        for job in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, job.left)
            chunks.append(tokens)
            budget -= tokens
            step_s += tokens * job.weight * self._costs.prompt_s
        for lane, queue in enumerate(self._waiting):
            while queue and budget > 0:
                job = queue[0]
                if not self._can_admit(job):
                    budget = 0.0
                    break
                queue.popleft()
                self._backlog_tokens[lane] = self._backlog_tokens[lane] - job.left if queue else 0.0
                self._kv_used += job.kv_tokens
                self._prefilling.append(job)
                tokens = min(budget, job.left)
                chunks.append(tokens)
                budget -= tokens
                step_s += tokens * job.weight * self._costs.prompt_s
        self._step_ends_at = at + step_s if chunks or self._decoding else inf

    def _can_admit(self, job: _ModelJob) -> bool:
        running = len(self._prefilling) + len(self._decoding)
        return not running or (running < self._sequence_limit and self._kv_used + job.kv_tokens <= self._kv_limit)

    def token_s(self) -> float:
        """Seconds per prompt token of full steps."""
        return self._costs.prompt_s + self._costs.step_s(len(self._decoding)) / self._chunk_tokens

    def wait_s(self, lane: int, now: float) -> float:
        """The 95th percentile of the waits of the lane's recent jobs, or the wait of those in the queue if longer."""
        wait_s = self._recent_waits[lane].quantile()
        queue = self._waiting[lane]
        if queue:
            ahead_s = sum(self._backlog_tokens[:lane]) * self.token_s()
            own_s = self._backlog_tokens[lane] * self.token_s()
            wait_s = max(wait_s, now - queue[0].arrived_at + ahead_s, now - queue[-1].arrived_at + ahead_s + own_s)
        return wait_s
