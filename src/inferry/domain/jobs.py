"""The job: one model call as the gateway sees it, and what packing needs to know about it."""

import enum
from typing import Any, Literal

from msgspec import Struct


class Lane(enum.IntEnum):
    """A promise of latency. The number orders lanes inside the gateway and never goes over the wire."""

    P0 = 0
    P1 = 1
    P2 = 2


class Task(enum.Enum):
    GENERATE = "generate"


class Resume(enum.Enum):
    """What may happen to a job whose attempt is lost or preempted (fixed when it is dispatched)."""

    RESTART = "restart"
    NATIVE = "native"
    CONTINUE = "continue"
    NEVER = "never"


class RouteKey(Struct, frozen=True, gc=False):
    """Which workers may take a job. `isolation` names the tenant pool it must stay in, if any.

    `avoid` names workers that get it only where nobody else is up: those that have lost it.
    """

    model: str
    precision: str | None = None
    adapter: str | None = None
    isolation: str | None = None
    avoid: tuple[str, ...] = ()


class BatchKey(Struct, frozen=True, gc=False):
    """What may share one padded pass. It splits queues only in front of workers that pad."""

    route: RouteKey
    task: Task = Task.GENERATE
    streaming: bool = False
    attention: str | None = None


class Estimate(Struct, frozen=True, gc=False):
    """A count that may not be known: low <= expected <= high."""

    low: int
    expected: int
    high: int

    @classmethod
    def exactly(cls, count: int) -> "Estimate":
        return cls(count, count, count)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


class Footprint(Struct, frozen=True, gc=False):
    """What packing spends: prompt, cached and output tokens. Never a job count alone."""

    prompt: Estimate
    cached: Estimate
    output: Estimate

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens the engine is expected to compute; at least one, since the last is never cached."""
        return max(1, self.prompt.expected - self.cached.expected)

    @property
    def peak_kv_tokens(self) -> int:
        """KV the job is expected to hold at its end, when it holds most."""
        return self.prompt.expected + self.output.expected


class Sampling(Struct, frozen=True, kw_only=True, gc=False):
    """How the next token is chosen and when to stop, for engines that take tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Payload(Struct, frozen=True, kw_only=True):
    """The hazardous part of a job: what the user wrote. Workers read it; nothing else does, nothing prints it.

    `body` is the JSON as the client sent it. `prompt_ids` is present when the model's tokenizer is at hand or the
    client sent token ids. `output_limit` is what an engine that keeps its word cannot exceed, over all choices; None
    leaves that to the job's budget. `stream_fields` says whether the body names `stream` and `stream_options`, so
    that nobody has to search a long one for them; None where nobody has looked. `output_cap` is what is left of a
    budget where that is less than the client asked for: it takes the place of the body's limit, per choice.
    `choices` is how many answers are asked for. `tier` is the service tier to be named in the answer, where the client
    asked for one. `context_tokens` is the model's context, None where it is not known. `whole`: it is to be asked for
    in one piece.
    """

    api: Literal["chat", "completions"]
    body: bytes
    sampling: Sampling
    prompt_ids: tuple[int, ...] | None = None
    include_usage: bool = False
    output_limit: int | None = None
    stream_fields: tuple[bool, bool] | None = None
    output_cap: int | None = None
    choices: int = 1
    tier: str | None = None
    context_tokens: int | None = None
    whole: bool = False

    def __repr__(self) -> str:
        return f"Payload(api={self.api!r}, {len(self.body)} bytes)"

    __str__ = __repr__

    def __rich_repr__(self) -> Any:
        yield "api", self.api
        yield "bytes", len(self.body)


