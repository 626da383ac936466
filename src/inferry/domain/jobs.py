"""`InferenceJob`: one model call as the gateway sees it."""

import enum
from typing import Any, Final, Literal

from inferry.domain.decisions import Overflow
from inferry.domain.lanes import Lane
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.tracing import JobTrace
from inferry.domain.values import Value


class ResumeMode(enum.Enum):
    """How a job whose attempt is lost or preempted continues. Fixed when the job is created."""

    RESTART = "restart"
    CONTINUE = "continue"


class Estimate(Value):
    """An uncertain count: low <= expected <= high."""

    def __init__(
        self,
        low: int,
        expected: int,
        high: int,
    ) -> None:
        self.low: Final = low
        self.expected: Final = expected
        self.high: Final = high

    @classmethod
    def exactly(cls, count: int) -> "Estimate":
        return cls(count, count, count)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def plus(self, count: int) -> "Estimate":
        """With `count` more, of which none is certain."""
        return Estimate(self.low, self.expected + count, self.high + count)


class Footprint(Value):
    """Prompt, cached and output tokens of a job. Packing spends these, not job counts."""

    def __init__(
        self,
        prompt: Estimate,
        cached: Estimate,
        output: Estimate,
    ) -> None:
        self.prompt: Final = prompt
        self.cached: Final = cached
        self.output: Final = output

    @property
    def prefill_tokens(self) -> int:
        """Expected prompt tokens to compute; at least one, since the last token is never cached."""
        return max(1, self.prompt.expected - self.cached.expected)

    @property
    def peak_kv_tokens(self) -> int:
        """Expected KV tokens at the end of the job, its maximum."""
        return self.prompt.expected + self.output.expected


class PooledInputs(Value):
    """The inputs of a job that embeds or scores: user data, never printed.

    `count`: results in the answer. `ids`: token ids of every sequence; None where the worker tokenises. `pairs`: for a
    score by similarity, the two sequences of each result. `dimensions`: length of the vectors; None: the model's own.
    """

    def __init__(
        self,
        count: int,
        ids: tuple[tuple[int, ...], ...] | None = None,
        pairs: tuple[tuple[int, int], ...] | None = None,
        dimensions: int | None = None,
    ) -> None:
        self.count: Final = count
        self.ids: Final = ids
        self.pairs: Final = pairs
        self.dimensions: Final = dimensions

    def __repr__(self) -> str:
        return f"PooledInputs({self.count} results)"

    def __rich_repr__(self) -> Any:
        yield "count", self.count


class Payload(Value):
    """The user's data: read by workers only, never printed or logged.

    `body`: the JSON as received. `prompt_ids`: set if the tokenizer is available or the client sent token ids.
    `output_limit`: most output tokens of all choices together; None: `token_budget` applies. `stream_fields`: whether
    the body contains `stream` and `stream_options`; None if unknown. `output_cap`: remaining budget, per choice, if it
    is below the requested limit; it replaces the limit in the body. `choices`: the requested `n`. `service_tier`: tier
    to return, if the client asked for one. `context_tokens`: the model's context, None if unknown. `non_streaming`: the
    engine is asked for the whole answer at once. `echo`: text that the gateway writes before the output.
    `media_bytes`: bytes of images, audio, video and files in the body, which say nothing about its tokens.
    `pooled`: the inputs of a job that generates nothing. `cache_salt`: the client's own, which is in the body too.
    `keeps_ids`: events keep the token ids that were requested to resume the job; the reader removes them.
    """

    def __init__(
        self,
        *,
        api: Literal["chat", "completions", "embeddings", "score", "classify"],
        body: bytes,
        sampling: Sampling,
        prompt_ids: tuple[int, ...] | None = None,
        include_usage: bool = False,
        output_limit: int | None = None,
        stream_fields: tuple[bool, bool] | None = None,
        output_cap: int | None = None,
        choices: int = 1,
        service_tier: str | None = None,
        context_tokens: int | None = None,
        non_streaming: bool = False,
        echo: str = "",
        media_bytes: int = 0,
        pooled: PooledInputs | None = None,
        cache_salt: str | None = None,
        keeps_ids: bool = False,
    ) -> None:
        self.api: Final = api
        self.body: Final = body
        self.sampling: Final = sampling
        self.prompt_ids: Final = prompt_ids
        self.include_usage: Final = include_usage
        self.output_limit: Final = output_limit
        self.stream_fields: Final = stream_fields
        self.output_cap: Final = output_cap
        self.choices: Final = choices
        self.service_tier: Final = service_tier
        self.context_tokens: Final = context_tokens
        self.non_streaming: Final = non_streaming
        self.echo: Final = echo
        self.media_bytes: Final = media_bytes
        self.pooled: Final = pooled
        self.cache_salt: Final = cache_salt
        self.keeps_ids: Final = keeps_ids

    def __repr__(self) -> str:
        return f"Payload(api={self.api!r}, {len(self.body)} bytes)"

    def __rich_repr__(self) -> Any:
        yield "api", self.api
        yield "bytes", len(self.body)


