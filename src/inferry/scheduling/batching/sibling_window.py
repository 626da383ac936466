"""Whether a first job waits for siblings that are about to come, before workers that batch continuously.

There is little to win: whoever comes later joins what runs, and goes where its beginning is warm. But where several
workers share the work, and the one where it is warm carries its part already, a sibling goes elsewhere and computes the
whole beginning again. Siblings that are ready together go together.

The law: a first job is held for h only where the siblings that come within h, times the prefill each of them saves by
that, are more than h times the jobs held, all in seconds. All of it is learned from what happened before to jobs of the
same template, or to runs of the same tenant where a job names no template: how many siblings came in that time, what
they had to compute again when nobody was held and when somebody was, and how long a prompt token takes. Where nothing
was ever computed twice nobody is held, nor before an idle worker.
"""

from operator import eq

from inferry.scheduling.batching.prefix_groups import PrefixGroupKey
from inferry.scheduling.queues.queued_job import QueuedJob

EWMA_ALPHA = 0.2
"""How much the latest counts beside everything before it."""
RECOMPUTE_ALPHA = 0.05
"""The same for what is computed twice: siblings of one family mostly fare alike, so it takes several to know."""
MIN_SIBLINGS = 8
MIN_BENEFIT_RATIO = 2.0
"""How much more must be saved than is lost: all of it is an estimate, and the jobs that are held lose for certain."""
REPROBE_INTERVAL = 16
"""After so many holds one family is let go, to see whether its siblings still compute anything twice."""
MAX_STATS = 1_024
SiblingStatsKey = tuple[str, str | None]


class RecomputedTokens:
    """Prompt tokens that a sibling computes though they were computed before, on average."""

    __slots__ = ("_siblings", "_tokens")

    def __init__(self) -> None:
        self._siblings = 0.0
        self._tokens = 0.0

    def count(self, tokens: int) -> None:
        self._siblings += 1 - RECOMPUTE_ALPHA * self._siblings
        self._tokens += tokens - RECOMPUTE_ALPHA * self._tokens

    def tokens(self) -> float | None:
        """None where too few were seen to say."""
        return self._tokens / self._siblings if self._siblings >= MIN_SIBLINGS else None


