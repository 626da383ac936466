"""One run: its jobs in flight, its usage and its times."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, DeadlineExceeded, QueueTimeout, RequestTimeout, RunCancelled
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Failed, Usage

MAX_SPANS: Final = 64
"""Separate running spans kept while a run is in flight; beyond, the two oldest are merged."""


RunKey = tuple[str, str]
"""Tenant and run."""


class Totals:
    """Sums over jobs that have ended."""

    __slots__ = (
        "cached_tokens",
        "cancelled",
        "cost_nanos",
        "done",
        "expired",
        "failed",
        "jobs",
        "max_wait_ms",
        "output_tokens",
        "prompt_tokens",
        "wait_ms",
        "waits",
    )

    def __init__(
        self,
        *,
        jobs: int = 0,
        done: int = 0,
        failed: int = 0,
        cancelled: int = 0,
        expired: int = 0,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        cost_nanos: int = 0,
        waits: int = 0,
        wait_ms: float = 0.0,
        max_wait_ms: float = 0.0,
    ) -> None:
        self.jobs = jobs
        self.done = done
        self.failed = failed
        self.cancelled = cancelled
        self.expired = expired
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens
        self.cost_nanos = cost_nanos
        self.waits = waits
        self.wait_ms = wait_ms
        self.max_wait_ms = max_wait_ms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Totals) and self._as_tuple() == other._as_tuple()

    def __repr__(self) -> str:
        return f"Totals{self._as_tuple()}"

    def _as_tuple(self) -> tuple[float, ...]:
        return (
            self.jobs,
            self.done,
            self.failed,
            self.cancelled,
            self.expired,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.cost_nanos,
            self.waits,
            self.wait_ms,
            self.max_wait_ms,
        )

    def count(self, attempt: Attempt, usage: Usage, cost_nanos: int | None) -> None:
        self.jobs += 1
        end = attempt.end
        if type(end) is Done:
            self.done += 1
        elif isinstance(end, Failed) and isinstance(end.error, ClientClosed | RunCancelled):
            self.cancelled += 1
        elif isinstance(end, Failed) and isinstance(end.error, QueueTimeout | DeadlineExceeded | RequestTimeout):
            self.expired += 1
        else:
            self.failed += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        if cost_nanos is not None:
            self.cost_nanos += cost_nanos
        if attempt.sent_at is not None:
            wait = (attempt.sent_at - attempt.job.arrived_at) * 1000
            self.waits += 1
            self.wait_ms += wait
            if wait > self.max_wait_ms:
                self.max_wait_ms = wait

    def add(self, other: "Totals") -> None:
        if not other.jobs:
            return
        self.jobs += other.jobs
        self.done += other.done
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.expired += other.expired
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.cost_nanos += other.cost_nanos
        self.waits += other.waits
        self.wait_ms += other.wait_ms
        self.max_wait_ms = max(self.max_wait_ms, other.max_wait_ms)


class Run:
    """One run while it is known. Only `RunRegistry` changes it.

    `lineage` is (run, parent, …, root). `last_call_at` is the time of its last call, or of a sub-run's. Times and
    `tree_in_flight` are those of the whole tree below it: an agent that waits for its sub-agents waits for the model.
    `evicted_totals` is the usage of sub-runs that were forgotten.
    """

    __slots__ = (
        "active_s",
        "active_since",
        "cancelled_at",
        "children",
        "evicted_runs",
        "evicted_totals",
        "extra_steps",
        "finished_at",
        "first_call_at",
        "idle_since",
        "in_flight",
        "is_anonymous",
        "key",
        "last_activity_at",
        "last_call_at",
        "lineage",
        "own_active_s",
        "own_active_since",
        "parent",
        "refused",
        "running_s",
        "spans",
        "steps",
        "tool_s",
        "totals",
        "tree_in_flight",
    )

    def __init__(
        self,
        key: RunKey,
        lineage: tuple[str, ...],
        now: float,
        parent: "Run | None" = None,
        is_anonymous: bool = False,
        tree_in_flight: int = 0,
    ) -> None:
        self.key = key
        self.lineage = lineage
        self.first_call_at = now
        self.last_activity_at = now
        self.last_call_at = now
        self.parent = parent
        self.is_anonymous = is_anonymous
        self.children: dict[str, Run] = {}
        self.in_flight: dict[str, InferenceJob] = {}
        self.tree_in_flight = tree_in_flight
        self.totals = Totals()
        self.evicted_totals: Totals | None = None
        self.evicted_runs = 0
        self.refused = 0
        self.steps: set[int] = set()
        self.extra_steps = 0
        self.finished_at: float | None = None
        self.cancelled_at: float | None = None
        # Time: in flight (own, tree), on a worker (tree), and between calls (tree).
        self.own_active_since = 0.0
        self.own_active_s = 0.0
        self.active_since = 0.0
        self.active_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.running_s = 0.0
        self.idle_since: float | None = None
        self.tool_s = 0.0

    @property
    def tenant(self) -> str:
        return self.key[0]

    @property
    def run_id(self) -> str:
        return self.key[1]

    def __repr__(self) -> str:
        return f"Run({self.run_id!r} of {self.tenant!r})"

    def add_running_span(self, sent_at: float, now: float) -> None:
        """A job of the tree was on a worker from `sent_at` to `now`."""
        spans = self.spans
        start = sent_at
        while spans and spans[-1][1] >= start:
            first = spans.pop()[0]
            if first < start:
                start = first
        spans.append((start, now))
        if len(spans) > MAX_SPANS:
            spans[0:2] = [(spans[0][0], spans[1][1])]

    def forget_child(self, child: "Run") -> None:
        """The sub-run is forgotten: this run keeps its sums."""
        del self.children[child.run_id]
        if self.evicted_totals is None:
            self.evicted_totals = Totals()
        self.evicted_totals.add(child.totals)
        if child.evicted_totals is not None:
            self.evicted_totals.add(child.evicted_totals)
        self.evicted_runs += 1 + child.evicted_runs


def union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of the spans, in seconds."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > covered_until:
            total += end - max(start, covered_until)
            covered_until = end
    return total


def join_tree(run: Run, parent: Run, now: float) -> None:
    """Give a parent to a run that had none, with its jobs in flight."""
    run.parent = parent
    parent.children[run.run_id] = run
    for one in list(subtree(run)):
        assert one.parent is not None
        one.lineage = (one.run_id, *one.parent.lineage)
    for node in self_and_ancestors(parent):
        if run.tree_in_flight:
            if not node.tree_in_flight:
                node.active_since = now
                if node.idle_since is not None:
                    node.tool_s += now - node.idle_since
                    node.idle_since = None
            node.tree_in_flight += run.tree_in_flight
        node.last_call_at = now


def remove_in_flight(run: Run, sent_at: float | None, now: float) -> None:
    """A job of the run has ended that was sent to a worker at `sent_at`: end the times that it kept open."""
    if not run.in_flight:
        run.own_active_s += now - run.own_active_since
    node: Run | None = run
    while node is not None:
        node.tree_in_flight -= 1
        if sent_at is not None and sent_at < node.active_since:
            sent_at = node.active_since  # the run joined this tree while the job ran
        if node.tree_in_flight:
            if sent_at is not None:
                node.add_running_span(sent_at, now)
        else:
            node.active_s += now - node.active_since
            if node.spans:
                if sent_at is not None:
                    node.add_running_span(sent_at, now)
                node.running_s += sum([end - start for start, end in node.spans], 0.0)
                node.spans.clear()
            elif sent_at is not None:
                node.running_s += now - sent_at
            if node.finished_at is None:
                node.idle_since = now
        node.last_activity_at = now
        node = node.parent


def self_and_ancestors(run: Run | None) -> Iterator[Run]:
    while run is not None:
        yield run
        run = run.parent


def subtree(run: Run) -> Iterator[Run]:
    """The run and its sub-runs, parents first."""
    pending = [run]
    while pending:
        one = pending.pop()
        yield one
        pending += one.children.values()


def tree_totals(run: Run, most_runs: int) -> tuple[Totals, int]:
    """Sums over the run and its sub-runs, and the number of runs. Of a tree with more than `most_runs` known runs only
    the first ones are summed."""
    totals, runs = Totals(), 0
    for one in islice(subtree(run), most_runs):
        totals.add(one.totals)
        runs += 1 + one.evicted_runs
        if one.evicted_totals is not None:
            totals.add(one.evicted_totals)
    return totals, runs


def height(run: Run) -> int:
    return 1 + max((height(child) for child in run.children.values()), default=0)
