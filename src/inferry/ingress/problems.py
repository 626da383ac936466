"""Errors as HTTP: the one place where a GatewayError becomes a status, headers and an OpenAI-shaped body."""

import math

import msgspec

from inferry.domain.errors import GatewayError

_TYPES = {
    401: "authentication_error",
    402: "budget_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_DEFAULT_RETRY_AFTER_S = 1.0


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


def error_headers(error: GatewayError) -> bytes:
    """Header lines."""
    headers = b"content-type: application/json\r\n"
    if error.status == 408:
        # The deadline was the client's own: sent again, it would start anew. OpenAI's clients retry 408 unless told.
        headers += b"x-should-retry: false\r\n"
    seconds = error.retry_after_s
    if seconds is None and error.status in (429, 503):
        seconds = _DEFAULT_RETRY_AFTER_S
    if seconds is not None:
        headers += b"retry-after: %d\r\n" % max(1, math.ceil(seconds))
    if error.predicted_wait_s is not None:
        headers += b"x-inferry-predicted-wait-ms: %d\r\n" % math.ceil(1000 * error.predicted_wait_s)
    return headers


def error_event(error: GatewayError) -> bytes:
    """The same, in-band: for a stream that has begun and must not look as if it had ended well."""
    return b"data: " + error_body(error) + b"\n\n"
