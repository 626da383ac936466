"""How fast work is admitted, measured in three currencies at once: jobs, prompt tokens and output tokens.

Which of them binds depends on the engine and the hour: sequences, KV or prefill. Nobody is asked; whoever predicts
waits compares what each currency would have said.
"""

from math import exp

from msgspec import Struct

BUSY_MEMORY_S = 10.0
"""Busy seconds after which a measurement of capacity counts for a third."""
LOAD_MEMORY_S = 10.0
"""Seconds after which what a lane was given counts for a third."""


class Work(Struct, frozen=True, gc=False):
    """An amount of work in every currency."""

    jobs: float = 0.0
    prefill_tokens: float = 0.0
    output_tokens: float = 0.0

    def plus(self, other: "Work") -> "Work":
        return Work(
            self.jobs + other.jobs,
            self.prefill_tokens + other.prefill_tokens,
            self.output_tokens + other.output_tokens,
        )


NOTHING = Work()


class Capacity:
    """Work admitted per second while somebody waited, with the spread of the steps it came in.

    When nobody waits, what is admitted says how much arrives and nothing about how much could. A job that waited
    proves that the time since the last admission, as far as it waited through it, was busy.
    """

    __slots__ = ("_busy_s", "_jobs", "_last", "_output", "_prefill", "_squares", "_steps")

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._jobs = self._prefill = self._output = 0.0
        self._steps = self._squares = 0.0
        self._last: float | None = None

    def admitted(self, work: Work, waited_s: float, now: float) -> None:
        last, self._last = self._last, now
        if last is None or waited_s <= 0:
            return
        busy = min(max(0.0, now - last), waited_s)
        if busy > 0:
            keep = exp(-busy / BUSY_MEMORY_S)
            self._busy_s = self._busy_s * keep + busy
            self._jobs *= keep
            self._prefill *= keep
            self._output *= keep
            self._steps *= keep
            self._squares *= keep
        self._jobs += work.jobs
        self._prefill += work.prefill_tokens
        self._output += work.output_tokens
        self._steps += 1
        self._squares += busy * busy

    @property
    def is_known(self) -> bool:
        return self._busy_s > 0

    def seconds_for(self, work: Work) -> tuple[float, float, float]:
        """How long that much takes to be admitted, by each currency: jobs, prompt tokens, output tokens."""
        busy = self._busy_s
        return (
            work.jobs * busy / self._jobs if self._jobs else 0.0,
            work.prefill_tokens * busy / self._prefill if self._prefill else 0.0,
            work.output_tokens * busy / self._output if self._output else 0.0,
        )

    @property
    def jobs_per_s(self) -> float:
        return self._jobs / self._busy_s if self._busy_s else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prefill / self._busy_s if self._busy_s else 0.0

    @property
    def step_cv(self) -> float:
        """Coefficient of variation of the time between admissions; 1 for a Poisson stream, and before it is known."""
        if self._steps < 8 or not self._busy_s:
            return 1.0
        mean = self._busy_s / self._steps
        variance = max(0.0, self._squares / self._steps - mean * mean)
        return float(variance**0.5) / mean


class Load:
    """What a lane was given lately, in jobs per second: how much of the capacity it takes from the lanes below it."""

    __slots__ = ("_amount", "_since")

    def __init__(self) -> None:
        self._amount = 0.0
        self._since: float | None = None

    def add(self, jobs: float, now: float) -> None:
        if self._since is None:
            self._since = now
        self._amount = self._amount * exp(-max(0.0, now - self._since) / LOAD_MEMORY_S) + jobs
        self._since = max(now, self._since)

    def per_s(self, now: float) -> float:
        if self._since is None:
            return 0.0
        return self._amount * exp(-max(0.0, now - self._since) / LOAD_MEMORY_S) / LOAD_MEMORY_S
