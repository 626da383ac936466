"""Errors as HTTP: the one place where a GatewayError becomes a status, headers and an OpenAI-shaped body."""

from math import ceil
from zlib import crc32

import msgspec

from inferry.domain.errors import GatewayError, RateLimited

_TYPES = {
    401: "authentication_error",
    402: "budget_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_DEFAULT_RETRY_AFTER_S = 1.0
_RETRY_JITTER = 0.25
"""Clients that are told the same time come back within so much of it more, each at its own moment."""
_REFUSAL_STATUSES = frozenset({402, 408, 409, 429, 503})
"""What was asked for was in order, and still not done."""
_NOT_RETRYABLE_STATUSES = frozenset({402, 403, 408, 409})
"""Sent again it would be refused again. OpenAI's and Anthropic's clients send some of these again unless told not to:
a deadline, for one, was the client's own, and would start anew."""


def error_body(error: GatewayError) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error"),
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: GatewayError, call_id: str = "") -> bytes:
    """Header lines. `call_id` is what tells this call from others that are refused at the same moment."""
    headers = b"content-type: application/json\r\n"
    if error.status in _REFUSAL_STATUSES:
        headers += b"x-inferry-drop-reason: %b\r\n" % error.code.encode()
    seconds = _retry_after_s(error, call_id)
    if seconds is not None:
        # Both: stock clients read the exact one first, all others know the other.
        headers += b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, ceil(seconds)), ceil(1000 * seconds))
    if error.status in _NOT_RETRYABLE_STATUSES or (error.status == 429 and seconds is None):
        headers += b"x-should-retry: false\r\n"
    elif error.status in (429, 503):
        headers += b"x-should-retry: true\r\n"
    if error.predicted_wait_s is not None:
        headers += b"x-inferry-predicted-wait-ms: %d\r\n" % ceil(1000 * error.predicted_wait_s)
    return headers


def error_event(error: GatewayError) -> bytes:
    """The same, in-band: for a stream that has begun and must not look as if it had ended well."""
    return b"data: " + error_body(error) + b"\n\n"


def _retry_after_s(error: GatewayError, call_id: str) -> float | None:
    """When to come back; None where nothing is to be waited for."""
    seconds = error.retry_after_s
    if seconds is None:
        if error.status not in (429, 503) or isinstance(error, RateLimited):  # a limit of nothing never has room
            return None
        seconds = _DEFAULT_RETRY_AFTER_S
    if error.has_own_retry_time or not call_id:
        return seconds
    return seconds * (1.0 + _RETRY_JITTER * crc32(call_id.encode()) / 2**32)
