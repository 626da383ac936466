"""Whether a first job is held for siblings that are about to arrive, before workers that batch continuously.

A later sibling joins the running batch and is sent where its prefix is cached, so holding rarely pays. It pays where
the worker with the cached prefix carries its part of the load already: then the sibling goes to another worker and
computes the whole prefix again. Siblings that are ready at the same time go to one worker.

The rule: a first job is held for h seconds only where the siblings that arrive within h, times the seconds of prefill
each of them saves, exceed h times the number of jobs held. The inputs are learned from earlier jobs of the same
template, or of the same tenant where a job names no template: how many siblings arrived in that time, what they
recomputed with and without a hold, and how long a prompt token takes. No job is held where nothing was ever recomputed,
nor before an idle worker.
"""

from operator import eq
from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.scheduling.batching.prefix_key import PrefixKey, prefix_key

EWMA_ALPHA = 0.2
"""Weight of the latest prefix group."""
RECOMPUTE_ALPHA = 0.05
"""Weight of the latest sibling in what is recomputed. Small: siblings of one group mostly fare alike."""
MIN_SIBLINGS = 8
MIN_BENEFIT_RATIO = 2.0
"""How much more a hold must save than it costs: the savings are an estimate, the cost is certain."""
REPROBE_INTERVAL = 16
"""Every one of this many holds is skipped, to see whether siblings still recompute anything."""
MAX_STATS: Final = 1_024
SiblingStatsKey = tuple[str, str | None]


class RecomputedTokens:
    """Average prompt tokens that a sibling computes although they were computed before."""

    __slots__ = ("_siblings", "_tokens")

    def __init__(self) -> None:
        self._siblings = 0.0
        self._tokens = 0.0

    def count(self, tokens: int) -> None:
        self._siblings += 1 - RECOMPUTE_ALPHA * self._siblings
        self._tokens += tokens - RECOMPUTE_ALPHA * self._tokens

    def tokens(self) -> float | None:
        """None before enough siblings were seen."""
        return self._tokens / self._siblings if self._siblings >= MIN_SIBLINGS else None


class SiblingStats:
    """How prefix groups of one template arrive. `recomputed_unheld` is what siblings recomputed without a hold,
    `recomputed_held` with one: the difference is what holding saves.
    """

    __slots__ = (
        "_arrivals",
        "_delay_s",
        "_group_count",
        "_in_time",
        "holds",
        "prefill_s_per_token",
        "recomputed_held",
        "recomputed_unheld",
    )

    def __init__(self) -> None:
        self.recomputed_unheld = RecomputedTokens()
        self.recomputed_held = RecomputedTokens()
        self.holds = 0
        self.prefill_s_per_token = 0.0
        self._group_count = 1.0  # starts with one group without siblings
        self._arrivals = 0.0
        self._delay_s = 0.0
        self._in_time = 0.0

    def group_started(self) -> None:
        self._group_count += 1 - EWMA_ALPHA * self._group_count
        self._arrivals -= EWMA_ALPHA * self._arrivals
        self._delay_s -= EWMA_ALPHA * self._delay_s
        self._in_time -= EWMA_ALPHA * self._in_time

    def arrived(self, delay: float, in_time: bool) -> None:
        """A sibling arrived `delay` seconds after the first; `in_time` says whether a hold would have reached it."""
        self._arrivals += 1
        self._delay_s += delay
        self._in_time += in_time

    def hold_s(self, max_hold_s: float) -> float:
        """A hold that reaches most siblings: twice their mean delay."""
        return min(max_hold_s, 2 * self._delay_s / self._arrivals) if self._arrivals else max_hold_s

    def is_worthwhile(self, hold_s: float) -> bool:
        """Whether holding a first job for `hold_s` saves more seconds of prefill than the held jobs lose."""
        recomputed_unheld, recomputed_held = self.recomputed_unheld.tokens(), self.recomputed_held.tokens()
        if not recomputed_unheld:
            return False
        # Before a hold was tried, it is expected to save half.
        each = recomputed_unheld / 2 if recomputed_held is None else recomputed_unheld - recomputed_held
        siblings = self._in_time / self._group_count
        return each >= 1 and siblings * each * self.prefill_s_per_token > MIN_BENEFIT_RATIO * hold_s * (1 + siblings)

    def record_prefill(self, seconds: float, tokens: int) -> None:
        """A first job waited `seconds` for its first token. Most also wait for other jobs, so the least counts."""
        if tokens > 0:
            each = seconds / tokens
            least = self.prefill_s_per_token
            self.prefill_s_per_token = each if not least or each < least else least + 0.1 * EWMA_ALPHA * (each - least)


