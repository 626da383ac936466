"""What an engine's counters and load say about the time between two readings: its steps, and work of other clients."""

from collections import deque
from typing import Final

from inferry.domain.work_costs import WorkCosts
from inferry.domain.workers import EngineCounts, Load

COUNTS_VALID_S = 3.0
"""Seconds after which engine counters are stale, and costs are learned from the observed output."""
LEARN_INTERVAL_S: Final = 0.5
"""Interval of learning without counters: as often as with them."""
FOREIGN_READINGS: Final = 4
"""Readings in a row with more sequences than the gateway's that show other clients: own jobs that begin or end around
one reading do not show in the next."""

FOREIGN_GAIN: Final = 0.5
"""How fast the part of other clients follows the readings."""


class ObservedWork:
    """Work of the gateway's own jobs: tokens that were computed, and the engine's time."""

    __slots__ = ("busy_s", "elapsed_s", "kv_tokens", "prompt_tokens", "steps", "tokens")

    def __init__(self) -> None:
        self.elapsed_s = self.busy_s = 0.0
        self.steps = self.tokens = self.prompt_tokens = self.kv_tokens = 0.0

    def add(self, other: "ObservedWork") -> None:
        self.elapsed_s += other.elapsed_s
        self.busy_s += other.busy_s
        self.steps += other.steps
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.kv_tokens += other.kv_tokens


class EngineReadings:
    """Teaches the costs from each reading. `foreign_share` is the part of the engine's work that is of other
    clients.
    """

    def __init__(self, costs: WorkCosts) -> None:
        self._costs = costs
        self._counts: EngineCounts | None = None
        self._counted_at: float | None = None
        self._own = ObservedWork()
        self._excess: deque[int] = deque(maxlen=FOREIGN_READINGS)
        # Tokens in the engine's counters that are not the gateway's. Negative: its tokens were counted before.
        self._foreign_tokens = self._foreign_prompt_tokens = 0.0
        self.foreign_share = 0.0

    @property
    def foreign_sequences(self) -> int:
        return max(0, min(self._excess)) if len(self._excess) == FOREIGN_READINGS else 0

    def add(self, own: ObservedWork, now: float) -> None:
        """Own work since it was last reported."""
        self._own.add(own)
        is_stale = self._counted_at is None or now - self._counted_at > COUNTS_VALID_S
        if is_stale and self._own.elapsed_s >= LEARN_INTERVAL_S:
            done = self._own
            self._own = ObservedWork()
            self._learn(done, done.steps, done.tokens, done.prompt_tokens)

    def read(self, counts: EngineCounts | None, counted_at: float | None, load: Load, own_jobs: int) -> None:
        """The latest reading, once or several times."""
        if counted_at is None or counted_at == self._counted_at:
            return
        last, since_s = self._counts, counted_at - (self._counted_at or counted_at)
        self._excess.append(load.running + load.waiting - own_jobs)
        self._counts, self._counted_at = counts, None if counts is None else counted_at
        if counts is None:
            # The engine reports its load only.
            foreign = self.foreign_sequences
            self.foreign_share = foreign / (foreign + own_jobs) if foreign else 0.0
            return
        done, self._own = self._own, ObservedWork()
        if last is None or counts.steps < last.steps or not 0 < since_s <= COUNTS_VALID_S:
            return  # the first reading, or the engine has restarted
        tokens = max(0, counts.output_tokens - last.output_tokens)
        prompt_tokens = max(0, counts.prompt_tokens - last.prompt_tokens)
        steps = counts.steps - last.steps
        if self.foreign_sequences:
            done.busy_s = done.elapsed_s
            done.kv_tokens = max(done.kv_tokens, float(load.kv_tokens * steps))
        self._learn(done, steps, tokens, prompt_tokens)
        self._compare(done, steps, tokens, prompt_tokens)

    def _learn(self, done: ObservedWork, steps: float, tokens: float, prompt_tokens: float) -> None:
        self._costs.add(done.elapsed_s, done.busy_s, steps, tokens, prompt_tokens, done.kv_tokens)
        self._costs.solve()

    def _compare(self, done: ObservedWork, steps: float, tokens: float, prompt_tokens: float) -> None:
        """How much of the counted work is of other clients."""
        if not self.foreign_sequences:
            self._foreign_tokens = self._foreign_prompt_tokens = self.foreign_share = 0.0
            return
        self._foreign_tokens += tokens - done.tokens
        self._foreign_prompt_tokens += prompt_tokens - done.prompt_tokens
        costs, per_step = self._costs, max(1.0, tokens / steps if steps else 1.0)
        token_s, prompt_s = costs.token_s + costs.base_s / per_step, costs.prompt_s
        foreign_s = token_s * max(0.0, self._foreign_tokens) + prompt_s * max(0.0, self._foreign_prompt_tokens)
        own_s = token_s * done.tokens + prompt_s * done.prompt_tokens
        self._foreign_tokens = min(0.0, self._foreign_tokens)
        self._foreign_prompt_tokens = min(0.0, self._foreign_prompt_tokens)
        share = foreign_s / (foreign_s + own_s) if foreign_s else 0.0
        self.foreign_share += FOREIGN_GAIN * (share - self.foreign_share)
