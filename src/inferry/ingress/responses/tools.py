"""Tools of a request as functions of a chat request, and the way back from a function's name to the tool.

A chat request has functions only. A tool of a namespace becomes the function `<namespace>__<name>`. A custom tool,
whose input is text, becomes a function with the one argument `input`. A grammar of the input is part of its
description: engines do not enforce it.

OpenAI's own tools are refused, except web search, which Codex sends with every request: the model does not get it,
and the response says so.
"""

import re
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.errors import InvalidRequest
from inferry.ingress.openai.features import is_given
from inferry.ingress.responses.json_fields import decode_field, unsupported
from inferry.ingress.responses.request_schema import NestedTool, ResponseTool, ResponseToolChoice

_decoder = msgspec.json.Decoder(ResponseTool)
_choice_decoder = msgspec.json.Decoder(ResponseToolChoice)
_encode = msgspec.json.encode

_MODES = {b'"none"': "none", b'"auto"': "auto", b'"required"': "required"}
_LEFT_OUT = re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?")
_NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')
_TEXT_PARAMETERS = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)


class ToolName(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def chat_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class ChatTools:
    """The tools of one request. `given` are those that the model gets, `left_out` the types of the others."""

    def __init__(self, tools: list[Raw] | None) -> None:
        self.given: list[Raw] = []
        self.left_out: list[str] = []
        self.names: dict[str, ToolName] = {}
        self._functions: dict[str, bytes] = {}
        for index, raw in enumerate(tools or ()):
            path = f"tools[{index}]"
            tool: ResponseTool = decode_field(_decoder, raw, path, "a tool")
            if _LEFT_OUT.fullmatch(tool.type):
                self.left_out.append(tool.type)
                continue
            self.given.append(raw)
            if tool.type == "namespace":
                self._add_namespace(tool, path)
            else:
                self._add(tool, None, "", path)

    def functions(self, allowed: frozenset[str] | None) -> bytes | None:
        """The `tools` of the chat request; None: it has none. `allowed`: names of functions, None means all."""
        found = [json for name, json in self._functions.items() if allowed is None or name in allowed]
        return b"[%b]" % b",".join(found) if found else None

    def choose(self, raw: Raw | UnsetType) -> "Choice":
        """The `tool_choice` of the request. Raises InvalidRequest for a tool that it does not have."""
        if raw is UNSET or not is_given(raw):
            return Choice()
        mode = _MODES.get(bytes(raw))
        if mode is not None:
            if mode == "required" and not self._functions:
                raise InvalidRequest("`tool_choice` requires `tools`", param="tool_choice")
            return Choice(mode if self._functions else None)
        choice: ResponseToolChoice = decode_field(
            _choice_decoder, raw, "tool_choice", "none, auto, required or an object"
        )
        if choice.type == "allowed_tools":
            allowed = [self._known(tool, None, f"tool_choice.tools[{i}]") for i, tool in enumerate(choice.tools or ())]
            return Choice(choice.mode if allowed else None, frozenset(allowed))
        name = self._known(NestedTool(choice.type, choice.name), choice.namespace, "tool_choice")
        return Choice({"type": "function", "function": {"name": name}})

    def _known(self, tool: NestedTool, namespace: str | None, path: str) -> str:
        if tool.type not in ("function", "custom"):
            raise unsupported(path, "tools", tool.type)
        name = chat_name(tool.name, namespace)
        if name not in self._functions:
            raise InvalidRequest(f"`{path}` must name a tool of `tools`", param=path)
        return name

    def _add_namespace(self, namespace: ResponseTool, path: str) -> None:
        if not namespace.name:
            raise InvalidRequest(f"`{path}.name` is required", param=f"{path}.name")
        about = f"\n\nThe namespace {namespace.name}: {namespace.description}" if namespace.description else ""
        for index, tool in enumerate(namespace.tools or ()):
            # The first function describes the namespace, since a chat request has no other place for it.
            self._add(tool, namespace.name, about if index == 0 else "", f"{path}.tools[{index}]")

    def _add(self, tool: NestedTool, namespace: str | None, about: str, path: str) -> None:
        if tool.type not in ("function", "custom"):
            raise unsupported(path, "tools", tool.type)
        if not tool.name:
            raise InvalidRequest(f"`{path}.name` is required", param=f"{path}.name")
        name = chat_name(tool.name, namespace)
        if name in self._functions:
            raise InvalidRequest(f"`{path}`: another tool has the same name", param=f"{path}.name")
        is_custom = tool.type == "custom"
        function: dict[str, object] = {"name": name}
        description = (tool.description or "") + about + (_grammar(tool) if is_custom else "")
        if description:
            function["description"] = description.strip()
        parameters = _TEXT_PARAMETERS if is_custom else tool.parameters
        function["parameters"] = parameters if is_given(parameters) else _NO_PARAMETERS
        if tool.strict is not None:
            function["strict"] = tool.strict
        self._functions[name] = _encode({"type": "function", "function": function})
        self.names[name] = ToolName(tool.name, namespace, is_custom)


class Choice(NamedTuple):
    """A `tool_choice` of a chat request, None: none is sent; and the functions that may be called, None: all."""

    value: Any = None
    allowed: frozenset[str] | None = None


def _grammar(tool: NestedTool) -> str:
    given = tool.format or {}
    if given.get("type") != "grammar":
        return ""
    return f"\n\nThe input must match this grammar ({given.get('syntax')}):\n{given.get('definition')}"


def text_arguments(text: bytes) -> bytes:
    """The arguments of a function that stands for a custom tool: a JSON string with JSON in it."""
    return _encode(f'{{"input":{text.decode()}}}')


def text_input(arguments: str) -> str:
    """The input of a custom tool. Arguments of another shape are the input themselves."""
    try:
        decoded = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    found = decoded.get("input") if isinstance(decoded, dict) else None
    return found if isinstance(found, str) else arguments
