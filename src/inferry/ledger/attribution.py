"""GPU time of one worker, divided among its jobs from outside: from what the gateway sees and the engine's counters.

Pure: time is an argument. The owner reports when a job is sent, has its first token and ends, and calls `settle`
several times a second. A settlement divides the busy time since the last one among the jobs by their work in it, priced
with `domain.work_prices`. Rules:

- The engine is busy while it has a job. What the jobs are charged adds up to the busy time, less the part of other
  clients.
- Output tokens are work of the interval in which they arrive. When the tokens of a prompt are computed is not visible,
  so time that output does not explain is kept until first tokens arrive, up to the work of the prompts that are open.
- A job that ends between two settlements is charged for the rest by its modelled work. The next settlement has that
  much less to divide.
"""

from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Usage
from inferry.domain.work_costs import WorkCosts
from inferry.domain.work_prices import decode_s, prefill_kv_tokens, prefill_s
from inferry.domain.workers import EngineCounts, Load
from inferry.ledger.engine_readings import EngineReadings, ObservedWork

DEFAULT_CHUNK_TOKENS: Final = 2048
"""Prompt tokens in one step of an engine that does not report its limit."""
MAX_SETTLED_JOBS: Final = 8
MIN_INTERVAL_S: Final = 0.05
MIN_INTERVAL_TOKENS: Final = 10
"""A job's end settles if the worker has few jobs, the last settlement is this old, and the job has had this many tokens
since. A settlement visits all jobs of the worker. The tokens of one step arrive one after the other: a shorter interval
would lack the last tokens of other jobs. Among many jobs the modelled work of one is exact enough."""
SCALE_GAIN: Final = 0.3
MIN_SCALE, MAX_SCALE = 0.25, 4.0
"""How fast, and within which bounds, the charge per modelled second follows the observed time."""


class JobShare:
    """An attempt on the worker, and the engine's seconds that it was charged.

    `is_open`: it has no first token yet. `owes_prefill`: it has one, and its prompt is not charged. `counted_at` and
    `even_s` are the time of its last settlement, and the estimator's `_even_s` then.
    """

    __slots__ = (
        "attempt",
        "context_tokens",
        "counted_at",
        "counted_tokens",
        "even_s",
        "is_open",
        "owes_prefill",
        "prefill_seconds",
        "prompt_tokens",
        "seconds",
    )

    def __init__(self, attempt: Attempt) -> None:
        footprint = attempt.job.footprint
        self.attempt = attempt
        self.prompt_tokens = attempt.prefill_tokens
        self.context_tokens = footprint.prompt.expected
        self.is_open = True
        self.owes_prefill = False
        self.counted_tokens = 0
        self.counted_at = self.even_s = 0.0
        self.seconds = 0.0
        self.prefill_seconds = 0.0


class _Interval:
    """Since the last settlement: seconds in which the engine had jobs and in which streams decoded; what jobs that have
    ended were charged, and the work they did.
    """

    __slots__ = ("busy_s", "charged_s", "decode_tokens", "decoding_s", "done", "prefill_steps", "stream_s")

    def __init__(self) -> None:
        self.busy_s = self.decoding_s = self.stream_s = self.charged_s = self.prefill_steps = 0.0
        self.decode_tokens = 0
        self.done = ObservedWork()


