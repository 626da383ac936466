"""Which calls are overdue: their first token is late compared with their worker's own history, and the worker has shown
no activity since they were sent. Pure; time is an argument.

An overdue call may be retried on another worker (a hedged request). A token bucket over calls bounds how many are, so
that an overloaded fleet is not given more work for being slow. Subscribes to `sent`, `first_token` and `ended`.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from inferry.domain.attempts import Attempt

MIN_TTFT_S: Final = 0.75
"""No first token is overdue sooner: servers are asked every half second whether they are alive."""
TTFT_FACTOR: Final = 4.0
"""A first token is overdue after this many times the 99th percentile of the history."""
HISTORY_SIZE: Final = 128
"""First tokens that make up a history. Its slowest stands for the 99th percentile."""
MIN_HISTORY: Final = 8
BASE_TOKENS: Final = 256
"""What a call costs besides its prompt, in prompt tokens: first-token times are compared per token of both."""
MAX_HEDGE_TOKENS: Final = 10.0


class TtftHistory:
    """The latest first-token times of one worker, per prompt token."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=HISTORY_SIZE)

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        self._recent.append(seconds / (BASE_TOKENS + prompt_tokens))

    def limit_s(self, prompt_tokens: int) -> float | None:
        """When the first token of such a prompt is overdue; None while there is no history to say so."""
        if len(self._recent) < MIN_HISTORY:
            return None
        return max(MIN_TTFT_S, TTFT_FACTOR * max(self._recent) * (BASE_TOKENS + prompt_tokens))


class _WorkerHistory:
    """One worker: its history, and the attempts there that have no token yet, in the order they were sent."""

    __slots__ = ("history", "waiting")

    def __init__(self) -> None:
        self.history = TtftHistory()
        self.waiting: dict[Attempt, None] = {}


class HedgePolicy:
    """`fraction` is the part of all calls that may be retried for being overdue."""

    __slots__ = ("_fraction", "_tokens", "_workers")

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._tokens = 0.0
        self._workers: dict[str, _WorkerHistory] = {}

    def sent(self, attempt: Attempt, now: float) -> None:
        assert attempt.plan is not None, "a sent attempt has a plan"
        worker = attempt.plan.worker
        watched = self._workers.get(worker)
        if watched is None:
            watched = self._workers[worker] = _WorkerHistory()
        watched.waiting[attempt] = None
        if self._tokens < MAX_HEDGE_TOKENS:
            self._tokens += self._fraction

    def first_token(self, attempt: Attempt, now: float) -> None:
        watched = self._watched(attempt)
        if watched is not None and attempt.sent_at is not None:
            watched.waiting.pop(attempt, None)
            watched.history.learn(attempt.job.footprint.prefill_tokens, now - attempt.sent_at)

    def ended(self, attempt: Attempt, now: float) -> None:
        if attempt.first_token_at is None and (watched := self._watched(attempt)) is not None:
            watched.waiting.pop(attempt, None)

    def _watched(self, attempt: Attempt) -> _WorkerHistory | None:
        return None if attempt.plan is None else self._workers.get(attempt.plan.worker)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def due(self, last_activity_at: Callable[[str], float | None], now: float) -> list[Attempt]:
        """The overdue attempts. `last_activity_at` is a worker's last sign of life; None where it is not watched."""
        found: list[Attempt] = []
        for worker, watched in self._workers.items():
            first = next(iter(watched.waiting), None)
            if first is None or first.sent_at is None or now < first.sent_at + MIN_TTFT_S:
                continue
            heard = last_activity_at(worker)
            if heard is None or now < heard + MIN_TTFT_S:
                continue
            found += [one for one in watched.waiting if _is_overdue(one, watched.history, heard, now)]
        return found

    def take_token(self) -> bool:
        """Whether one more call may be retried for being overdue; if so it is counted."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def may_hedge(attempt: Attempt) -> bool:
    """Once, and only while its client has seen nothing."""
    job = attempt.job
    losses = job.attempt - 1 - job.preemptions - job.unreachable_attempts
    if job.prefill is not None and job.route.role != "prefill":
        losses -= 1  # the prefill before it
    return losses == 0 and job.resume_point is None and not attempt.output_tokens


def _is_overdue(attempt: Attempt, history: TtftHistory, last_activity_at: float, now: float) -> bool:
    sent_at = attempt.sent_at
    if sent_at is None or last_activity_at >= sent_at:
        return False
    limit_s = history.limit_s(attempt.job.footprint.prefill_tokens)
    return limit_s is not None and now >= sent_at + limit_s
