"""Bodies of `/v1/messages` to chat requests: decoded once, encoded once.

Tools are written before the messages, as chat templates write them, so that equal prompts have equal beginnings.
"""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.anthropic.conversation import Conversation
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.anthropic.request_schema import CountTokensRequest, MessagesRequest, Tool, ToolChoice
from inferry.ingress.errors import printable
from inferry.ingress.openai.chat_options import PassedOptions
from inferry.ingress.openai.decode import MAX_STOP_CHARS, MAX_STOP_STRINGS, decode_body
from inferry.ingress.openai.features import is_given
from inferry.ingress.openai.request_schema import ChatCompletionRequest, ResponseFormat
from inferry.ingress.wire_format import ClientRequest, Endpoint, WireFormat

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
_arguments_decoder = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.encode

MESSAGES = b"/v1/messages"

OPTIONS = PassedOptions(
    {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "response_format": "output_config.format"}
)
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that not every version of vLLM knows."""
_TIERS = {"standard_only": "default"}
"""Tiers of this API by name. `auto` is the lane of the key."""


class MessagesEndpoint(Endpoint):
    def __init__(self) -> None:
        self.format = MessagesFormat()

    def decode(self, body: bytes) -> ClientRequest:
        request: MessagesRequest = decode_body(_decoder, body)
        _check_stops(request.stop_sequences)
        chat = _ChatBody(request)
        wire = chat.wire
        chat.add("max_tokens", request.max_tokens)
        wire.max_tokens = request.max_tokens
        if request.stop_sequences:
            chat.add("stop", request.stop_sequences)
            wire.stop = request.stop_sequences
        if request.stream:
            chat.add("stream", True)
            wire.stream = True
        if request.metadata is not None:
            wire.user = request.metadata.user_id  # for affinity only; not sent to workers
        if request.service_tier is not None:
            wire.service_tier = _TIERS.get(request.service_tier)
        return ClientRequest(wire, chat.encode(), self.format, chat.features, chat.reasoning)


def decode_count(body: bytes, wire_format: WireFormat) -> ClientRequest:
    """A request to count tokens, as the chat request whose prompt is counted."""
    chat = _ChatBody(decode_body(_count_decoder, body))
    return ClientRequest(chat.wire, chat.encode(), wire_format, chat.features, chat.reasoning)


class _ChatBody:
    """A chat request, written field by field: `wire` and its encoding."""

    def __init__(self, request: CountTokensRequest) -> None:
        for name, raw in (("container", request.container), ("mcp_servers", request.mcp_servers)):
            if is_given(raw):
                raise UnsupportedFeature(f"`{name}` is not supported", param=name)
        OPTIONS.check(request)
        if not request.messages:
            raise InvalidRequest("`messages` must not be empty", param="messages")
        conversation = Conversation()
        if is_given(request.system):
            conversation.add_system(request.system, "system")  # type: ignore[arg-type]
        for index, turn in enumerate(request.messages):
            conversation.add_turn(turn, f"messages[{index}]")
        messages = conversation.finish()
        self.features = [("images", path) for path in conversation.images]
        self.reasoning = _reasoning(request)
        self.wire = ChatCompletionRequest(model=request.model, messages=[one.schema for one in messages])
        self._pieces = [b'{"model":', _encode(request.model)]
        if request.tools:
            self.wire.tools = Raw(_tools(request.tools))
            self._add_raw("tools", self.wire.tools)
        self._add_raw("messages", b"[%b]" % b",".join([one.json for one in messages]))
        if conversation.is_prefilled:
            self.wire.continue_final_message = True
            self._pieces.append(b',"continue_final_message":true,"add_generation_prompt":false')
        self._add_tool_choice(request.tool_choice)
        self._add_response_format(request)
        self._pieces.append(OPTIONS.pass_on(request, self.wire))

    def add(self, name: str, value: object) -> None:
        self._add_raw(name, _encode(value))

    def encode(self) -> bytes:
        return b"".join(self._pieces) + b"}"

    def _add_raw(self, name: str, raw: bytes | Raw) -> None:
        self._pieces += (b',"%b":' % name.encode(), bytes(raw))

    def _add_tool_choice(self, choice: ToolChoice | None) -> None:
        if choice is None:
            return
        if self.wire.tools is UNSET:
            if choice.type in ("any", "tool"):
                raise InvalidRequest("`tool_choice` requires `tools`", param="tool_choice")
            return
        value: object = {"any": "required"}.get(choice.type, choice.type)
        if choice.type == "tool":
            if not choice.name:
                raise InvalidRequest("`tool_choice.name` is required", param="tool_choice.name")
            value = {"type": "function", "function": {"name": choice.name}}
        self.wire.tool_choice = Raw(_encode(value))
        self._add_raw("tool_choice", self.wire.tool_choice)
        if choice.disable_parallel_tool_use is not None:
            self.wire.parallel_tool_calls = not choice.disable_parallel_tool_use
            self.add("parallel_tool_calls", self.wire.parallel_tool_calls)

    def _add_response_format(self, request: CountTokensRequest) -> None:
        config = request.output_config
        wanted = request.output_format if config is None or config.format is None else config.format
        if wanted is not None:
            self.wire.response_format = ResponseFormat(wanted.type)
            schema = {"name": "output", "schema": wanted.schema, "strict": True}
            self.add("response_format", {"type": wanted.type, "json_schema": schema})


def _reasoning(request: CountTokensRequest) -> bytes:
    """How much the model shall reason, as vLLM's chat API takes it. Templates have either name for the switch."""
    fields = b""
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type != "adaptive":
        is_on = thinking.type == "enabled"
        # The client's own arguments are in the body already; the last of two equal fields counts.
        arguments = {"enable_thinking": is_on, "thinking": is_on, **_template_arguments(request.chat_template_kwargs)}
        fields = b',"chat_template_kwargs":' + _encode(arguments)
    if config is not None and config.effort is not None:
        fields += b',"reasoning_effort":' + _encode(_EFFORTS.get(config.effort, config.effort))
    return fields


def _template_arguments(given: Raw | UnsetType) -> dict[str, Raw]:
    if not is_given(given):
        return {}
    try:
        return _arguments_decoder.decode(given)  # type: ignore[arg-type]
    except msgspec.MsgspecError:
        raise InvalidRequest("`chat_template_kwargs` must be an object", param="chat_template_kwargs") from None


def _tools(tools: list[Tool]) -> bytes:
    return b"[%b]" % b",".join([_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)])


def _tool(tool: Tool, path: str) -> bytes:
    if tool.type not in (None, "custom"):
        kind = printable(tool.type or "")
        raise UnsupportedFeature(f"`{path}`: tools of the type `{kind}` are not supported", param=path)
    if not tool.name:
        raise InvalidRequest(f"`{path}.name` is required", param=f"{path}.name")
    if tool.input_schema is UNSET or not bytes(tool.input_schema).startswith(b"{"):
        raise InvalidRequest(f"`{path}.input_schema` must be an object", param=f"{path}.input_schema")
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return _encode({"type": "function", "function": function})


def _check_stops(stops: list[str] | None) -> None:
    if stops and (len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops)):
        raise InvalidRequest(
            f"`stop_sequences` must have at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters",
            param="stop_sequences",
        )
