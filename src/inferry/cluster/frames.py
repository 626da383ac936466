"""Messages between an ingress process and the owner of its workers.

A frame is its length in four bytes, big-endian, and a msgpack list of messages. Both sides collect what they have to
say in one turn of the event loop and write it as one frame. Bodies and events are bytes and pass through unchanged.

They are msgspec Structs, which mypyc cannot compile, so this module is separate from the compiled ones.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from inferry.domain.jobs import ResumeMode
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ports import ModelCard
from inferry.domain.routes import RouteKey, Task
from inferry.domain.sampling import Sampling
from inferry.domain.streams import FinishReason

VERSION = 4
"""Processes of different versions do not talk to each other."""
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A longer frame ends the connection. A frame with one message is longer than its body by less than 1 MiB."""
BATCH_BYTES = 1024 * 1024
"""A frame with this many bytes takes no further message."""

Purpose = Literal["jobs", "http"]
Counts = tuple[int, int, int]


class Challenge(Struct, tag=1, array_like=True, frozen=True):
    """The owner's first message. `nonce` is random; the peer proves with it that it knows the secret."""

    version: int
    nonce: bytes


class Hello(Struct, tag=2, array_like=True, frozen=True):
    """The peer's first message. A connection for `http` carries one HTTP connection of a client at address `peer`."""

    version: int
    purpose: Purpose
    nonce: bytes
    proof: bytes
    peer: str = ""


class Welcome(Struct, tag=3, array_like=True, frozen=True):
    """The owner's proof, and the epoch of its ownership."""

    epoch: int
    proof: bytes


class ResumeFields(Struct, array_like=True, frozen=True, gc=False):
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    unsent: str | None
    tail: str | None
    cached_tokens: int = 0


class ErrorFields(Struct, array_like=True, frozen=True, gc=False):
    """A `GatewayError`. `name` is its class; `tokens` are those of ContextLengthExceeded."""

    name: str
    message: str
    param: str | None
    retry_after_s: float | None
    predicted_wait_s: float | None
    has_own_retry_time: bool
    tokens: tuple[int | None, int | None, int | None] | None = None


class RateLimitFields(Struct, array_like=True, frozen=True, gc=False):
    """The rate limits of the job's caller after its admission (`admission.reports.RateLimitStatus`)."""

    request_limit: int | None
    requests_left: int | None
    request_reset_s: float | None
    token_limit: int | None
    tokens_left: int | None
    token_reset_s: float | None


class UsageFields(Struct, array_like=True, frozen=True, gc=False):
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_seconds: float | None


class PooledFields(Struct, array_like=True, frozen=True):
    count: int
    ids: tuple[tuple[int, ...], ...] | None
    pairs: tuple[tuple[int, int], ...] | None
    dimensions: int | None


class PayloadFields(Struct, array_like=True, frozen=True):
    """`domain.jobs.Payload`, without what only the ingress reads."""

    api: Literal["chat", "completions", "embeddings", "score", "classify"]
    body: bytes
    sampling: Sampling
    prompt_ids: tuple[int, ...] | None
    include_usage: bool
    output_limit: int | None
    stream_fields: tuple[bool, bool] | None
    output_cap: int | None
    choices: int
    service_tier: str | None
    context_tokens: int | None
    non_streaming: bool
    echo: str
    media_bytes: int
    pooled: PooledFields | None
    cache_salt: str | None


class RepeatFields(Struct, array_like=True, frozen=True, gc=False):
    name: str | None
    keep: bool
    fresh: bool
    linger_s: float | None


class JobFields(Struct, array_like=True, frozen=True):
    """`domain.jobs.InferenceJob`. Times are seconds before (`age_s`) and after (`deadline_in_s`) the frame is written,
    because the clocks of two hosts differ. `trace` are the trace headers of the attempt at the ingress.
    """

    job_id: str
    tenant: str
    key_id: str | None
    run_id: str
    step_id: str
    parent_run: str | None
    lane: Lane
    route: RouteKey
    batch: tuple[Task, bool, str | None]
    footprint: tuple[Counts, Counts, Counts]
    token_budget: int
    prompt_hash: str
    age_s: float
    deadline_in_s: float | None
    max_wait_s: float
    payload: PayloadFields
    request_id: str
    salted: bool
    session: str | None
    template_id: str | None
    prefix: tuple[str, ...]
    output_hint: int | None
    stream: bool
    resume: ResumeMode
    attempt: int
    resume_point: ResumeFields | None
    preemptions: int
    unreachable_attempts: int
    repeat: RepeatFields | None
    trace: dict[bytes, bytes] | None
    max_kv_tokens: int | None
    ttft_allowance_s: float
    composed: str | None = None
    features: tuple[str, ...] = ()
    run_kv_quota: tuple[str, int] | None = None
    is_batch: bool = False


