"""Answers and errors as the Responses API writes them."""

from typing import Any

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.ingress.chat_items import read_answer
from inferry.ingress.errors import FieldNames
from inferry.ingress.responses.response_object import TEXT_LOGPROBS, Keep, ResponseObject, usage_object
from inferry.ingress.responses.writer import ResponseWriter, reasoning_tokens
from inferry.ingress.wire_format import EventWriter, WireFormat

_FIELDS = FieldNames(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
        "logprobs": f"include: {TEXT_LOGPROBS}",
    },
    {"response_format.json_schema.schema": "text.format.schema"},
)


class ResponsesErrors(WireFormat):
    """Errors outside of streams: in OpenAI's shape, with the fields of this API."""

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        return super().error_body(_FIELDS.apply(error), request_id)


class ResponsesFormat(ResponsesErrors):
    """Belongs to one request."""

    def __init__(self, head: ResponseObject, keep: Keep | None) -> None:
        self._head = head
        self._keep = keep
        self._writer: ResponseWriter | None = None

    def writer(self, job: InferenceJob, created: float) -> EventWriter | None:
        self._writer = ResponseWriter(self._head, job, self._keep)
        return self._writer

    def full_body(self, job: InferenceJob, answer: bytes | dict[str, Any]) -> bytes:
        whole = read_answer(answer, has_logprobs=self._head.has_logprobs)
        writer = ResponseWriter(self._head, job, self._keep)
        events: list[bytes] = []
        for item in whole.items:
            writer.write(item, events)
        usage = whole.usage or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt, output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        counts = usage_object(prompt, cached, output, reasoning_tokens(usage))
        return writer.finish(whole.finish, counts, events)[1]

    def heartbeat(self) -> bytes:
        """An event: comments do not reset the idle timer of Codex."""
        return super().heartbeat() if self._writer is None else self._writer.heartbeat()

    def id_headers(self, request_id: str) -> bytes:
        """Also the tools that the model did not get."""
        headers = super().id_headers(request_id)
        left_out = ", ".join(self._head.left_out)
        return headers + b"x-inferry-tools-left-out: %b\r\n" % left_out.encode() if left_out else headers

    def error_event(self, error: GatewayError) -> bytes:
        error = _FIELDS.apply(error)
        return super().error_event(error) if self._writer is None else self._writer.failed(error)
