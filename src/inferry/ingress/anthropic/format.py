"""Answers and errors as the Messages API writes them."""

from typing import Any

import msgspec

from inferry.domain.errors import ContextLengthExceeded, GatewayError, QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.ingress.anthropic.message import Message
from inferry.ingress.anthropic.writer import MessageWriter
from inferry.ingress.chat_items import read_answer
from inferry.ingress.errors import FieldNames
from inferry.ingress.wire_format import EventWriter, WireFormat

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_FIELDS = FieldNames(
    {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages: prefilled answer",
    },
    {"response_format.json_schema.schema": "output_config.format.schema"},
    tool_schema="input_schema",
)
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_encode = msgspec.json.encode


class MessagesFormat(WireFormat):
    """One instance serves all requests."""

    def writer(self, job: InferenceJob, created: float) -> EventWriter | None:
        return MessageWriter(job)

    def full_body(self, job: InferenceJob, answer: bytes | dict[str, Any]) -> bytes:
        whole = read_answer(answer)
        message = Message(job)
        for item in whole.items:
            message.add(item)
        return _encode(message.render(whole.finish, whole.stop_reason, whole.usage or {}))

    def heartbeat(self) -> bytes:
        return _PING

    def id_headers(self, request_id: str) -> bytes:
        return super().id_headers(request_id) + b"request-id: %b\r\n" % request_id.encode()

    def error_status(self, error: GatewayError) -> int:
        """Statuses are those of the gateway's errors, except that overload is 529: clients tell it from rate limits."""
        return OVERLOADED if error.status == 503 or isinstance(error, QueueFull) else error.status

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        return _encode(self._error(error) | {"request_id": request_id})

    def error_event(self, error: GatewayError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(self._error(error))

    def _error(self, error: GatewayError) -> dict[str, Any]:
        status = self.error_status(error)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: GatewayError) -> str:
    """Claude Code reads the first two messages: it compacts the conversation, or lowers `max_tokens`."""
    if not isinstance(error, ContextLengthExceeded):
        return _FIELDS.apply(error).message
    prompt, output, context = error.prompt_tokens, error.output_tokens, error.context_tokens
    if prompt is None or context is None:
        return f"prompt is too long: {error.message}"
    if output is None:
        return f"prompt is too long: {prompt} tokens > {context} maximum"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}"
