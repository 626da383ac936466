"""The response object: fields that repeat the request, and those that change until its end."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.durable.background import FIRST_EVENTS
from inferry.durable.responses import failure
from inferry.ingress.headers import tier_of
from inferry.ingress.openai.features import is_given
from inferry.ingress.responses.request_schema import ResponsesRequest
from inferry.ingress.responses.tools import ChatTools, ToolName

_encode = msgspec.json.encode
ID_PREFIX = "resp_"
SEALED_REASONING = "reasoning.encrypted_content"
TEXT_LOGPROBS = "message.output_text.logprobs"
_DEFAULT_FORMAT = Raw(b'{"type":"text"}')

Keep = Callable[[InferenceJob, str, bytes], None]
"""(job, id of the response, response) → stores a response that has ended."""


class ResponseObject:
    """Writes the response object of one request. `id` is None until the request is a job, which gives the id."""

    def __init__(
        self,
        request: ResponsesRequest,
        tools: ChatTools,
        wall: Callable[[], float],
        *,
        is_stored: bool,
        id: str | None = None,
        created_at: float | None = None,
    ) -> None:
        self.wall = wall
        self.names: dict[str, ToolName] = tools.names
        self.left_out = tools.left_out
        self.seals_reasoning = SEALED_REASONING in (request.include or ())
        self.has_logprobs = TEXT_LOGPROBS in (request.include or ())
        self._id = id
        self.first_events = len(FIRST_EVENTS) if id is not None else 0
        """Events that were written before."""
        self._created_at = int(wall() if created_at is None else created_at)
        self._fields = _encode(_repeated_fields(request, tools, is_stored))[1:-1]

    def id_of(self, job: InferenceJob) -> str:
        return ID_PREFIX + job.job_id if self._id is None else self._id

    def of_job(
        self, job: InferenceJob, status: str, output: list[bytes], usage: dict[str, Any] | None = None, **more: object
    ) -> bytes:
        """The response of a job. `more` are fields that are null otherwise."""
        changing = {"error": None, "incomplete_details": None, "completed_at": None, "usage": usage} | more
        return self._render(self.id_of(job), status, job.route.model, job.lane, output, changing)

    def queued(self, model: str, lane: Lane) -> bytes:
        """The response before it is a job. It has an id of its own."""
        assert self._id is not None
        changing = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return self._render(self._id, "queued", model, lane, [], changing)

    def _render(
        self, id: str, status: str, model: str, lane: Lane, output: list[bytes], changing: Mapping[str, object]
    ) -> bytes:
        # The status precedes everything that a client or a model wrote.
        return (
            b'{"id":%b,"object":"response","created_at":%d,"status":"%b","model":%b,"service_tier":"%b",%b,%b,%b}'
            % (
                _encode(id),
                self._created_at,
                status.encode(),
                _encode(model),
                tier_of(lane).encode(),
                b'"output":[%b]' % b",".join(output),
                _encode(changing)[1:-1],
                self._fields,
            )
        )


def _repeated_fields(request: ResponsesRequest, tools: ChatTools, is_stored: bool) -> dict[str, object]:
    reasoning, text = request.reasoning, request.text
    wanted: object = _DEFAULT_FORMAT
    if text is not None and text.format is not None:
        given = {name: getattr(text.format, name) for name in text.format.__struct_fields__}
        wanted = {name: value for name, value in given.items() if value is not None and value is not UNSET}
    config = {"format": wanted}
    if text is not None and text.verbosity is not None:
        config["verbosity"] = text.verbosity
    return {
        "background": bool(request.background),
        "instructions": request.instructions if is_given(request.instructions) else None,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "store": is_stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": config,
        "tool_choice": request.tool_choice if is_given(request.tool_choice) else "auto",
        "tools": tools.given,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def usage_object(prompt: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, output)},
        "total_tokens": prompt + output,
    }


def error_object(error: GatewayError) -> dict[str, Any]:
    return failure(error.status, error.code, error.message, error.retry_after_s)
