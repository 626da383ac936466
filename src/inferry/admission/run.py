"""One run: what is in flight in it, what it used, when something ran in it, and how it stands."""

import enum
from collections.abc import Iterator

from msgspec import Struct, field

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, QueueTimeout, RunCancelled
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Failed, Usage

MOST_SPANS = 64
"""Spells of running that are told apart while a run is in flight; beyond, the two oldest count as one."""


Key = tuple[str, str]
"""Tenant and run."""


class RunStatus(enum.Enum):
    ACTIVE = "active"
    IDLE = "idle"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Totals(Struct, eq=True):
    """Sums over jobs that have ended."""

    jobs: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanos: int = 0
    waits: int = 0
    wait_ms: float = 0.0
    max_wait_ms: float = 0.0

    def count(self, attempt: Attempt, usage: Usage, cost_nanos: int | None) -> None:
        self.jobs += 1
        end = attempt.end
        if type(end) is Done:
            self.done += 1
        elif isinstance(end, Failed) and isinstance(end.error, ClientClosed | RunCancelled):
            self.cancelled += 1
        elif isinstance(end, Failed) and isinstance(end.error, QueueTimeout):
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


class Run(Struct, eq=False):
    """One run while it is known. Only `Runs` changes it.

    `lineage` is (run, parent, …, root). `called_at` is when its last call came, or that of a run below it. Times and
    `tree_in_flight` are those of the whole tree below it: an agent that waits for its sub-agents waits for the model.
    `forgotten` sums what sub-runs used that are no longer known.
    """

    key: Key
    lineage: tuple[str, ...]
    first_at: float
    last_at: float
    called_at: float
    parent: "Run | None" = None
    is_nameless: bool = False
    children: dict[str, "Run"] = field(default_factory=dict)
    in_flight: dict[str, InferenceJob] = field(default_factory=dict)
    tree_in_flight: int = 0
    totals: Totals = field(default_factory=Totals)
    forgotten: Totals | None = None
    forgotten_runs: int = 0
    refused: int = 0
    steps: set[int] = field(default_factory=set)
    further_steps: int = 0
    finished_at: float | None = None
    cancelled_at: float | None = None
    # Time: in flight (own, tree), on a worker (tree), and between calls (tree).
    own_since: float = 0.0
    own_active_s: float = 0.0
    active_since: float = 0.0
    active_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    running_s: float = 0.0
    idle_since: float | None = None
    tool_s: float = 0.0

    @property
    def tenant(self) -> str:
        return self.key[0]

    @property
    def run_id(self) -> str:
        return self.key[1]

    def __repr__(self) -> str:
        return f"Run({self.run_id!r} of {self.tenant!r})"

    def ran(self, sent_at: float, now: float) -> None:
        """Something of the tree was on a worker from then to now."""
        spans = self.spans
        start = sent_at
        while spans and spans[-1][1] >= start:
            first = spans.pop()[0]
            if first < start:
                start = first
        spans.append((start, now))
        if len(spans) > MOST_SPANS:
            spans[0:2] = [(spans[0][0], spans[1][1])]


class RunFacts(Struct, frozen=True, kw_only=True):
    """A run as it stands. Own figures, and those of the whole tree below it; times in seconds, of the tree.

    active_s: at least one call was in flight; running_s: of these, at least one was on a worker, as far as calls in
    flight have been told of; tool_s: nothing was in flight between two calls, or between the last call and the end of
    the run; idle_s: since the last call, where nobody knows whether there will be another.
    """

    tenant: str
    run_id: str
    lineage: tuple[str, ...]
    status: RunStatus
    cancelled_with: str | None
    first_at: float
    last_at: float
    finished_at: float | None
    in_flight: tuple[InferenceJob, ...]
    tree_in_flight: int
    refused: int
    steps: int
    totals: Totals
    tree_totals: Totals
    tree_runs: int
    children: tuple[str, ...]
    own_active_s: float
    active_s: float
    running_s: float
    tool_s: float
    idle_s: float


def covered(spans: list[tuple[float, float]]) -> float:
    """How much time is in at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def upwards(run: Run | None) -> Iterator[Run]:
    while run is not None:
        yield run
        run = run.parent


def tree_of(run: Run) -> Iterator[Run]:
    """The run and everything below it, parents first."""
    waiting = [run]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += one.children.values()


def height(run: Run) -> int:
    return 1 + max((height(child) for child in run.children.values()), default=0)
