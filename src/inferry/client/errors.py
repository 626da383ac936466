"""Errors of calls, as types. `code` is the gateway's; the codes are listed in docs/reference/errors.md."""

from collections.abc import Mapping
from typing import Any, ClassVar


class CallError(Exception):
    """A call that failed or was refused.

    `status` is None where no response arrived and for errors within a stream. `retry_after_s` is the time after which
    the gateway expects a retry to succeed. `should_retry` is the gateway's advice, None where it gives none.
    """

    statuses: ClassVar[frozenset[int]] = frozenset()
    codes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.request_id = request_id


class InvalidCall(CallError):
    """The request is invalid, too large, or uses a feature that the model lacks."""

    statuses = frozenset({400, 405, 413, 422})
    codes = frozenset({"invalid_request", "context_length_exceeded", "unsupported_feature", "unknown_lane"})


class AccessDenied(CallError):
    """The key is invalid, or may not use the model or the lane."""

    statuses = frozenset({401, 403})


class BudgetExhausted(CallError):
    """The run, the key or the tenant has spent its budget."""

    statuses = frozenset({402})
    codes = frozenset({"run_budget_exhausted", "tenant_budget_exhausted"})


class NotFound(CallError):
    """The model, the run or the path is unknown."""

    statuses = frozenset({404})


class DeadlineMissed(CallError):
    """The call's deadline passed, cannot be met, or the gateway's time limit for calls was reached."""

    statuses = frozenset({408, 504})
    codes = frozenset({"queue_timeout", "deadline_infeasible", "deadline_exceeded", "request_timeout"})


class RunCancelled(CallError):
    """The run or a parent of it was cancelled."""

    codes = frozenset({"run_cancelled"})


class Overloaded(CallError):
    """A queue or a rate limit is full, or no worker is up. `retry_after_s` says when to retry."""

    statuses = frozenset({429, 503, 529})
    codes = frozenset(
        {"queue_full", "rate_limited", "tenant_concurrency", "kv_quota_exceeded", "no_worker", "draining", "preempted"}
    )


class WorkerFailed(CallError):
    """A worker or the gateway failed while it executed the call."""

    statuses = frozenset({500, 502})
    codes = frozenset({"worker_lost", "worker_timeout", "internal_error"})


class ConnectionFailed(CallError):
    """The gateway could not be reached, or the connection ended or stalled before the answer was complete."""


_TYPES: tuple[type[CallError], ...] = (
    RunCancelled,
    InvalidCall,
    AccessDenied,
    BudgetExhausted,
    NotFound,
    DeadlineMissed,
    Overloaded,
    WorkerFailed,
)


def error_of(status: int | None, headers: Mapping[str, str], body: Any) -> CallError:
    """The error of a response, or of an event within a stream (`status` None). Codes take precedence over statuses."""
    error = body.get("error") if isinstance(body, dict) else None
    fields: dict[str, Any] = error if isinstance(error, dict) else {}
    code, param = _text(fields.get("code")), _text(fields.get("param"))
    by_status = (one for one in _TYPES if status in one.statuses)
    kind = next((one for one in _TYPES if code in one.codes), None) or next(by_status, CallError)
    return kind(
        _text(fields.get("message")) or f"the server answered with status {status}",
        status=status,
        code=code,
        param=param,
        retry_after_s=retry_after_s(headers),
        should_retry={"true": True, "false": False}.get(headers.get("x-should-retry", "")),
        request_id=headers.get("x-request-id"),
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until a retry, from `retry-after-ms`, else `retry-after`. Dates are not read."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text) * unit
    return None


def retry_wait_s(error: CallError, max_wait_s: float) -> float | None:
    """Seconds to wait before a retry; None where the gateway does not ask for one, or later than `max_wait_s`."""
    if error.should_retry is not True or error.retry_after_s is None or error.retry_after_s > max_wait_s:
        return None
    return error.retry_after_s


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