class Submit(Struct, tag=4, array_like=True, frozen=True):
    """A job for the owner. `key` names it on this connection. `is_admitted`: its quotas and budgets were checked."""

    key: int
    is_admitted: bool
    job: JobFields


class Cancel(Struct, tag=5, array_like=True, frozen=True):
    """End jobs. The answer has the same `call`."""

    call: int
    keys: list[int]


class Cancelled(Struct, tag=6, array_like=True, frozen=True):
    """The jobs of a `Cancel` that are confirmed to hold nothing."""

    call: int
    keys: list[int]


class Placed(Struct, tag=7, array_like=True, frozen=True):
    """The job's worker, its time in the queue in seconds and the size of its batch; before its first piece."""

    key: int
    worker: str
    queue_s: float
    batch_size: int
    shared_with: str | None
    is_replay: bool
    rate_limits: RateLimitFields | None


class Piece(Struct, tag=8, array_like=True, frozen=True, gc=False):
    """Output of a job (`domain.streams.Delta`)."""

    key: int
    tokens: int
    raw: bytes
    text: str
    token_ids: tuple[int, ...]
    is_last: bool


class Restart(Struct, tag=9, array_like=True, frozen=True):
    """The owner runs another attempt of the job; without a resume point, earlier output is void."""

    key: int
    attempt: int
    resume_point: ResumeFields | None


class Finish(Struct, tag=10, array_like=True, frozen=True):
    """The end of a job (`domain.streams.Done`). `shape` is for whole answers."""

    key: int
    finish: FinishReason
    usage: UsageFields
    raw: bytes
    stopped: ErrorFields | None
    stopped_by_engine: bool
    stop_reason: str | int | None
    shape: dict[str, Any] | None


class Failure(Struct, tag=11, array_like=True, frozen=True):
    """The end of a job (`domain.streams.Failed`)."""

    key: int
    error: ErrorFields
    usage: UsageFields
    resume_point: ResumeFields | None
    rate_limits: RateLimitFields | None


class ServedModels(Struct, array_like=True, frozen=True):
    """The models of the owner's workers with one isolation and precision. `is_up`: one of them is ready."""

    isolation: str | None
    precision: str | None
    is_up: bool
    models: frozenset[str]
    adapters: frozenset[str]
    cards: tuple[ModelCard, ...]


class Catalog(Struct, tag=12, array_like=True, frozen=True):
    """The owner's workers; sent at the start and after every change.

    `drained` and `adapters` are what operators have changed: the next owner does the same to its workers. An adapter
    is its name, path and base model. `desired` is the scaling advice: group and number of workers. `lanes` are the
    policies in use, and `tried_lanes` those of a trial. `tokenizers` are fingerprints by model: of the models whose
    prompts the owner tokenizes. None from an owner of an earlier version, which expects token ids.
    """

    served: tuple[ServedModels, ...]
    drained: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str, str | None], ...] = ()
    desired: tuple[tuple[str, int], ...] = ()
    lanes: dict[Lane, LanePolicy] = {}
    tried_lanes: dict[Lane, LanePolicy] = {}
    tokenizers: dict[str, str] | None = None


class TenantsChanged(Struct, tag=13, array_like=True, frozen=True):
    """Tenants or keys were changed: read them again."""


class RequestsServed(Struct, tag=14, array_like=True, frozen=True):
    """HTTP requests that the ingress has answered since its last report: path, status, number."""

    counts: list[tuple[str, int, int]]


class Ping(Struct, tag=15, array_like=True, frozen=True):
    """A sign of life, where there is nothing else to say."""


class EndRun(Struct, tag=16, array_like=True, frozen=True):
    """A run has ended at the ingress: nothing is kept for its next call."""

    tenant: str
    run_id: str


Message = (
    Challenge
    | Hello
    | Welcome
    | Submit
    | Cancel
    | Cancelled
    | Placed
    | Piece
    | Restart
    | Finish
    | Failure
    | Catalog
    | TenantsChanged
    | RequestsServed
    | Ping
    | EndRun
)


def _encode_other(value: object) -> object:
    """A shape marks present fields by an ellipsis; any value but None and an object reads alike."""
    if value is ...:
        return True
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder(list[Message])


class FrameError(Exception):
    """The peer sent bytes that are no frame. The message has nothing of them."""


def encode_frame(messages: list[Any]) -> bytes:
    """The messages as one frame."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(messages, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(frame)


def decode_frame(payload: bytes | memoryview) -> list[Message]:
    """Raises FrameError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"invalid frame of {len(payload)} bytes ({type(error).__name__})") from None
