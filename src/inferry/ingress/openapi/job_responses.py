"""Bodies of async jobs and callbacks, for the OpenAPI document only. Times are seconds since 1970."""

from typing import Any, Literal

from msgspec import Struct


class JobResponse(Struct, forbid_unknown_fields=True):
    """What the endpoint answered."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class JobCallback(Struct, forbid_unknown_fields=True):
    """The callback. `failed`: it was not confirmed within `callbacks.retry_for_s`."""

    url: str
    status: Literal["waiting", "pending", "delivered", "failed"]
    attempts: int
    next_attempt_at: int | None
    delivered_at: int | None


class JobData(Struct, forbid_unknown_fields=True):
    """An async job, as callbacks have it."""

    id: str
    object: Literal["job"]
    status: Literal["in_progress", "completed", "failed", "cancelled", "expired"]
    endpoint: str
    lane: str
    run_id: str
    step_id: str
    created_at: int
    deadline_at: int
    ended_at: int | None
    expires_at: int | None
    metadata: dict[str, str] | None
    response: JobResponse | None


class JobObject(JobData, forbid_unknown_fields=True):
    """An async job. A job is `completed` by a response with status 2xx and `failed` by any other response."""

    callback: JobCallback | None


class JobList(Struct, forbid_unknown_fields=True):
    """Jobs without their responses."""

    object: Literal["list"]
    data: list[JobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedJob(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["job"]
    deleted: Literal[True]


class DeliveryAttempt(Struct, forbid_unknown_fields=True):
    """One attempt to deliver a callback: the receiver's status, or why there is none."""

    number: int
    at: float
    status: int | None
    error: Literal["forbidden", "dns", "connect", "tls", "timeout", "response", "no_secret"] | None
    latency_ms: int


class DeliveryLog(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[DeliveryAttempt]


class JobEvent(Struct, forbid_unknown_fields=True):
    """The body of a callback. `timestamp` is RFC 3339."""

    type: Literal["job.completed", "job.failed", "job.cancelled", "job.expired"]
    timestamp: str
    data: JobData


class CallbackSecretDetail(Struct, forbid_unknown_fields=True):
    """A secret that signs callbacks, without its text."""

    id: str
    tenant: str
    status: Literal["valid", "expired"]
    created_at: float
    expires_at: float | None


class CallbackSecretList(Struct, forbid_unknown_fields=True):
    callback_secrets: list[CallbackSecretDetail]


class CreatedCallbackSecret(CallbackSecretDetail, forbid_unknown_fields=True):
    """A new secret. `secret` is its text."""

    secret: str
