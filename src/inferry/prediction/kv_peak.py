"""When running jobs need memory at the same time.

A running job holds h tokens of KV, writes v a second, and frees all of it after r more tokens. Between two ends the sum
only grows, so its maximum is reached just before some job ends: with the jobs sorted by their end, the peak is

    max over i of  sum of (h_j + v_j · T_i) over the jobs j that have not ended before T_i,   T_j = r_j / v_j

which two running sums answer in one walk. The sum of every job's own maximum, which is what one would reserve
without looking at time, can be far larger: jobs that are nearly done make room for those that have just begun.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import inf

from msgspec import Struct


class RunningJob(Struct, frozen=True, gc=False):
    """KV tokens held now, tokens yet to be written, and how fast. A job still in prefill holds its whole prompt."""

    held_tokens: float
    remaining_tokens: float
    tokens_per_s: float

    @property
    def ends_in_s(self) -> float:
        """A job that writes nothing holds what it has and never ends; one with nothing left ends at once."""
        if self.remaining_tokens <= 0:
            return 0.0
        return self.remaining_tokens / self.tokens_per_s if self.tokens_per_s > 0 else inf


class KvPeak(Struct, frozen=True, gc=False):
    """The most KV tokens held at one time, and how many seconds from now."""

    tokens: float
    in_s: float


def predicted_peak(running: Iterable[RunningJob], *, horizon_s: float | None = None) -> KvPeak:
    """The peak of these jobs if no other came, within the horizon. O(n log n)."""
    rows = sorted((job.ends_in_s, job.held_tokens, max(0.0, job.tokens_per_s)) for job in running)
    return _peak_of_rows(rows, inf if horizon_s is None else horizon_s)


def fits(peak: KvPeak, capacity_tokens: float | None) -> bool:
    """Whether a worker with this much KV can take the jobs the peak was computed for; None is no limit."""
    return capacity_tokens is None or peak.tokens <= capacity_tokens


class KvPeakTracker:
    """The running jobs of one worker in the order of their ends: O(n) to ask, O(log n) plus a short move to change.

    Rows are kept in absolute time, as lines h + v · t, so that nothing has to be touched as time passes. A job whose
    predicted end has passed and which still runs should be put again with a new prediction; until then it is taken to
    hold for good what it would have held at that end.
    """

    __slots__ = ("_row_by_job", "_rows")

    def __init__(self) -> None:
        self._rows: list[tuple[float, str, float, float]] = []
        self._row_by_job: dict[str, tuple[float, str, float, float]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, job_id: str, job: RunningJob, now: float) -> None:
        """Add a job or replace what is known of it."""
        self.drop(job_id)
        rate = max(0.0, job.tokens_per_s)
        row = (now + job.ends_in_s, job_id, job.held_tokens - rate * now, rate)
        self._row_by_job[job_id] = row
        insort(self._rows, row)

    def drop(self, job_id: str) -> None:
        row = self._row_by_job.pop(job_id, None)
        if row is not None:
            del self._rows[bisect_left(self._rows, row)]

    def peak(self, now: float, *candidates: RunningJob, horizon_s: float | None = None) -> KvPeak:
        """The peak of what runs, together with jobs that might be admitted now."""
        overdue_rows = bisect_left(self._rows, (now,))
        rows = [(end - now, intercept + rate * now, rate) for end, _, intercept, rate in self._rows[overdue_rows:]]
        for job in candidates:
            insort(rows, (job.ends_in_s, job.held_tokens, max(0.0, job.tokens_per_s)))
        rows += [(inf, intercept + rate * end, 0.0) for end, _, intercept, rate in self._rows[:overdue_rows]]
        return _peak_of_rows(rows, inf if horizon_s is None else horizon_s)


def _peak_of_rows(rows: list[tuple[float, float, float]], horizon: float) -> KvPeak:
    """Rows of (end, held now, rate), sorted by end."""
    held = sum(row[1] for row in rows)
    rate = sum(row[2] for row in rows)
    highest, at = held, 0.0
    for end, own_held, own_rate in rows:
        if end > horizon:
            break
        # Beyond the last finite end only jobs that write nothing are left, and their sum is what it was.
        level = held + rate * end if end < inf else held
        if level > highest:
            highest, at = level, end
        held -= own_held
        rate -= own_rate
    else:
        return KvPeak(highest, at)
    level = held + rate * horizon
    return KvPeak(level, horizon) if level > highest else KvPeak(highest, at)
