"""Every way a call can fail, as a type with a public contract. `ingress.errors` maps them to HTTP, once."""

from typing import ClassVar


class GatewayError(Exception):
    """A refusal or failure that a client may see. `message` never holds what a user wrote."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    can_failover: ClassVar[bool] = False
    """Whether the job itself is blameless: another worker, or the same one later, may do it."""
    predicted_wait_s: float | None = None
    """How long the job would have been queued, where that is why it was refused."""
    has_own_retry_time: bool = False
    """Whether `retry_after_s` was worked out for this call alone. Others are told the same, and must be spread out."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(GatewayError):
    """A fault of the gateway itself."""


class InvalidRequest(GatewayError):
    """The body or a header does not say what it must."""

    status, code = 400, "invalid_request"


class ContextLengthExceeded(GatewayError):
    """Prompt and requested output do not fit the model's context."""

    status, code = 400, "context_length_exceeded"


class UnsupportedFeature(GatewayError):
    """The request is well formed, but no worker of this model can do what it asks."""

    status, code = 400, "unsupported_feature"


class UnknownLane(GatewayError):
    """The lane is none of P0, P1, P2."""

    status, code = 400, "unknown_lane"


class InvalidApiKey(GatewayError):
    """No key was given, or none that is known, current and unrevoked."""

    status, code = 401, "invalid_api_key"


class RunBudgetExhausted(GatewayError):
    """The run, or one it belongs to, has used up its tokens or its money."""

    status, code = 402, "run_budget_exhausted"


class TenantBudgetExhausted(GatewayError):
    """The tenant, or the key, has used up its day's or month's tokens or money."""

    status, code = 402, "tenant_budget_exhausted"


class ModelNotAllowed(GatewayError):
    """The model is served, but not for this key."""

    status, code = 403, "model_not_allowed"


class LaneNotAllowed(GatewayError):
    """The lane is above the highest that the key may use."""

    status, code = 403, "lane_not_allowed"


class AdminOnly(GatewayError):
    """Administration is not for this client."""

    status, code = 403, "admin_only"


class ModelNotFound(GatewayError):
    """No worker serves the model."""

    status, code = 404, "model_not_found"


class RunNotFound(GatewayError):
    """The tenant has no run of this name."""

    status, code = 404, "run_not_found"


class NotFound(GatewayError):
    """No such path."""

    status, code = 404, "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, the method on it does not."""

    status, code = 405, "method_not_allowed"


class QueueTimeout(GatewayError):
    """The deadline passed while the job was still queued."""

    status, code, retryable = 408, "queue_timeout", True


class DeadlineInfeasible(GatewayError):
    """The job would not be done before its deadline, so it is not queued at all."""

    status, code, retryable = 408, "deadline_infeasible", True


class RunCancelled(GatewayError):
    """The run, or one it belongs to, was cancelled: nothing of it is taken any more."""

    status, code = 409, "run_cancelled"


class Conflict(GatewayError):
    """What is to be made exists already, or has changed meanwhile."""

    status, code = 409, "conflict"


class BodyTooLarge(GatewayError):
    """The body is over the configured limit."""

    status, code = 413, "body_too_large"


class QueueFull(GatewayError):
    """The lane is at its limit; retry after what is ahead has drained."""

    status, code, retryable = 429, "queue_full", True


class RateLimited(GatewayError):
    """Requests or tokens per minute are used up; retry when the bucket has filled."""

    status, code, retryable = 429, "rate_limited", True


class TenantConcurrency(GatewayError):
    """As many calls of the tenant, or of the key, are in flight as may be."""

    status, code, retryable = 429, "tenant_concurrency", True


class ClientClosed(GatewayError):
    """The client left before the end. Logged, never sent."""

    status, code = 499, "client_closed"


class WorkerLost(GatewayError):
    """The worker died, broke off or answered nonsense."""

    status, code, retryable, can_failover = 502, "worker_lost", True, True


class UpstreamRefused(GatewayError):
    """The worker refused this one job for a reason of its own."""

    status, code = 400, "invalid_request"


class NoWorker(GatewayError):
    """Workers serve the model, but none is up or has room."""

    status, code, retryable, can_failover = 503, "no_worker", True, True


class WorkerUnreachable(NoWorker):
    """The worker could not be reached: nothing of the job has begun there."""


class Draining(GatewayError):
    """The gateway is shutting down and takes no new work."""

    status, code, retryable = 503, "draining", True


class LedgerUnavailable(GatewayError):
    """The database cannot be used, and the call may not be served without it."""

    status, code, retryable = 503, "ledger_unavailable", True


class Preempted(GatewayError):
    """The job was stopped for one of a higher lane and could not go on."""

    status, code, retryable, can_failover = 503, "preempted", True, True


class WorkerTimeout(GatewayError):
    """The worker fell silent."""

    status, code, retryable, can_failover = 504, "worker_timeout", True, True
