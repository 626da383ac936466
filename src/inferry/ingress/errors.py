"""GatewayErrors to HTTP: status, headers and OpenAI-shaped body."""

import copy
import re
from math import ceil
from typing import Final
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
_DEFAULT_RETRY_AFTER_S: Final = 1.0
_RETRY_JITTER: Final = 0.25
"""Retry times are lengthened by up to this share, per call, so that clients do not return all at once."""
_REFUSAL_STATUSES = frozenset({402, 408, 409, 429, 503})
"""Statuses of valid requests that were refused."""
_RETRY_ADVICE_STATUSES = frozenset({402, 403, 408, 409, 429, 503, 504})
"""Statuses of errors that say whether they are retryable. The clients of OpenAI and Anthropic retry some of them unless
told not to."""


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


_FUNCTION: Final = re.compile(r"(tools\[\d+\])\.function\.(parameters\b)?")


class FieldNames:
    """Fields of chat requests by the names that another API has for them, in the errors of that API.

    An index of a chat message or of a place in it is left out: it is not that of the client's request. `schemas` are
    fields that the client's request contains as they are, so that a place in them is named. `tool_schema` is the field
    of a tool with the schema of its arguments; tools of the API have no `function`.
    """

    def __init__(
        self, names: dict[str, str], schemas: dict[str, str] | None = None, *, tool_schema: str = "parameters"
    ) -> None:
        self._names = names
        self._schemas = schemas or {}
        self._tool_schema = tool_schema
        self._field = re.compile(rf"^({'|'.join(names)})(?:[.\\[].*)?$", re.DOTALL)
        self._quoted = re.compile(rf"`({'|'.join(names)})(?:[.\\[][^`]*)?`")

    def apply(self, error: GatewayError) -> GatewayError:
        """The error with the names of the API: the same object where it names none of the fields."""
        if error.has_client_names:
            return error
        param = error.param or ""
        for field, name in (*self._schemas.items(), *self._function(param)):
            if param.startswith(field):
                renamed = copy.copy(error)
                renamed.message = error.message.replace(field, name)
                renamed.param = name + param.removeprefix(field)
                return renamed
        found = None if error.param is None else self._field.match(error.param)
        message = self._quoted.sub(self._name, error.message)
        if found is None and message == error.message:
            return error
        renamed = copy.copy(error)
        renamed.message = message
        if found is not None:
            renamed.param = self._names[found[1]]
        return renamed

    def _function(self, param: str) -> list[tuple[str, str]]:
        """The field of a tool that the parameter begins with, and its name in the API."""
        found = _FUNCTION.match(param)
        return [] if found is None else [(found[0], f"{found[1]}.{self._tool_schema if found[2] else ''}")]

    def _name(self, found: re.Match[str]) -> str:
        return f"`{self._names[found[1]]}`"


def error_headers(error: GatewayError, call_id: str = "") -> bytes:
    """Header lines. `call_id` varies the retry time between calls that are refused at the same moment."""
    headers = b"content-type: application/json\r\n"
    if error.status in _REFUSAL_STATUSES:
        headers += b"x-inferry-drop-reason: %b\r\n" % error.code.encode()
    seconds = _retry_after_s(error, call_id)
    if seconds is not None:
        # Both: the clients of OpenAI and Anthropic prefer the exact one, others know only the standard one.
        headers += b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (max(1, ceil(seconds)), ceil(1000 * seconds))
    if error.status in _RETRY_ADVICE_STATUSES:
        if not error.retryable or (error.status == 429 and seconds is None):
            headers += b"x-should-retry: false\r\n"
        elif error.status != 504:  # clients retry a server's timeout after a pause of their own
            headers += b"x-should-retry: true\r\n"
    if error.predicted_wait_s is not None:
        headers += b"x-inferry-predicted-wait-ms: %d\r\n" % ceil(1000 * error.predicted_wait_s)
    return headers


def error_event(error: GatewayError) -> bytes:
    """The error as a server-sent event, for a stream that has begun and must not look complete."""
    return b"data: " + error_body(error) + b"\n\n"


def printable(text: str) -> str:
    """A client's text, shortened and printable, for an error message."""
    return "".join(char if char.isprintable() else "?" for char in text[:100])


def _retry_after_s(error: GatewayError, call_id: str) -> float | None:
    """Seconds until a retry can succeed; None where it cannot."""
    seconds = error.retry_after_s
    if seconds is None:
        if error.status not in (429, 503) or not error.retryable or isinstance(error, RateLimited):
            return None  # a quota without a time to retry is 0 and never admits
        seconds = _DEFAULT_RETRY_AFTER_S
    if error.has_own_retry_time or not call_id:
        return seconds
    return seconds * (1.0 + _RETRY_JITTER * crc32(call_id.encode()) / 2**32)