class SiblingStats:
    """How families of one kind come. `recomputed_unheld` is what siblings computed twice when nobody was held,
    `recomputed_held` when somebody was: the difference is what holding saves.
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
        self._group_count = 1.0  # one in vain, so that little is believed, but soon
        self._arrivals = 0.0
        self._delay_s = 0.0
        self._in_time = 0.0

    def group_started(self) -> None:
        self._group_count += 1 - EWMA_ALPHA * self._group_count
        self._arrivals -= EWMA_ALPHA * self._arrivals
        self._delay_s -= EWMA_ALPHA * self._delay_s
        self._in_time -= EWMA_ALPHA * self._in_time

    def arrived(self, delay: float, in_time: bool) -> None:
        """A sibling came so long after the first; say whether a hold would have been long enough for it."""
        self._arrivals += 1
        self._delay_s += delay
        self._in_time += in_time

    def hold_s(self, max_hold_s: float) -> float:
        """How long to hold to have most siblings: twice their mean delay."""
        return min(max_hold_s, 2 * self._delay_s / self._arrivals) if self._arrivals else max_hold_s

    def is_worthwhile(self, hold_s: float) -> bool:
        """Whether holding a first job for so long saves more seconds of prefill than jobs lose by it."""
        recomputed_unheld, recomputed_held = self.recomputed_unheld.tokens(), self.recomputed_held.tokens()
        if not recomputed_unheld:
            return False
        each = (
            recomputed_unheld / 2 if recomputed_held is None else recomputed_unheld - recomputed_held
        )  # half is believed before it was tried
        siblings = self._in_time / self._group_count
        return each >= 1 and siblings * each * self.prefill_s_per_token > MIN_BENEFIT_RATIO * hold_s * (1 + siblings)

    def record_prefill(self, seconds: float, tokens: int) -> None:
        """A first job waited so long for its first token. Most had to wait for others too, so the least is believed."""
        if tokens > 0:
            each = seconds / tokens
            least = self.prefill_s_per_token
            self.prefill_s_per_token = each if not least or each < least else least + 0.1 * EWMA_ALPHA * (each - least)


class SiblingWindow:
    """One family, from its first job until no more siblings are expected. `held_until` is None where nobody is held."""

    __slots__ = ("_counted_until", "_first", "_opened_at", "_sent_at", "_tokens", "ends_at", "held_until", "stats")

    def __init__(self, first: QueuedJob, stats: SiblingStats, now: float, counted_until: float, ends_at: float) -> None:
        self._first = first
        self._opened_at = now
        self._counted_until = counted_until
        self._sent_at = now
        self._tokens = 0
        self.stats = stats
        self.ends_at = ends_at
        self.held_until: float | None = None

    def arrived(self, now: float) -> float | None:
        """A sibling has come: say until when it is held, if at all."""
        self.stats.arrived(now - self._opened_at, now < self._counted_until)
        return self.held_until if self.held_until is not None and now < self.held_until else None

    def sent(self, entry: QueuedJob, now: float) -> None:
        """One of the family was sent."""
        if entry is self._first:
            self._sent_at = now
            self._tokens = entry.prefill_tokens

    def first_token(self, entry: QueuedJob, now: float) -> None:
        """One of the family has its first token."""
        if entry is self._first:
            self.stats.record_prefill(now - self._sent_at, self._tokens)

    def ended(self, entry: QueuedJob) -> None:
        """One of the family is over, and charged for what it really computed where its worker has said so."""
        first, job = self._first, entry.job
        if entry is not first and job.arrived_at < self._counted_until:
            recomputed = self.stats.recomputed_unheld if self.held_until is None else self.stats.recomputed_held
            recomputed.count(
                max(0, entry.charged_tokens - _tokens_to_compute(entry, _shared_slices(first.job.prefix, job.prefix)))
            )


class SiblingWindows:
    """The families of one queue that are being watched, and what was learned from those before them."""

    __slots__ = ("_open_windows", "_stats", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._open_windows: dict[PrefixGroupKey, SiblingWindow] = {}
        self._stats: dict[SiblingStatsKey, SiblingStats] = {}

    def arrived(self, entry: QueuedJob, now: float) -> float | None:
        """A job with a beginning has come while every worker is busy: say until when it is held, if at all."""
        job = entry.job
        key = (job.tenant, job.template_id or job.run_id, job.prefix[0])
        sibling_window = self._open_windows.get(key)
        if sibling_window is not None and now < sibling_window.ends_at:
            entry.sibling_window = sibling_window
            return sibling_window.arrived(now)
        self._close_expired(now)
        stats = self._stats_for((job.tenant, job.template_id))
        stats.group_started()
        hold_s = stats.hold_s(self._window_s)
        sibling_window = entry.sibling_window = self._open_windows[key] = SiblingWindow(
            entry, stats, now, now + hold_s, now + self._window_s
        )
        if not stats.is_worthwhile(hold_s):
            return None
        stats.holds += 1
        if not stats.holds % REPROBE_INTERVAL:
            return None
        sibling_window.held_until = now + hold_s
        return sibling_window.held_until

    def _close_expired(self, now: float) -> None:
        """Drop watches that are over: all of one queue last equally long, so the oldest come first."""
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
    """How many slices they begin with alike."""
    depth = 0
    for is_equal in map(eq, one, other):
        if not is_equal:
            break
        depth += 1
    return depth


def _tokens_to_compute(entry: QueuedJob, shared_slices: int) -> int:
    """The prompt tokens to compute where so many slices are warm."""
    prompt = entry.job.footprint.prompt.expected
    return prompt - prompt * shared_slices // len(entry.job.prefix)
