"""What the output of a request must match, for engines that decode under a grammar.

Chat bodies of all APIs have these fields: `response_format`, vLLM's `structured_outputs` and `guided_…`, and tools.
"""

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from inferry.domain.constraints import Constraint, ToolSpec
from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.openai.features import is_given
from inferry.ingress.openai.json_schema import MAX_PATTERN_CHARS, check_schema
from inferry.ingress.openai.request_schema import (
    ConstraintFields,
    FunctionTool,
    NamedToolChoice,
    StructuredFormat,
    StructuredOutputs,
)

MAX_TOOLS: Final = 128
MAX_CONSTRAINT_CHARS: Final = 1 << 18
MAX_CHOICES: Final = 10_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_decoder: Final = msgspec.json.Decoder(ConstraintFields)
_tools_decoder: Final = msgspec.json.Decoder(list[dict[str, object]])
_outputs_decoder: Final = msgspec.json.Decoder(StructuredOutputs)


def constraint_of(body: bytes) -> Constraint | None:
    """The constraint of a chat or completions body; None for free text. Raises InvalidRequest, UnsupportedFeature."""
    fields: ConstraintFields = decode_body(_decoder, body)
    if fields.functions is not UNSET and is_given(fields.functions):
        raise UnsupportedFeature("`functions` is not supported: use `tools`", param="functions")
    constraint = _text_constraint(fields)
    tools, must_call = _chosen_tools(fields)
    if tools:
        constraint = msgspec.structs.replace(
            constraint or Constraint("tools"),
            param="tools" if constraint is None else constraint.param,
            tools=tools,
            must_call=must_call,
            is_parallel=fields.parallel_tool_calls is not False,
        )
    if constraint is not None and len(msgspec.msgpack.encode(constraint)) > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(
            f"`{constraint.param}` has more than {MAX_CONSTRAINT_CHARS} characters", param=constraint.param
        )
    return constraint


def offered_tools(raw: Raw, choice: Raw | msgspec.UnsetType) -> list[dict[str, object]]:
    """The tools that the prompt describes: none where none may be called."""
    if not is_given(raw) or (choice is not UNSET and bytes(choice) == b'"none"'):
        return []
    try:
        return _tools_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest("`tools` must be a list of tools", param="tools") from None