class GpuTimeEstimator:
    """Divides the time of one engine. Seconds are those of the engine, whatever the number of its GPUs.

    `busy_s` and `unattributed_s` count up: time in which the engine had work, and the part of it that no job of the
    gateway is charged for.
    """

    def __init__(self, now: float, chunk_tokens: int | None = None) -> None:
        self.costs = WorkCosts()
        self.busy_s = self.unattributed_s = 0.0
        self._chunk_tokens = chunk_tokens or DEFAULT_CHUNK_TOKENS
        self._readings = EngineReadings(self.costs)
        self._shares: dict[Attempt, JobShare] = {}
        self._streams = 0
        self._advanced_at = self._settled_at = now
        # Decoding time divided by the number of streams: what a stream would get of it by head count.
        self._even_s = 0.0
        self._interval = _Interval()
        # Busy time that is not divided yet: work of open prompts.
        self._kept_s = 0.0
        # Charge per modelled second; None before the first settlement.
        self._scale: float | None = None
        # Of the fixed part of a step: what streams pay beside prompts, and seconds of a step of a prompt.
        self._streams_part = 1.0
        self._prefill_base_s = self.costs.base_s

    @property
    def jobs(self) -> int:
        return len(self._shares)

    def seconds_of(self, attempt: Attempt) -> float:
        """The engine's seconds that a running attempt was charged so far."""
        share = self._shares.get(attempt)
        return 0.0 if share is None else share.seconds

    # -- what it is told -----------------------------------------------------------------------------------------------

    def sent(self, attempt: Attempt, now: float) -> None:
        self._advance(now)
        self._shares[attempt] = JobShare(attempt)

    def first_token(self, attempt: Attempt, now: float) -> None:
        share = self._shares.get(attempt)
        if share is not None and share.is_open:
            self._advance(now)
            self._streams += 1
            share.is_open = False
            share.owes_prefill = True
            share.counted_tokens = 1
            share.counted_at, share.even_s = now, self._even_s

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> JobShare | None:
        """The job's final charge. `usage` corrects what was observed. None for a job that was not sent here."""
        share = self._shares.get(attempt)
        if share is None:
            return None
        self._advance(now)
        if share.is_open or self._settles_at_end(share, now):
            self._divide(now)
        if share.is_open:
            prefill_s = charge_s = self._open_part_s(share)
        else:
            scale = self._scale or 1.0
            prefill_s = scale * (self._prefill_due_s(share) + self._correct_prompt(share, usage))
            written = max(attempt.output_tokens, usage.output_tokens)
            charge_s = prefill_s + scale * self._decode_due_s(share, written)
            self._streams -= 1
        del self._shares[attempt]
        left_s = max(0.0, self._undivided_s())
        # No more than is left, and the last job is charged for all of it.
        charge_s = max(min(charge_s, left_s) if self._shares else left_s, -share.seconds)
        share.seconds += charge_s
        share.prefill_seconds = min(share.seconds, max(0.0, share.prefill_seconds + prefill_s))
        self._interval.charged_s += charge_s
        return share

    def settle(self, now: float, counts: EngineCounts | None, counted_at: float | None, load: Load) -> None:
        """Divide the time since the last settlement. `counts`, read at `counted_at`, and `load` are the latest."""
        self._advance(now)
        self._divide(now)
        self._readings.read(counts, counted_at, load, len(self._shares))

    # -- dividing ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        elapsed_s = now - self._advanced_at
        if elapsed_s <= 0:
            return
        self._advanced_at = now
        if self._shares:
            self._interval.busy_s += elapsed_s
            if self._streams:
                self._interval.decoding_s += elapsed_s
                self._interval.stream_s += elapsed_s * self._streams
                self._even_s += elapsed_s / self._streams

    def _divide(self, now: float) -> None:
        elapsed_s = now - self._settled_at
        if elapsed_s <= 0:
            return
        self._settled_at = now
        self._divide_base()
        dues: list[tuple[JobShare, float, float]] = []
        work_s = open_s = 0.0
        for share in self._shares.values():
            if share.is_open:
                open_s += self._prefill_s(share)
                continue
            prefill_s = self._prefill_due_s(share)
            due_s = prefill_s + self._decode_due_s(share, share.attempt.output_tokens)
            work_s += due_s
            dues.append((share, due_s, prefill_s))
        time_s = self._undivided_s()
        if work_s <= 0 or time_s <= 0:
            # Nothing to divide by: the time waits for the open prompts. Without jobs it has no owner.
            kept_s = time_s if self._shares else 0.0
        else:
            kept_s = min(max(0.0, time_s - work_s), open_s)
        self._end_interval(elapsed_s, now, self._kept_s - kept_s)
        self._kept_s = kept_s
        if work_s <= 0 or time_s <= 0:
            self.unattributed_s += time_s - kept_s
            return
        scale = (time_s - kept_s) / work_s
        bounded = min(MAX_SCALE, max(MIN_SCALE, scale))
        self._scale = bounded if self._scale is None else self._scale + SCALE_GAIN * (bounded - self._scale)
        for share, due_s, prefill_s in dues:
            share.seconds += scale * due_s
            share.prefill_seconds += scale * prefill_s

    def _settles_at_end(self, share: JobShare, now: float) -> bool:
        return (
            len(self._shares) <= MAX_SETTLED_JOBS
            and now - self._settled_at >= MIN_INTERVAL_S
            and share.attempt.output_tokens - share.counted_tokens >= MIN_INTERVAL_TOKENS
        )

    def _undivided_s(self) -> float:
        """What was kept and the busy time since, less what other clients used and ended jobs were charged."""
        busy_s = self._interval.busy_s * (1.0 - self._readings.foreign_share)
        return busy_s + self._kept_s - self._interval.charged_s

    def _divide_base(self) -> None:
        """Divide the fixed part of steps evenly among the streams and the prompts in them."""
        interval = self._interval
        tokens, prefill_steps = interval.decode_tokens, interval.prefill_steps
        for share in self._shares.values():
            if not share.is_open:
                tokens += max(0, share.attempt.output_tokens - share.counted_tokens)
                if share.owes_prefill:
                    prefill_steps += self._prefill_steps(share)
        if interval.busy_s <= 0:
            return
        decoding = interval.decoding_s / interval.busy_s
        # Every stream has one token in every step.
        steps = tokens * interval.decoding_s / interval.stream_s if interval.stream_s else 0.0
        interval.done.steps = steps + prefill_steps * (1.0 - decoding)
        base_s = self.costs.base_s
        shared_base_s = base_s
        if steps > 0:
            places = tokens + prefill_steps * decoding
            self._streams_part = tokens / places
            shared_base_s = base_s * min(1.0, steps / places)
        self._prefill_base_s = decoding * shared_base_s + (1.0 - decoding) * base_s

    def _end_interval(self, elapsed_s: float, now: float, moved_s: float) -> None:
        """`moved_s` of earlier intervals belong to the work that was observed in this one; negative: to later work."""
        interval, readings = self._interval, self._readings
        self._interval = _Interval()
        busy_s = interval.busy_s
        self.unattributed_s += busy_s * readings.foreign_share
        if readings.foreign_sequences:
            # The engine has work of other clients even where it has none of the gateway's.
            self.unattributed_s += elapsed_s - busy_s
            busy_s = elapsed_s
        self.busy_s += busy_s
        done = interval.done
        # A prompt is observed when it is complete, so the costs are learned with the time that was kept for it.
        done.elapsed_s, done.busy_s = elapsed_s, busy_s + moved_s
        readings.add(done, now)

    # -- work of a job -------------------------------------------------------------------------------------------------

    def _prefill_steps(self, share: JobShare) -> float:
        return 1.0 + share.prompt_tokens // self._chunk_tokens

    def _prefill_s(self, share: JobShare) -> float:
        tokens = share.prompt_tokens
        return prefill_s(self.costs, tokens, share.context_tokens) + self._prefill_base_s * self._prefill_steps(share)

    def _prefill_due_s(self, share: JobShare) -> float:
        """Work of the prompt, once after the first token."""
        if not share.owes_prefill:
            return 0.0
        share.owes_prefill = False
        interval, done = self._interval, self._interval.done
        interval.prefill_steps += self._prefill_steps(share)
        done.tokens += 1
        done.prompt_tokens += share.prompt_tokens
        done.kv_tokens += prefill_kv_tokens(share.prompt_tokens, share.context_tokens)
        return self._prefill_s(share)

    def _decode_due_s(self, share: JobShare, written: int) -> float:
        """Work of the output tokens since the last settlement."""
        tokens = written - share.counted_tokens
        if tokens <= 0:
            return 0.0
        context_tokens = share.context_tokens + written - tokens / 2
        elapsed_s = self._advanced_at - share.counted_at
        # Mean of one over the number of streams, over the job's own time.
        part = (self._even_s - share.even_s) / elapsed_s if elapsed_s > 0 else 1.0 / max(1, self._streams)
        share.counted_tokens = written
        share.counted_at, share.even_s = self._advanced_at, self._even_s
        self._interval.decode_tokens += tokens
        done = self._interval.done
        done.tokens += tokens
        done.kv_tokens += tokens * context_tokens
        return decode_s(self.costs, tokens, context_tokens) + tokens * self.costs.base_s * self._streams_part * part

    def _correct_prompt(self, share: JobShare, usage: Usage) -> float:
        """The difference that the reported usage makes to the work of the prompt."""
        if not usage.prompt_tokens:
            return 0.0
        before_s = self._prefill_s(share)
        cached = usage.cached_tokens or share.context_tokens - share.prompt_tokens
        share.context_tokens = usage.prompt_tokens
        share.prompt_tokens = max(1, usage.prompt_tokens - cached)
        return self._prefill_s(share) - before_s

    def _open_part_s(self, share: JobShare) -> float:
        """The part of a job without a first token in the time that is kept for open prompts."""
        open_s = sum([self._prefill_s(one) for one in self._shares.values() if one.is_open])
        return max(0.0, self._kept_s) * self._prefill_s(share) / open_s
