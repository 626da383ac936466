"""Quotas of KV tokens and of concurrent runs, of one tenant or key, and how long a quiet run counts as concurrent.

A call counts from its admission to its end, queued or running, for the KV tokens that it holds at its peak: its prompt
and its output limit, or the predicted output where it has no limit. Prefixes that calls share count for each of them.
The sub-runs of a run count as one run with it.
"""

from math import inf
from typing import Final, NamedTuple

from inferry.domain.tenants import Limits

RUN_PAUSE_S: Final = 60.0
"""A run without a call for this long is concurrent no longer: it has ended without saying so, or its tool is slow."""


class KvExcess(NamedTuple):
    """A limit that a call would exceed, and its use by other calls.

    `free_in_s`: seconds until the call may fit, infinity for never; None if that depends on when other calls end.
    """

    limit: str
    value: int
    in_use: int
    free_in_s: float | None


class _RunUse:
    __slots__ = ("idle_since", "jobs", "kv_tokens")

    def __init__(self) -> None:
        self.jobs = 0
        self.kv_tokens = 0
        self.idle_since = 0.0


class KvQuota:
    """KV tokens and runs in use, and their limits. Without a limit nothing is counted.

    The gate checks `excess` before it calls `acquire`, and calls `release` for each `acquire`.
    """

    __slots__ = ("_max_kv_tokens", "_max_run_kv_tokens", "_max_runs", "_runs", "is_limited", "kv_tokens")

    def __init__(self) -> None:
        self.is_limited = False
        self.kv_tokens = 0
        self._max_kv_tokens: int | None = None
        self._max_run_kv_tokens: int | None = None
        self._max_runs: int | None = None
        self._runs: dict[str, _RunUse] = {}

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits. Calls in flight keep what they hold."""
        self._max_kv_tokens = limits.max_kv_tokens
        self._max_run_kv_tokens = limits.run_max_kv_tokens
        self._max_runs = limits.max_concurrent_runs
        if self._max_runs is None:
            self._runs = {run_id: run for run_id, run in self._runs.items() if run.jobs}
        self.is_limited = any(
            limit is not None for limit in (self._max_kv_tokens, self._max_run_kv_tokens, self._max_runs)
        )

    def excess(self, run_id: str, kv_tokens: int, now: float) -> KvExcess | None:
        """The limit that a call of the run with this many KV tokens exceeds; None if it fits."""
        run, most_runs = self._runs.get(run_id), self._max_runs
        if most_runs is not None and run is None and len(self._runs) >= most_runs:
            self._drop_idle(now)
            if len(self._runs) >= most_runs:
                idle = [one.idle_since + RUN_PAUSE_S - now for one in self._runs.values() if not one.jobs]
                free_in_s = min(idle, default=None) if most_runs else inf
                return KvExcess("max_concurrent_runs", most_runs, len(self._runs), free_in_s)
        most, used = self._max_run_kv_tokens, 0 if run is None else run.kv_tokens
        if most is not None and used + kv_tokens > most:
            return KvExcess("run_max_kv_tokens", most, used, inf if kv_tokens > most else None)
        most = self._max_kv_tokens
        if most is not None and self.kv_tokens + kv_tokens > most:
            return KvExcess("max_kv_tokens", most, self.kv_tokens, inf if kv_tokens > most else None)
        return None

    def acquire(self, run_id: str, kv_tokens: int) -> None:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _RunUse()
        run.jobs += 1
        run.kv_tokens += kv_tokens
        self.kv_tokens += kv_tokens

    def release(self, run_id: str, kv_tokens: int, now: float, *, is_last_call: bool) -> None:
        """A call has ended. `is_last_call`: no other call will name its run."""
        run = self._runs[run_id]
        run.jobs -= 1
        run.kv_tokens -= kv_tokens
        run.idle_since = now
        self.kv_tokens -= kv_tokens
        if not run.jobs and (is_last_call or self._max_runs is None):
            del self._runs[run_id]

    def end_run(self, run_id: str) -> None:
        """The run is over: it is concurrent no longer, unless calls of it are in flight."""
        run = self._runs.get(run_id)
        if run is not None and not run.jobs:
            del self._runs[run_id]

    def _drop_idle(self, now: float) -> None:
        for run_id, run in list(self._runs.items()):
            if not run.jobs and now - run.idle_since >= RUN_PAUSE_S:
                del self._runs[run_id]
