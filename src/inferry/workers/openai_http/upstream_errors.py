"""Error responses of a server to GatewayErrors. Its message is forwarded only where it concerns the request."""

import re
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from inferry.domain.errors import (
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    WorkerLost,
)

MAX_MESSAGE_CHARS = 1000
_VALIDATION_ERRORS = re.compile(r"\d+ validation errors?\b")
"""What pydantic finds wrong with a request. llama-cpp-python's server calls it an internal error."""


class _UpstreamError(Struct, frozen=True):
    message: str = ""
    param: str | None = None


class _ErrorBody(Struct):
    error: _UpstreamError | str = _UpstreamError()
    message: str = ""
    detail: object = ""


def upstream_error(
    worker: str, status: int, body: bytes, *, retry_after_s: float | None = None, secrets: Sequence[str] = ()
) -> GatewayError:
    try:
        details = msgspec.json.decode(body, type=_ErrorBody)
        error = details.error if isinstance(details.error, _UpstreamError) else _UpstreamError(message=details.error)
        message, param = error.message or details.message or _detail(details.detail), error.param
    except msgspec.MsgspecError:
        message, param = "", None
    except UnicodeDecodeError:
        if status not in (429, 503):  # their body is not used
            return WorkerLost(f"worker {worker} returned {status} with invalid UTF-8")
        message, param = "", None
    if status == 404:
        return ModelNotFound(f"worker {worker} does not serve this model", param="model")
    if status in (400, 413, 422):
        text = _redact(message, secrets)[:MAX_MESSAGE_CHARS] or f"worker {worker} refused the request ({status})"
        param = None if param is None else _redact(param, secrets)
        if "context length" in message:
            return ContextLengthExceeded(text, param=param)
        return InvalidRequest(text, param=param)
    if status == 500 and _VALIDATION_ERRORS.match(message):
        return InvalidRequest(f"worker {worker} refused the request as invalid")
    if status in (429, 503):
        return NoWorker(f"worker {worker} is overloaded", retry_after_s=retry_after_s)
    return WorkerLost(f"worker {worker} returned {status}")


def _detail(found: object) -> str:
    """The message of FastAPI's own errors: a text, or a list of what is wrong."""
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()


def _redact(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
