"""The predicted KV peak of the jobs on one worker, with the ends of jobs taken into account.

Sequences of an engine decode in step, one token each, so time is counted in tokens. A job that holds h tokens and has r
tokens left to write frees h + r tokens after r steps. Between two ends the sum only grows, so the peak is

    max over i of  sum of (h_j + r_i) over the jobs j with r_j >= r_i

It is at most the sum of every job's own peak: jobs that are nearly done free KV for those that have just begun. This is
the admission rule of LightLLM's past-future scheduler.
"""

from collections.abc import Container

from inferry.scheduling.queues.queued_job import QueuedJob


class KvPeakTracker:
    """The jobs counted on a worker with `kv_packing: timed`. `limit` is the worker's KV in tokens, `own_peaks` the sum
    of the jobs' own peaks.
    """

    __slots__ = ("_jobs", "limit", "own_peaks")

    def __init__(self, limit: float) -> None:
        self._jobs: dict[QueuedJob, None] = {}
        self.limit = limit
        self.own_peaks = 0

    def add(self, entry: QueuedJob) -> None:
        self._jobs[entry] = None
        self.own_peaks += entry.kv_tokens

    def remove(self, entry: QueuedJob) -> None:
        """Drop a job. One that was sent before the worker had a tracker is not known here."""
        if entry in self._jobs:
            del self._jobs[entry]
            self.own_peaks -= entry.kv_tokens

    def peak(self, candidate: QueuedJob | None = None, leaving: Container[QueuedJob] = ()) -> int:
        """The predicted peak without the jobs that leave, and with a job that might be sent now."""
        rows = [] if candidate is None else [_row(candidate)]
        rows += [_row(entry) for entry in self._jobs if entry not in leaving]
        rows.sort(reverse=True)
        held = highest = jobs = 0
        overdue = 0
        for remaining, own_held in rows:
            if remaining <= 0:
                # A job past its predicted length may go on, so it holds its KV for good.
                overdue += own_held
                continue
            jobs += 1
            held += own_held
            level = held + jobs * remaining
            if level > highest:
                highest = level
        return highest + overdue


def _row(entry: QueuedJob) -> tuple[int, int]:
    """Tokens that the job has left to write by its prediction, and tokens that it holds."""
    output = entry.job.footprint.output.expected
    return output - entry.produced, entry.kv_tokens - output + entry.produced
