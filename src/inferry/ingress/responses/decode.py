"""Bodies of `/v1/responses` to chat requests: decoded once, encoded once.

Tools are written before the messages, as chat templates write them, so that equal prompts have equal beginnings.
"""

import msgspec
from msgspec import UNSET, Raw

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.errors import printable
from inferry.ingress.openai.chat_options import PassedOptions
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.openai.features import is_given
from inferry.ingress.openai.request_schema import ChatCompletionRequest, ResponseFormat
from inferry.ingress.responses.conversation import Conversation
from inferry.ingress.responses.format import ResponsesFormat
from inferry.ingress.responses.json_fields import decode_field
from inferry.ingress.responses.request_schema import InputItem, ResponsesRequest, TextFormat
from inferry.ingress.responses.response_object import SEALED_REASONING, TEXT_LOGPROBS, Keep, ResponseObject
from inferry.ingress.responses.tools import ChatTools
from inferry.ingress.wire_format import ClientRequest

_decoder = msgspec.json.Decoder(ResponsesRequest)
_items_decoder = msgspec.json.Decoder(list[InputItem])
_encode = msgspec.json.encode
_QUOTE = 0x22
MAX_METADATA = 16
OPTIONS = PassedOptions(
    {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": f"include: {TEXT_LOGPROBS}",
    },
    translated=("top_logprobs",),
)
_INCLUDED = (SEALED_REASONING, TEXT_LOGPROBS)
_REFUSED = ("conversation", "prompt", "context_management", "moderation")


def decode_request(body: bytes) -> ResponsesRequest:
    """The request. Raises InvalidRequest, and UnsupportedFeature for fields that no engine here can serve."""
    request: ResponsesRequest = decode_body(_decoder, body)
    for name in _REFUSED:
        if is_given(getattr(request, name)):
            raise UnsupportedFeature(f"`{name}` is not supported", param=name)
    if request.truncation == "auto":
        raise UnsupportedFeature("`truncation`: only disabled is supported", param="truncation")
    OPTIONS.check(request)
    if request.top_logprobs and TEXT_LOGPROBS not in (request.include or ()):
        raise InvalidRequest(f"`top_logprobs` needs `include` to have `{TEXT_LOGPROBS}`", param="top_logprobs")
    for one in request.include or ():
        if one not in _INCLUDED:
            raise UnsupportedFeature(f"`include`: `{printable(one)}` is not supported", param="include")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise UnsupportedFeature(f"`{param}` is not supported", param=param)
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidRequest(
            f"`metadata` may have {MAX_METADATA} pairs, with keys up to 64 and values up to 512 characters",
            param="metadata",
        )
    return request


def decode_items(raw: Raw | bytes) -> list[InputItem]:
    """The items of an input: text is one message of the user."""
    if memoryview(raw)[0] == _QUOTE:
        return [InputItem("message", role="user", content=Raw(raw))]
    items: list[InputItem] = decode_field(_items_decoder, raw, "input", "text or a list of items")
    return items


class Translation:
    """One request with its items, those of earlier responses first, as a chat request."""

    def __init__(self, request: ResponsesRequest, history: list[InputItem], items: list[InputItem]) -> None:
        self._request = request
        conversation = Conversation()
        conversation.add_instructions(request.instructions)
        for index, item in enumerate(history):
            conversation.add(item, f"previous_response_id.items[{index}]")
        for index, item in enumerate(items):
            conversation.add(item, f"input[{index}]")
        messages = conversation.messages.finish()
        if not messages:
            raise InvalidRequest("`input` must not be empty", param="input")
        self._features = conversation.features
        self.tools = ChatTools(request.tools)
        self._wire = ChatCompletionRequest(model=request.model, messages=[one.schema for one in messages])
        self._pieces = [b'{"model":', _encode(request.model)]
        choice = self.tools.choose(request.tool_choice)
        functions = self.tools.functions(choice.allowed)
        if functions is not None:
            self._wire.tools = Raw(functions)
            self._add_raw("tools", functions)
        self._add_raw("messages", b"[%b]" % b",".join([one.json for one in messages]))
        if functions is not None:
            if choice.value is not None:
                self._wire.tool_choice = Raw(_encode(choice.value))
                self._add_raw("tool_choice", bytes(self._wire.tool_choice))
            if request.parallel_tool_calls is not None:
                self._wire.parallel_tool_calls = request.parallel_tool_calls
                self._add("parallel_tool_calls", request.parallel_tool_calls)
        self._add_options()

    def client_request(self, head: ResponseObject, keep: Keep | None) -> ClientRequest:
        """The request for workers. `keep` stores the response."""
        body = b"".join(self._pieces) + b"}"
        return ClientRequest(self._wire, body, ResponsesFormat(head, keep), self._features)

    def _add_options(self) -> None:
        request, wire = self._request, self._wire
        if request.max_output_tokens is not None:
            wire.max_tokens = request.max_output_tokens
            self._add("max_tokens", request.max_output_tokens)
        self._pieces.append(OPTIONS.pass_on(request, wire))
        if TEXT_LOGPROBS in (request.include or ()):
            wire.logprobs = True
            self._add("logprobs", True)
            if request.top_logprobs is not None:
                wire.top_logprobs = request.top_logprobs
                self._add("top_logprobs", request.top_logprobs)
        if request.stream:
            wire.stream = True
            self._add("stream", True)
        if request.reasoning is not None and request.reasoning.effort is not None:
            self._add("reasoning_effort", request.reasoning.effort)
        text = request.text
        if text is not None and text.verbosity is not None:
            self._add("verbosity", text.verbosity)
        if text is not None and text.format is not None and text.format.type != "text":
            wire.response_format = ResponseFormat(text.format.type)
            self._add("response_format", _response_format(text.format))
        # For the lane and for affinity only; not sent to workers.
        wire.service_tier, wire.user, wire.prompt_cache_key = (
            request.service_tier,
            request.user,
            request.prompt_cache_key,
        )

    def _add(self, name: str, value: object) -> None:
        self._add_raw(name, _encode(value))

    def _add_raw(self, name: str, raw: bytes) -> None:
        self._pieces += (b',"%b":' % name.encode(), raw)


def _response_format(wanted: TextFormat) -> dict[str, object]:
    if wanted.type == "json_object":
        return {"type": wanted.type}
    if wanted.schema is UNSET or not bytes(wanted.schema).startswith(b"{"):
        raise InvalidRequest("`text.format.schema` must be an object", param="text.format.schema")
    schema: dict[str, object] = {"name": wanted.name or "output", "schema": wanted.schema}
    if wanted.description is not None:
        schema["description"] = wanted.description
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"type": wanted.type, "json_schema": schema}
