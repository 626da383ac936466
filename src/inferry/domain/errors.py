"""Every failure of a call, as a type with a public contract. `ingress.errors` maps them to HTTP."""

from typing import ClassVar


class GatewayError(Exception):
    """A refusal or failure that a client may see.

    `message` contains no text of a prompt, except where a server's refusal of a request is forwarded. Such a message
    goes to the caller alone and is never logged or stored.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    """Whether clients should repeat the same call without being asked to."""
    can_failover: bool = False
    """Whether the job may be retried on another worker, or later on the same one. A property of the class; False for
    an error that another process reports, which has retried what it could."""
    predicted_wait_s: float | None = None
    """Predicted queue wait, if the job was refused because of it."""
    has_own_retry_time: bool = False
    """Whether `retry_after_s` was computed for this call alone. Other values are jittered before they are sent."""

    has_client_names: bool = False
    """Whether the message names fields as the client's API does; others may name those of chat completions."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(GatewayError):
    """A defect of the gateway."""


class FunctionFailed(GatewayError):
    """A Python function of a pipeline raised an exception, or returned a value of another type than declared."""

    status, code = 500, "function_failed"


class InvalidRequest(GatewayError):
    """The body or a header is invalid."""

    status, code = 400, "invalid_request"


class ContextLengthExceeded(GatewayError):
    """Prompt and requested output exceed the model's context."""

    status, code = 400, "context_length_exceeded"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Tokens of the prompt and the requested output; None where the prompt alone is too long, or unknown."""
    context_tokens: int | None = None

    def with_tokens(self, prompt: int, output: int | None, context: int) -> "ContextLengthExceeded":
        self.prompt_tokens, self.output_tokens, self.context_tokens = prompt, output, context
        return self


class UnsupportedFeature(GatewayError):
    """The request is valid, but no worker of the model supports a feature it uses."""

    status, code = 400, "unsupported_feature"


class UnknownLane(GatewayError):
    """The lane is not P0, P1 or P2."""

    status, code = 400, "unknown_lane"


class InvalidApiKey(GatewayError):
    """The API key is missing, unknown, expired or revoked."""

    status, code = 401, "invalid_api_key"


class RunBudgetExhausted(GatewayError):
    """The run, or a parent of it, has spent its token or money budget."""

    status, code = 402, "run_budget_exhausted"


class TenantBudgetExhausted(GatewayError):
    """The tenant or the key has spent its daily or monthly token or money budget."""

    status, code = 402, "tenant_budget_exhausted"


class ModelNotAllowed(GatewayError):
    """The key may not use the model."""

    status, code = 403, "model_not_allowed"


class LaneNotAllowed(GatewayError):
    """The lane is above the key's highest lane."""

    status, code = 403, "lane_not_allowed"


class AdminOnly(GatewayError):
    """The client may not use the admin API."""

    status, code = 403, "admin_only"


class StorageDisabled(GatewayError):
    """The request needs stored content, and `storage.store` is `never`."""

    status, code = 403, "storage_disabled"


class ModelNotFound(GatewayError):
    """No worker serves the model."""

    status, code = 404, "model_not_found"


class RunNotFound(GatewayError):
    """The tenant has no run with this id."""

    status, code = 404, "run_not_found"


class NotFound(GatewayError):
    """The path does not exist."""

    status, code = 404, "not_found"


class MethodNotAllowed(GatewayError):
    """The path does not support the method."""

    status, code = 405, "method_not_allowed"


class QueueTimeout(GatewayError):
    """The deadline passed while the job was queued."""

    status, code = 408, "queue_timeout"


class DeadlineInfeasible(GatewayError):
    """The job would almost certainly wait past its deadline (P10 of the queue wait); it was not queued."""

    status, code = 408, "deadline_infeasible"


class DeadlineExceeded(GatewayError):
    """The call's own deadline passed while it ran; what was written before stands."""

    status, code = 504, "deadline_exceeded"


class RequestTimeout(GatewayError):
    """The call took longer than `server.request_timeout_s`, waiting included."""

    status, code = 504, "request_timeout"


class RunCancelled(GatewayError):
    """The run, or a parent of it, was cancelled; new calls of it are refused."""

    status, code = 409, "run_cancelled"


class Conflict(GatewayError):
    """The object already exists or has changed since it was read."""

    status, code = 409, "conflict"


class BodyTooLarge(GatewayError):
    """The body exceeds `server.max_body_bytes`."""

    status, code = 413, "body_too_large"


class StorageQuotaExceeded(GatewayError):
    """The tenant has reached `storage.max_bytes_per_tenant`; delete files or wait until some expire."""

    status, code = 413, "storage_quota_exceeded"


class QueueFull(GatewayError):
    """The lane's queue is full; retry after the jobs ahead have drained."""

    status, code, retryable = 429, "queue_full", True


class RateLimited(GatewayError):
    """The requests or tokens per minute are used up; retry once the bucket has refilled."""

    status, code, retryable = 429, "rate_limited", True


class TenantConcurrency(GatewayError):
    """The tenant or the key has reached its limit of concurrent calls or runs."""

    status, code, retryable = 429, "tenant_concurrency", True


class KvQuotaTooSmall(GatewayError):
    """The call alone would hold more KV cache tokens than the tenant, the key or the run may hold."""

    status, code = 400, "kv_quota_too_small"


class KvQuotaExceeded(GatewayError):
    """The call would hold more KV cache tokens than the tenant, the key or the run may hold at the same time."""

    status, code, retryable = 429, "kv_quota_exceeded", True


class ClientClosed(GatewayError):
    """The client disconnected before the end. Logged, never sent."""

    status, code = 499, "client_closed"


class IngressLost(ClientClosed):
    """The ingress process of the call disconnected. It may offer the call again, and then the last attempt pays."""


class CallAborted(GatewayError):
    """Another prompt of the same call failed or was refused. Recorded, never sent."""

    status, code = 499, "call_aborted"


class WorkerLost(GatewayError):
    """The worker died, closed the stream early or sent an invalid answer."""

    status, code, retryable, can_failover = 502, "worker_lost", True, True


class UpstreamRefused(GatewayError):
    """The worker rejected the request."""

    status, code = 400, "invalid_request"


class NoWorker(GatewayError):
    """Workers are configured for the model, but none is up."""

    status, code, retryable, can_failover = 503, "no_worker", True, True


class WorkerUnreachable(NoWorker):
    """The worker could not be reached; the job has not started."""


class ConnectFailed(WorkerUnreachable):
    """The worker's server accepted no connection, which is no job's fault."""


NOT_OWNER = "this process no longer owns the worker"


class Draining(GatewayError):
    """The gateway is shutting down and accepts no new calls."""

    status, code, retryable = 503, "draining", True


class LedgerUnavailable(GatewayError):
    """The ledger's database is unavailable and the call requires it."""

    status, code, retryable = 503, "ledger_unavailable", True


class ReportTimeout(GatewayError):
    """The database took too long for a report; a shorter period takes less time."""

    status, code = 503, "report_timeout"


class Preempted(GatewayError):
    """The job was preempted by a higher lane and could not resume."""

    status, code, retryable, can_failover = 503, "preempted", True, True


class Prefilled(Preempted):
    """The prompt was computed and its KV is ready for another worker. Ends an attempt, never a call."""

    kv_transfer: bytes | None = None
    """What the engine needs to fetch the KV, as JSON."""


class WorkerTimeout(GatewayError):
    """The worker stopped responding."""

    status, code, retryable, can_failover = 504, "worker_timeout", True, True