class ResumePoint(Value):
    """Where a lost attempt stopped: the ids of the prompt and of the output.

    For a job with stop strings `output_ids` are all ids received, although some text is held back until it cannot be
    part of a stop string. `unsent` is that text; None if it must be recomputed by the engine's rule. `tail` is the end
    of the delivered text: empty if no text was delivered, None if it is not known. `cached_tokens`: what the first
    attempt found cached of the prompt. User data, never printed.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        unsent: str | None = None,
        tail: str | None = None,
        cached_tokens: int = 0,
    ) -> None:
        self.prompt_ids: Final = prompt_ids
        self.output_ids: Final = output_ids
        self.unsent: Final = unsent
        self.tail: Final = tail
        self.cached_tokens: Final = cached_tokens

    def __repr__(self) -> str:
        return f"SoFar({len(self.prompt_ids)} + {len(self.output_ids)} tokens)"

    def __rich_repr__(self) -> Any:
        yield "tokens", len(self.prompt_ids) + len(self.output_ids)


class Prefill(Value):
    """The prompt of a job that has a prefill worker compute it. `footprint` is that of the whole job.

    Once the KV is handed over: `kv_transfer` is what the engine needs to fetch it, as JSON, None if it needs nothing;
    `cached_tokens` are the prompt tokens that the prefill worker had cached, `gpu_seconds` its GPU time.
    """

    def __init__(
        self,
        footprint: Footprint,
        is_handed_over: bool = False,
        kv_transfer: bytes | None = None,
        cached_tokens: int = 0,
        gpu_seconds: float = 0.0,
    ) -> None:
        self.footprint: Final = footprint
        self.is_handed_over: Final = is_handed_over
        self.kv_transfer: Final = kv_transfer
        self.cached_tokens: Final = cached_tokens
        self.gpu_seconds: Final = gpu_seconds


class RepeatPolicy(Value):
    """Identity of a call that may be repeated, and what a repetition may reuse.

    `name` is equal for repetitions of one call of one tenant; None if the call is not repeatable. `keep`: keep the
    answer after the end. `fresh`: do not reuse an answer. `linger_s`: how long the job continues after its client
    disconnects.
    """

    def __init__(
        self,
        name: str | None,
        keep: bool = False,
        fresh: bool = False,
        linger_s: float | None = None,
    ) -> None:
        self.name: Final = name
        self.keep: Final = keep
        self.fresh: Final = fresh
        self.linger_s: Final = linger_s


class InferenceJob(Value):
    """One model call. Run and step ids are scoped by tenant; times are seconds on the gateway's clock.

    `is_batch`: its lane had no TTFT target when it arrived.
    `max_wait_s` bounds holds for a batch; only `deadline` expires a job. `prefix`: chained hashes of prompt slices,
    shortest first; equal entries mean equal prefixes. `key_id`: the API key. `salted`: the prefix cache is salted with
    the tenant. `output_hint`: output tokens the client expects. `resume_point`: where a later attempt continues; None
    if it starts over. `preemptions` and `unreachable_attempts` count earlier attempts that were preempted or whose
    worker could not be reached. `repeat`: whether and how a repeated call shares the answer. `trace`: its trace, while
    tracing is on. `max_kv_tokens`: KV tokens that the calls of its tenant may hold at the same time. `run_kv_quota`:
    the root of its run tree, and the KV tokens that calls of the tree may hold at the same time. `ttft_allowance_s` is
    added to the lane's TTFT target, for the length of the prompt. `is_recorded`: this process writes its attempts to
    the ledger. `composed`: the composed model and stage that the job is a step of, as `name/stage`. `overflow`: why it
    goes to a worker for overflow; None for other jobs. `features`: what its worker must support. `prefill`: set once a
    prefill worker was chosen for its prompt.
    """

    # fmt: off
    def __init__(
        self, *, job_id: str, tenant: str, run_id: str, step_id: str, lane: Lane, route: RouteKey,
        batch_key: BatchKey, footprint: Footprint, token_budget: int, prompt_hash: str, arrived_at: float,
        max_wait_s: float, payload: Payload, request_id: str = "", key_id: str | None = None, salted: bool = True,
        parent_run: str | None = None, session: str | None = None, template_id: str | None = None,
        prefix: tuple[str, ...] = (), output_hint: int | None = None, deadline: float | None = None,
        stream: bool = False, resume: ResumeMode = ResumeMode.RESTART, attempt: int = 1,
        resume_point: ResumePoint | None = None, preemptions: int = 0, unreachable_attempts: int = 0,
        repeat: RepeatPolicy | None = None, trace: JobTrace | None = None, max_kv_tokens: int | None = None,
        ttft_allowance_s: float = 0.0, is_recorded: bool = True, composed: str | None = None,
        overflow: Overflow | None = None, features: tuple[str, ...] = (), prefill: Prefill | None = None,
        run_kv_quota: tuple[str, int] | None = None, is_batch: bool = False,
    ) -> None:
    # fmt: on
        self.job_id: Final = job_id
        self.tenant: Final = tenant
        self.run_id: Final = run_id
        self.step_id: Final = step_id
        self.lane: Final = lane
        self.route: Final = route
        self.batch_key: Final = batch_key
        self.footprint: Final = footprint
        self.token_budget: Final = token_budget
        self.prompt_hash: Final = prompt_hash
        self.arrived_at: Final = arrived_at
        self.max_wait_s: Final = max_wait_s
        self.payload: Final = payload
        self.request_id: Final = request_id
        self.key_id: Final = key_id
        self.salted: Final = salted
        self.parent_run: Final = parent_run
        self.session: Final = session
        self.template_id: Final = template_id
        self.prefix: Final = prefix
        self.output_hint: Final = output_hint
        self.deadline: Final = deadline
        self.stream: Final = stream
        self.resume: Final = resume
        self.attempt: Final = attempt
        self.resume_point: Final = resume_point
        self.preemptions: Final = preemptions
        self.unreachable_attempts: Final = unreachable_attempts
        self.repeat: Final = repeat
        self.trace = trace  # not Final: the tracer sets it before the job is submitted
        self.max_kv_tokens: Final = max_kv_tokens
        self.ttft_allowance_s: Final = ttft_allowance_s
        self.is_recorded: Final = is_recorded
        self.composed: Final = composed
        self.overflow: Final = overflow
        self.features: Final = features
        self.prefill: Final = prefill
        self.run_kv_quota: Final = run_kv_quota
        self.is_batch: Final = is_batch
