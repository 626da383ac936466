"""Async jobs: calls that are stored, executed later, and polled for or reported by callback. Times are Unix seconds."""

from typing import Literal, NamedTuple

from msgspec import Struct

from inferry.domain.errors import GatewayError

AsyncJobStatus = Literal["in_progress", "completed", "failed", "cancelled", "expired"]
CallbackStatus = Literal["waiting", "pending", "delivered", "failed"]
"""`waiting`: the job has not ended. `pending`: the receiver has not confirmed. `failed`: the retries are used up."""


class AsyncJobDetail(Struct, frozen=True, kw_only=True):
    """What is stored of a job and never searched for. `headers` are further headers of the call, in lower case. `model`
    is what its body names.
    """

    run_id: str
    step_id: str
    headers: dict[str, str] = {}
    has_deadline: bool = False
    metadata: dict[str, str] | None = None
    callback_url: str | None = None
    model: str = ""


class AsyncJob(Struct, frozen=True, kw_only=True):
    """A job of one tenant. It may run until `deadline`. `size`: stored bytes of its body and its answer.

    `tries` counts tries that were refused or failed. `callback_at` is when the next callback attempt is due, or when
    the callback was delivered.
    """

    id: str
    tenant: str
    key_id: str | None
    endpoint: str
    lane: str
    status: AsyncJobStatus
    created_at: float
    deadline: float
    detail: AsyncJobDetail
    size: int
    tries: int = 0
    ended_at: float | None = None
    expires_at: float | None = None
    answer_status: int | None = None
    request_id: str | None = None
    callback: CallbackStatus | None = None
    callback_at: float | None = None
    callback_attempts: int = 0
    idempotency_key: str | None = None
    request_hash: bytes | None = None


class JobTry(Struct, frozen=True):
    """The next try of a job begins."""

    id: str
    tries: int


class JobEnd(Struct, frozen=True, kw_only=True):
    """How a job ended. The answer is None where there is none."""

    id: str
    status: AsyncJobStatus
    at: float
    expires_at: float | None
    answer_status: int | None = None
    answer: bytes | None = None
    request_id: str | None = None


class JobToCreate(NamedTuple):
    """A job to be stored. Limits of its tenant are checked where they are given."""

    job: AsyncJob
    body: bytes
    quota_bytes: int | None = None
    max_unfinished: int | None = None


class CreatedJobs(NamedTuple):
    """What became of jobs to create, in their order: the job, or the one with its idempotency key, or the refusal; and
    the bytes and jobs that tenants may still store, where their limits were checked.
    """

    jobs: list[AsyncJob | GatewayError]
    left_bytes: dict[str, int]
    left_jobs: dict[str, int]


class Delivery(Struct, frozen=True, kw_only=True):
    """One attempt to deliver a callback: the receiver's status, or why there is none."""

    number: int
    at: float
    status: int | None
    error: str | None
    latency_ms: int


class CallbackSecret(Struct, frozen=True, kw_only=True):
    """A secret that signs callbacks of a tenant. Its key is never printed."""

    id: str
    tenant: str
    key: bytes
    created_at: float
    expires_at: float | None = None

    def __repr__(self) -> str:
        return f"CallbackSecret(id={self.id!r}, tenant={self.tenant!r})"
