"""The runs that are resident on a worker: how long an idle one is kept, and when pauses pay (`sessions`)."""

from math import inf
from typing import Final

from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.worker_state import WorkerState

MAX_KEEP_S: Final = 15.0
"""How long an idle run is kept at most, and where the speed of the engine is not known."""
MIN_KEEP_S: Final = 1.0
MAX_TOOL_S: Final = 60.0
TOOL_TIME_WEIGHT: Final = 0.02
KEEP_FACTOR: Final = 2.0
"""How long an idle run is kept, in mean tool times."""
TOOL_TIME_FACTOR: Final = 1.5
"""A resident run holds its KV for its tool time and for the call itself."""
RAISE_FACTOR: Final = 1.01
LOWER_FACTOR: Final = 0.95
MAX_OVERCOMMIT: Final = 8.0
MAX_MISSES: Final = 64
"""Calls of resident runs after which a worker that has reported no cache hit counts as one without a cache."""


class RunTree:
    """A run with its sub-runs: tokens by run, and calls that have not ended. `home` is where it is resident.

    `known_tokens` are those of a run's last call, by run, while its next one is queued or in flight; `was_kept`:
    whether the tree was resident when that call arrived.
    """

    __slots__ = ("home", "idle_since", "jobs", "known_tokens", "tenant", "tokens", "tokens_by_run", "was_kept")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.tokens_by_run: dict[str, int] = {}
        self.known_tokens: dict[str, int] = {}
        self.tokens = 0
        self.jobs = 0
        self.idle_since = 0.0
        self.was_kept = False
        self.home: WorkingSets | None = None


class WorkingSets:
    """The resident runs of one worker. `idle` are those without a call, the longest idle first.

    `misses` counts calls of resident runs without a cache hit, until the first hit. `tool_s` is the mean time between
    two calls of a run, each cut at `refill_s`.
    """

    __slots__ = (
        "_token_s",
        "has_hits",
        "idle",
        "misses",
        "overcommit",
        "paused",
        "resident",
        "tenant_tokens",
        "tokens",
        "tool_s",
        "worker",
    )

    def __init__(self, worker: WorkerState) -> None:
        self.worker = worker
        self.resident = 0
        self.tokens = 0
        self.overcommit = 1.0
        self.has_hits = False
        self.misses = 0
        self.tool_s: float | None = None
        self._token_s: float | None = None
        self.idle: dict[RunTree, None] = {}
        self.paused: dict[str, dict[QueuedJob, RunTree]] = {}
        self.tenant_tokens: dict[str, int] = {}

    def fits(self, tokens: int) -> bool:
        return self.tokens + tokens <= self.overcommit * kv_tokens(self.worker)

    def count(self, tree: RunTree, tokens: int) -> None:
        self.tokens += tokens
        left = self.tenant_tokens.get(tree.tenant, 0) + tokens
        if left:
            self.tenant_tokens[tree.tenant] = left
        else:
            self.tenant_tokens.pop(tree.tenant, None)

    def refill_s(self) -> float:
        """How long the engine needs to compute as many prompt tokens as its cache holds; infinite if not known."""
        direct = self.worker.direct
        if direct is not None and direct.computed_token_s is not None:
            self._token_s = direct.computed_token_s
        return inf if self._token_s is None else kv_tokens(self.worker) * self._token_s

    def keep_s(self) -> float:
        """How long an idle run is kept while others wait: runs that are over do not say so."""
        tool_s = inf if self.tool_s is None else KEEP_FACTOR * self.tool_s
        return max(MIN_KEEP_S, min(tool_s, self.refill_s(), MAX_KEEP_S))

    def pays(self) -> bool:
        """Whether resident runs make better use of the engine than runs without cache hits, which never wait for tools.

        In a time of `refill_s` the engine serves the calls of one full cache without hits. With hits it serves as many
        only if a resident run calls again within that time.
        """
        return self.tool_s is None or TOOL_TIME_FACTOR * self.tool_s <= self.refill_s()

    def used_tools(self, tool_s: float) -> None:
        """A run calls again after this time."""
        tool_s = min(tool_s, self.refill_s(), MAX_TOOL_S)
        self.tool_s = tool_s if self.tool_s is None else self.tool_s + TOOL_TIME_WEIGHT * (tool_s - self.tool_s)

    def caches(self) -> bool:
        """Whether the worker may have a prefix cache: hits were reported, or few calls that should have had some."""
        view = self.worker.view
        return self.has_hits or self.misses < MAX_MISSES or (view is not None and bool(view.prefix_hits))

    def next_paused(self) -> QueuedJob | None:
        """The first call of the tenant with the fewest resident tokens by weight."""
        best: QueuedJob | None = None
        best_share = inf
        for tenant, entries in self.paused.items():
            first = next(iter(entries))
            share = self.tenant_tokens.get(tenant, 0) / first.run.tenant.weight
            if best is None or (share, first.number) < (best_share, best.number):
                best, best_share = first, share
        return best

    def pause(self, entry: QueuedJob, tree: RunTree) -> None:
        self.paused.setdefault(entry.job.tenant, {})[entry] = tree

    def unpause(self, entry: QueuedJob) -> RunTree | None:
        entries = self.paused.get(entry.job.tenant)
        tree = None if entries is None else entries.pop(entry, None)
        if entries is not None and not entries:
            del self.paused[entry.job.tenant]
        return tree


def learn(home: WorkingSets, was_kept: bool, known_tokens: int, cached_tokens: int) -> None:
    """Compare the hits of a call with what its run sent before."""
    home.has_hits |= cached_tokens > 0
    is_hit = 2 * cached_tokens >= known_tokens
    if not known_tokens:
        return
    if is_hit and not was_kept and home.paused:
        home.overcommit = min(MAX_OVERCOMMIT, home.overcommit * RAISE_FACTOR)
    elif not is_hit and was_kept:
        home.misses += 1
        home.overcommit = max(1.0, home.overcommit * LOWER_FACTOR)


def kv_tokens(worker: WorkerState) -> float:
    """The KV cache of a worker in tokens; infinite where it tells none."""
    view = worker.view
    if view is None:
        return inf
    tokens = view.capacity.kv_tokens if view.kv_capacity is None else view.kv_capacity
    return inf if tokens is None else float(tokens)