def _text_constraint(fields: ConstraintFields) -> Constraint | None:
    """What the text must match; None for free text."""
    found = [
        constraint
        for constraint in (
            _of_response_format(fields.response_format),
            _of_structured_outputs(fields.structured_outputs),
            _of_structured_outputs(_guided(fields), "guided_"),
        )
        if constraint is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(f"`{found[0].param}` and `{found[1].param}` exclude each other", param=found[1].param)
    return found[0] if found else None


def _guided(fields: ConstraintFields) -> StructuredOutputs:
    return StructuredOutputs(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar, None)


def _of_response_format(wanted: StructuredFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("response_format", schema='{"type":"object"}')
    if wanted.type != "json_schema":
        raise UnsupportedFeature(
            "`response_format.type`: only text, json_object and json_schema are supported", param="response_format.type"
        )
    if wanted.json_schema is None:
        raise InvalidRequest("`response_format.json_schema` is required", param="response_format.json_schema")
    is_strict = wanted.json_schema.strict is True
    schema = _schema(wanted.json_schema.schema, "response_format.json_schema.schema", is_strict)
    return Constraint("response_format", schema=schema, is_strict=is_strict)


def _of_structured_outputs(given: Raw | msgspec.UnsetType | StructuredOutputs, prefix: str = "") -> Constraint | None:
    if isinstance(given, StructuredOutputs):
        outputs = given
    elif given is UNSET or not is_given(given):
        return None
    else:
        try:
            outputs = _outputs_decoder.decode(given)
        except (msgspec.MsgspecError, RecursionError):
            raise UnsupportedFeature(
                "`structured_outputs` must have one of json, regex, choice, grammar and json_object",
                param="structured_outputs",
            ) from None
        prefix = "structured_outputs."
    found: list[Constraint] = []
    if outputs.json is not UNSET and is_given(outputs.json):
        param = f"{prefix}json"
        found.append(Constraint(param, schema=_schema(outputs.json, param, True), is_strict=True))
    if outputs.json_object:
        found.append(Constraint(f"{prefix}json_object", schema='{"type":"object"}'))
    if outputs.regex is not None:
        _check(0 < len(outputs.regex) <= MAX_PATTERN_CHARS, f"{prefix}regex", f"1 to {MAX_PATTERN_CHARS} characters")
        found.append(Constraint(f"{prefix}regex", regex=outputs.regex))
    if outputs.choice is not None:
        _check(
            0 < len(outputs.choice) <= MAX_CHOICES and all(outputs.choice),
            f"{prefix}choice",
            f"1 to {MAX_CHOICES} texts that are not empty",
        )
        found.append(Constraint(f"{prefix}choice", choices=tuple(outputs.choice)))
    if outputs.grammar is not None:
        _check(bool(outputs.grammar.strip()), f"{prefix}grammar", "a grammar in Lark or GBNF")
        found.append(Constraint(f"{prefix}grammar", lark=outputs.grammar))
    if len(found) > 1:
        raise InvalidRequest(f"`{found[0].param}` and `{found[1].param}` exclude each other", param=found[1].param)
    return found[0] if found else None


def _chosen_tools(fields: ConstraintFields) -> tuple[tuple[ToolSpec, ...], bool]:
    """The tools that may be called, and whether one must be."""
    choice, tools = fields.tool_choice, fields.tools or []
    _check(len(tools) <= MAX_TOOLS, "tools", f"at most {MAX_TOOLS} tools")
    specs = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    _check(len({spec.name for spec in specs}) == len(specs), "tools", "tools with different names")
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function" or choice.function is None:
            raise UnsupportedFeature("`tool_choice`: only a function can be named", param="tool_choice")
        named = tuple(spec for spec in specs if spec.name == choice.function.name)
        _check(bool(named), "tool_choice", "the name of a tool of `tools`")
        return named, True
    _check(choice in (None, "none", "auto", "required"), "tool_choice", "none, auto, required or a function")
    _check(choice != "required" or bool(specs), "tool_choice", "none or auto where there are no `tools`")
    return (() if choice == "none" else specs), choice == "required"


def _tool(tool: FunctionTool, path: str) -> ToolSpec:
    if tool.type != "function" or tool.function is None:
        raise UnsupportedFeature(f"`{path}`: only functions are supported", param=f"{path}.type")
    function = tool.function
    _check(
        _NAME.fullmatch(function.name) is not None, f"{path}.function.name", "1 to 128 letters, digits and any of _.:/-"
    )
    is_strict, parameters = function.strict is True, function.parameters
    if parameters is UNSET or not is_given(parameters):
        return ToolSpec(function.name, msgspec.json.encode(_NO_PARAMETERS).decode(), is_strict)
    return ToolSpec(function.name, _schema(parameters, f"{path}.function.parameters", is_strict, True), is_strict)


def _schema(raw: Raw, path: str, is_strict: bool, is_object: bool = False) -> str:
    """The schema as JSON, checked. `is_object`: its values are objects, also where it does not say so."""
    try:
        decoded = msgspec.json.decode(raw)
        if isinstance(decoded, str) and path.endswith("json"):  # vLLM takes a schema as text too
            decoded = msgspec.json.decode(decoded)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidRequest(f"`{path}` must be a JSON schema: an object", param=path) from None
    schema = check_schema(decoded, path, is_strict=is_strict)
    if is_object:
        _check(schema.get("type", "object") == "object", f"{path}.type", "object")
        schema = {**schema, "type": "object"}
    return msgspec.json.encode(schema).decode()


def _check(is_valid: bool, param: str, wanted: str) -> None:
    if not is_valid:
        raise InvalidRequest(f"`{param}` must be {wanted}", param=param)