class SoFar(Struct, frozen=True):
    """What it takes to go on where an attempt broke off: the ids of the prompt, and of the output that was delivered.

    Of a job with stop strings the output's ids are all that came, for some of its text is held back until no stop
    string can be completed with it. `unsent` is that text; None where only the engine knew, by whose rule it is found
    again. `tail` is the end of the text that was delivered, as far as it is known.
    As hazardous as the payload: nothing prints it.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    unsent: str | None = None
    tail: str | None = None

    def __repr__(self) -> str:
        return f"SoFar({len(self.prompt_ids)} + {len(self.output_ids)} tokens)"

    __str__ = __repr__

    def __rich_repr__(self) -> Any:
        yield "tokens", len(self.prompt_ids) + len(self.output_ids)


class Repeat(Struct, frozen=True, gc=False):
    """How a call that is made again is known to be the same, and what it may get then.

    `name` is equal for the same call of one tenant; None where nothing says which that is. `keep` asks for its answer
    to be kept after its end; `fresh` for one of its own whatever there is. `linger_s` is how long it goes on without
    its client, for it to come back.
    """

    name: str | None
    keep: bool = False
    fresh: bool = False
    linger_s: float | None = None


class InferenceJob(Struct, frozen=True, kw_only=True):
    """One model call: whose it is, what it promises, what it needs. Run and step ids are scoped by tenant.

    Times are seconds on the gateway's clock. `max_wait_s` bounds voluntary holding only; `deadline` alone expires.
    `prefix` are chained hashes over slices of the prompt, shortest first: equal entries mean equal beginnings.
    `key_id` is the key it came with; `salted` keeps its prompt apart from other tenants' in prefix caches.
    `output_hint` is how much the client expects to get. From the second attempt on, `so_far` is where to go on (None
    where nothing was delivered and the job starts again). `preemptions` counts the attempts that were stopped for
    somebody else, `unreached` those whose worker could not be reached. `repeat` is what the client says about calls
    that are made again.
    """

    job_id: str
    tenant: str
    run_id: str
    step_id: str
    lane: Lane
    route: RouteKey
    batch_key: BatchKey
    footprint: Footprint
    token_budget: int
    prompt_hash: str
    arrived_at: float
    max_wait_s: float
    payload: Payload
    request_id: str = ""
    key_id: str | None = None
    salted: bool = True
    parent_run: str | None = None
    session: str | None = None
    template_id: str | None = None
    prefix: tuple[str, ...] = ()
    output_hint: int | None = None
    deadline: float | None = None
    stream: bool = False
    resume: Resume = Resume.RESTART
    attempt: int = 1
    so_far: SoFar | None = None
    preemptions: int = 0
    unreached: int = 0
    repeat: Repeat | None = None


class LanePolicy(Struct, frozen=True, kw_only=True):
    """What a lane promises and how it forms batches. Times in milliseconds, as people write them.

    `coalesce_ms` is the longest a job is held for company, counted from its arrival; `max_wait_ms` bounds all
    voluntary holding. `share` is the part of admitted prompt tokens a lower lane is owed while higher lanes are busy;
    `reserve` is the part of every worker's room that it leaves to them. `may_preempt` names lanes whose running jobs
    may be stopped for one of this lane; `preemptible` says whether this lane's may.
    `ttft_ms` and `gap_ms` are the promise that attainment is measured against.
    From the part `refuse_at` of `queue_limit` on no newcomer is queued; the rest is for jobs that come back.
    """

    max_wait_ms: float
    coalesce_ms: float
    window: Literal["adaptive", "fixed", "off"] = "adaptive"
    max_batch: int = 64
    queue_limit: int = 10_000
    refuse_at: float = 0.8
    share: float = 0.0
    reserve: float = 0.0
    may_preempt: tuple[Lane, ...] = ()
    preemptible: bool = False
    ttft_ms: float | None = None
    gap_ms: float | None = None


DEFAULT_LANES: dict[Lane, LanePolicy] = {
    Lane.P0: LanePolicy(max_wait_ms=25, coalesce_ms=8, may_preempt=(Lane.P2,), ttft_ms=500, gap_ms=30),
    Lane.P1: LanePolicy(max_wait_ms=120, coalesce_ms=25, share=0.10, reserve=0.05, ttft_ms=2000, gap_ms=50),
    Lane.P2: LanePolicy(max_wait_ms=30_000, coalesce_ms=400, share=0.05, reserve=0.25, preemptible=True),
}
