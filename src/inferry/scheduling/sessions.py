"""Which runs keep their KV on a worker while their agents use tools, and which runs pause.

The working set of a run is the KV that its next call will want again. A run is resident on a worker from its first call
there. While the working sets of all resident runs fit the KV cache, nothing is paused. Beyond that, calls of other runs
wait in the queue: if they went, runs would evict each other's prefixes, and every call would compute its whole prompt.

A paused call goes when resident runs leave, or after `max_pause_s`; then the runs that have been idle longest leave for
it, as they do from an engine's LRU cache. A run is idle between two calls. It is kept for twice the mean tool time of
the worker's runs, and for the time in which the engine computes as many prompt tokens as its cache holds, if that is
less. Where tool times are longer than that, an engine without cache hits serves as many calls, and no run pauses.
Paused calls go in the order of their tenants' resident tokens, the fewest first.

Calls of P0 never pause, nor do calls without a run id, later attempts, sub-runs of a resident run, and calls to a
worker without a prefix cache. Whether more fits than the sizes say (runs may share a prefix) is learned from the cached
tokens of ended calls: while calls pause, a hit of a run that had left raises the limit of the worker; a miss of a
resident run lowers it.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import Ended
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState
from inferry.scheduling.working_sets import RunTree, WorkingSets, kv_tokens, learn

MAX_DEPARTED: Final = 4096
"""Runs remembered after they left, to learn from their next call."""
Key = tuple[str, str]
"""Tenant and run."""


class SessionLimits:
    """`max_pause_s` bounds the pause of a call, in seconds."""

    def __init__(self, max_pause_s: float = 50.0) -> None:
        self.max_pause_s: Final = max_pause_s


class SessionCounts:
    """Runs that are resident and calls that are paused now; pauses so far, and their seconds."""

    def __init__(self, resident: int, paused: int, pauses: int, pause_s: float) -> None:
        self.resident: Final = resident
        self.paused: Final = paused
        self.pauses: Final = pauses
        self.pause_s: Final = pause_s


class Sessions:
    """Decides which calls pause. O(1) per call while none is paused; time is an argument.

    `wake_at` is when the next idle run leaves for a paused call.
    """

    __slots__ = ("_departed", "_is_changed", "_limits", "_pause_s", "_pauses", "_sets", "_trees", "wake_at")

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._trees: dict[Key, RunTree] = {}
        self._sets: dict[str, WorkingSets] = {}
        self._departed: dict[Key, tuple[int, float]] = {}
        self._pauses = 0
        self._pause_s = 0.0
        self._is_changed = False
        self.wake_at: float | None = None

    def arrived(self, entry: QueuedJob, workers: Sequence[WorkerState], now: float) -> float | None:
        """A call is queued: the time until which it pauses at most, or None."""
        job = entry.job
        if job.run_id == job.job_id or entry.is_pooled:
            return None
        tree = self._tree_of(job)
        tree.jobs += 1
        if tree.home is not None and tree.home.worker not in workers:
            self._leave(tree)  # a call of another model: its workers keep nothing of the run
        known, idle_since = tree.tokens_by_run.get(job.run_id, 0), tree.idle_since
        if not known:
            known, idle_since = self._departed.pop((job.tenant, job.run_id), (0, 0.0))
        tree.known_tokens[job.run_id] = known
        self._resize(tree, job.run_id, max(known, entry.kv_tokens))
        tree.was_kept = tree.home is not None
        home = self._best_home(workers) if tree.home is None else tree.home
        if home is None:
            return None
        if known and tree.jobs == 1:
            home.used_tools(now - idle_since)
        if tree.was_kept:
            home.idle.pop(tree, None)
            return None
        if not home.paused:
            self._drop_idle(home, now)
        may_pause = entry.rules.may_pause and job.attempt == 1 and home.tokens > 0 and home.caches() and home.pays()
        if not may_pause or (not home.paused and home.fits(tree.tokens)):
            self._settle(tree, home)
            return None
        home.pause(entry, tree)
        self._is_changed = True
        self._pauses += 1
        bound_s = self._limits.max_pause_s
        return now + (bound_s if job.deadline is None else min(bound_s, (job.deadline - now) / 2))

    def end_pause(self, entry: QueuedJob, now: float) -> None:
        """The longest pause of a call is over: the runs that have been idle longest leave for it."""
        for home in self._sets.values():
            tree = home.unpause(entry)
            if tree is not None:
                self._pause_s += now - entry.ready_at
                self._drop_surplus(home, tree.tokens)
                if tree.home is None:
                    self._settle(tree, home)
                self._is_changed = True
                return

    def resume(self, now: float) -> list[QueuedJob]:
        """The paused calls that go now."""
        resumed: list[QueuedJob] = []
        if not self._is_changed and (self.wake_at is None or self.wake_at > now):
            return resumed
        self._is_changed = False
        self.wake_at = None
        for home in self._sets.values():
            if not home.paused:
                continue
            self._drop_idle(home, now)
            while (entry := home.next_paused()) is not None:
                tree = home.paused[entry.job.tenant][entry]
                if tree.home is None and not home.fits(tree.tokens) and home.tokens > 0:
                    break
                home.unpause(entry)
                if tree.home is None:
                    self._settle(tree, home)
                resumed.append(entry)
                self._pause_s += now - entry.ready_at
            if home.paused and home.idle:
                leaves_at = next(iter(home.idle)).idle_since + home.keep_s()
                self.wake_at = leaves_at if self.wake_at is None else min(self.wake_at, leaves_at)
        return resumed

    def left(self, entry: QueuedJob, now: float) -> None:
        """A call left the queue without being sent."""
        for home in self._sets.values():
            if home.paused:
                home.unpause(entry)
        self.ended(entry.job, Ended(), now)

    def sent(self, job: InferenceJob, worker: WorkerState) -> None:
        """A call goes to a worker: its run is resident there from now on."""
        tree = self._trees.get((job.tenant, job.run_id))
        if tree is not None and (tree.home is None or tree.home.worker is not worker):
            self._leave(tree)
            self._settle(tree, self._set_of(worker))

    def ended(self, job: InferenceJob, step: Ended, now: float) -> None:
        """A call has ended."""
        tree = self._trees.get((job.tenant, job.run_id))
        if tree is None:
            return
        self._is_changed = True
        tree.jobs -= 1
        known = tree.known_tokens.pop(job.run_id, 0)
        if step.prompt_tokens is not None:
            self._resize(tree, job.run_id, step.prompt_tokens + (step.output_tokens or 0))
            if tree.home is not None and step.cached_tokens is not None:
                learn(tree.home, tree.was_kept, min(known, step.prompt_tokens), step.cached_tokens)
        if tree.jobs:
            return
        if tree.home is None:
            self._forget_tree(tree)
        else:
            tree.idle_since = now
            tree.home.idle[tree] = None
            self._drop_surplus(tree.home, 0)

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over: nothing is kept for it."""
        tree = self._trees.get((tenant, run_id))
        if tree is not None and not tree.jobs:
            self._is_changed = True
            self._leave(tree)

    def forget(self, worker: str) -> list[QueuedJob]:
        """The worker is gone, and its cache with it. The calls that paused for it."""
        home = self._sets.pop(worker, None)
        if home is None:
            return []
        for tree in [tree for tree in self._trees.values() if tree.home is home]:
            if tree.home is home:  # a tree is listed once for each of its runs
                self._leave(tree)
        return [entry for entries in home.paused.values() for entry in entries]

    def counts(self) -> SessionCounts:
        sets = self._sets.values()
        paused = sum([len(entries) for one in sets for entries in one.paused.values()])
        return SessionCounts(sum([one.resident for one in sets]), paused, self._pauses, self._pause_s)

    # Trees and their homes.

    def _tree_of(self, job: InferenceJob) -> RunTree:
        key = (job.tenant, job.run_id)
        tree = self._trees.get(key)
        if tree is None and job.parent_run is not None:
            tree = self._trees.get((job.tenant, job.parent_run))
        if tree is None:
            tree = RunTree(job.tenant)
        self._trees[key] = tree
        return tree

    def _set_of(self, worker: WorkerState) -> WorkingSets:
        found = self._sets.get(worker.name)
        if found is None or found.worker is not worker:
            found = self._sets[worker.name] = WorkingSets(worker)
        return found

    def _best_home(self, workers: Sequence[WorkerState]) -> WorkingSets | None:
        """The worker with the most KV that no run claims; None where workers tell no KV."""
        best: WorkingSets | None = None
        most = -inf
        for worker in workers:
            cache_tokens = kv_tokens(worker)
            if cache_tokens < inf and not worker.pads:
                one = self._set_of(worker)
                free = one.overcommit * cache_tokens - one.tokens
                if free > most:
                    best, most = one, free
        return best

    def _resize(self, tree: RunTree, run_id: str, tokens: int) -> None:
        change = tokens - tree.tokens_by_run.get(run_id, 0)
        tree.tokens_by_run[run_id] = tokens
        tree.tokens += change
        if tree.home is not None:
            tree.home.count(tree, change)

    def _settle(self, tree: RunTree, home: WorkingSets) -> None:
        tree.home = home
        home.resident += 1
        home.count(tree, tree.tokens)

    def _leave(self, tree: RunTree) -> None:
        home = tree.home
        if home is not None:
            home.resident -= 1
            home.count(tree, -tree.tokens)
            home.idle.pop(tree, None)
            tree.home = None
        if not tree.jobs:
            self._forget_tree(tree)

    def _forget_tree(self, tree: RunTree) -> None:
        for run_id, tokens in tree.tokens_by_run.items():
            key = (tree.tenant, run_id)
            del self._trees[key]
            self._departed[key] = (tokens, tree.idle_since)
        while len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    def _drop_surplus(self, home: WorkingSets, tokens: int) -> None:
        """The runs that have been idle longest leave until `tokens` more fit."""
        while home.idle and not home.fits(tokens):
            self._leave(next(iter(home.idle)))

    def _drop_idle(self, home: WorkingSets, now: float) -> None:
        """Runs that have been idle for too long leave."""
        keep_s = home.keep_s()
        while home.idle:
            first = next(iter(home.idle))
            if first.idle_since + keep_s > now:
                return
            self._leave(first)
