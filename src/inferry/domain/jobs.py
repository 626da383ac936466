"""The job: one model call as the gateway sees it, and what packing needs to know about it."""

import enum
from typing import Any, Final, Literal

from inferry.domain.lanes import Lane
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.values import Value


class ResumeMode(enum.Enum):
    """What may happen to a job whose attempt is lost or preempted (fixed when it is dispatched)."""

    RESTART = "restart"
    NATIVE = "native"
    CONTINUE = "continue"
    NEVER = "never"


class Estimate(Value):
    """A count that may not be known: low <= expected <= high."""

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


class Footprint(Value):
    """What packing spends: prompt, cached and output tokens. Never a job count alone."""

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
        """Prompt tokens the engine is expected to compute; at least one, since the last is never cached."""
        return max(1, self.prompt.expected - self.cached.expected)

    @property
    def peak_kv_tokens(self) -> int:
        """KV the job is expected to hold at its end, when it holds most."""
        return self.prompt.expected + self.output.expected


class Payload(Value):
    """The hazardous part of a job: what the user wrote. Workers read it; nothing else does, nothing prints it.

    `body` is the JSON as the client sent it. `prompt_ids` is present when the model's tokenizer is at hand or the
    client sent token ids. `output_limit` is what an engine that keeps its word cannot exceed, over all choices; None
    leaves that to the job's budget. `stream_fields` says whether the body names `stream` and `stream_options`, so
    that nobody has to search a long one for them; None where nobody has looked. `output_cap` is what is left of a
    budget where that is less than the client asked for: it takes the place of the body's limit, per choice.
    `choices` is how many answers are asked for. `service_tier` is the service tier to be named in the answer, where the
    client asked for one. `context_tokens` is the model's context, None where it is not known. `non_streaming`: it is to
    be asked for in one piece.
    """

    def __init__(
        self,
        *,
        api: Literal["chat", "completions"],
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

    def __repr__(self) -> str:
        return f"Payload(api={self.api!r}, {len(self.body)} bytes)"

    def __rich_repr__(self) -> Any:
        yield "api", self.api
        yield "bytes", len(self.body)


class ResumePoint(Value):
    """What it takes to go on where an attempt broke off: the ids of the prompt, and of the output that was delivered.

    Of a job with stop strings the output's ids are all that came, for some of its text is held back until no stop
    string can be completed with it. `unsent` is that text; None where only the engine knew, by whose rule it is found
    again. `tail` is the end of the text that was delivered, as far as it is known.
    As hazardous as the payload: nothing prints it.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        output_ids: tuple[int, ...],
        unsent: str | None = None,
        tail: str | None = None,
    ) -> None:
        self.prompt_ids: Final = prompt_ids
        self.output_ids: Final = output_ids
        self.unsent: Final = unsent
        self.tail: Final = tail

    def __repr__(self) -> str:
        return f"SoFar({len(self.prompt_ids)} + {len(self.output_ids)} tokens)"

    def __rich_repr__(self) -> Any:
        yield "tokens", len(self.prompt_ids) + len(self.output_ids)


class RepeatPolicy(Value):
    """How a call that is made again is known to be the same, and what it may get then.

    `name` is equal for the same call of one tenant; None where nothing says which that is. `keep` asks for its answer
    to be kept after its end; `fresh` for one of its own whatever there is. `linger_s` is how long it goes on without
    its client, for it to come back.
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
    """One model call: whose it is, what it promises, what it needs. Run and step ids are scoped by tenant.

    Times are seconds on the gateway's clock. `max_wait_s` bounds voluntary holding only; `deadline` alone expires.
    `prefix` are chained hashes over slices of the prompt, shortest first: equal entries mean equal beginnings.
    `key_id` is the key it came with; `salted` keeps its prompt apart from other tenants' in prefix caches.
    `output_hint` is how much the client expects to get. From the second attempt on, `resume_point` is where to go on
    (None where nothing was delivered and the job starts again). `preemptions` counts the attempts that were stopped for
    somebody else, `unreachable_attempts` those whose worker could not be reached. `repeat` is what the client says
    about calls that are made again.
    """

    def __init__(
        self,
        *,
        job_id: str,
        tenant: str,
        run_id: str,
        step_id: str,
        lane: Lane,
        route: RouteKey,
        batch_key: BatchKey,
        footprint: Footprint,
        token_budget: int,
        prompt_hash: str,
        arrived_at: float,
        max_wait_s: float,
        payload: Payload,
        request_id: str = "",
        key_id: str | None = None,
        salted: bool = True,
        parent_run: str | None = None,
        session: str | None = None,
        template_id: str | None = None,
        prefix: tuple[str, ...] = (),
        output_hint: int | None = None,
        deadline: float | None = None,
        stream: bool = False,
        resume: ResumeMode = ResumeMode.RESTART,
        attempt: int = 1,
        resume_point: ResumePoint | None = None,
        preemptions: int = 0,
        unreachable_attempts: int = 0,
        repeat: RepeatPolicy | None = None,
    ) -> None:
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