class SiblingWindow:
    """One prefix group, from its first job until no more siblings are expected. Without a hold `held_until` is None."""

    __slots__ = ("_counted_until", "_first", "_opened_at", "_sent_at", "_tokens", "ends_at", "held_until", "stats")

    def __init__(
        self, first: InferenceJob, stats: SiblingStats, now: float, counted_until: float, ends_at: float
    ) -> None:
        self._first = first
        self._opened_at = now
        self._counted_until = counted_until
        self._sent_at = now
        self._tokens = 0
        self.stats = stats
        self.ends_at = ends_at
        self.held_until: float | None = None

    def arrived(self, now: float) -> float | None:
        """A sibling arrived: the time it is held until, if it is."""
        self.stats.arrived(now - self._opened_at, now < self._counted_until)
        return self.held_until if self.held_until is not None and now < self.held_until else None

    def sent(self, job: InferenceJob, prefill_tokens: int, now: float) -> None:
        if job is self._first:
            self._sent_at = now
            self._tokens = prefill_tokens

    def first_token(self, job: InferenceJob, now: float) -> None:
        if job is self._first:
            self.stats.record_prefill(now - self._sent_at, self._tokens)

    def ended(self, job: InferenceJob, computed_tokens: int) -> None:
        """A job of the group ended. It was charged for `computed_tokens` of its prompt."""
        first = self._first
        if job is not first and job.arrived_at < self._counted_until:
            recomputed = self.stats.recomputed_unheld if self.held_until is None else self.stats.recomputed_held
            recomputed.count(
                max(0, computed_tokens - _tokens_to_compute(job, _shared_slices(first.prefix, job.prefix)))
            )


class SiblingWindows:
    """The open windows of one queue, and what was learned from earlier ones."""

    __slots__ = ("_open_windows", "_stats", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._open_windows: dict[PrefixKey, SiblingWindow] = {}
        self._stats: dict[SiblingStatsKey, SiblingStats] = {}

    def arrived(self, job: InferenceJob, now: float) -> tuple[SiblingWindow, float | None]:
        """A job with a prefix arrived while every worker was busy: its window, and the time it is held until."""
        key = prefix_key(job)
        sibling_window = self._open_windows.get(key)
        if sibling_window is not None and now < sibling_window.ends_at:
            return sibling_window, sibling_window.arrived(now)
        self._close_expired(now)
        stats = self._stats_for((job.tenant, job.template_id))
        stats.group_started()
        hold_s = stats.hold_s(self._window_s)
        sibling_window = SiblingWindow(job, stats, now, now + hold_s, now + self._window_s)
        self._open_windows[key] = sibling_window
        if not stats.is_worthwhile(hold_s):
            return sibling_window, None
        stats.holds += 1
        if not stats.holds % REPROBE_INTERVAL:
            return sibling_window, None
        sibling_window.held_until = now + hold_s
        return sibling_window, sibling_window.held_until

    def _close_expired(self, now: float) -> None:
        """Drop windows that are over. All windows of a queue are equally long, so the oldest end first."""
        while self._open_windows:
            key = next(iter(self._open_windows))
            if now < self._open_windows[key].ends_at:
                return
            del self._open_windows[key]

    def _stats_for(self, key: SiblingStatsKey) -> SiblingStats:
        stats = self._stats.get(key)
        if stats is None:
            if len(self._stats) >= MAX_STATS:
                del self._stats[next(iter(self._stats))]
            stats = self._stats[key] = SiblingStats()
        return stats


def _shared_slices(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """The number of equal slices at the beginning."""
    depth = 0
    for is_equal in map(eq, one, other):
        if not is_equal:
            break
        depth += 1
    return depth


def _tokens_to_compute(job: InferenceJob, shared_slices: int) -> int:
    """The prompt tokens to compute where `shared_slices` of the prefix are cached."""
    prompt = job.footprint.prompt.expected
    return prompt - prompt * shared_slices // len(job.prefix)
