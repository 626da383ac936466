"""What the output must match, from the fields of a body."""

import json
from typing import Any

import pytest

from inferry.domain.constraints import Constraint
from inferry.domain.errors import GatewayError, InvalidRequest, UnsupportedFeature
from inferry.ingress.openai.constraints import MAX_TOOLS, constraint_of
from inferry.ingress.openai.json_schema import MAX_DEPTH, MAX_NODES, MAX_PATTERN_CHARS, check_schema

OBJECT = '{"type":"object"}'
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}}


def of(**fields: Any) -> Constraint | None:
    return constraint_of(json.dumps({"model": "m", **fields}).encode())


def test_every_field_has_the_same_form() -> None:
    schema = {"json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}, "type": "json_schema"}
    assert of(response_format=schema) == Constraint("response_format", schema=OBJECT, is_strict=True)
    assert of(response_format={"type": "json_object"}) == Constraint("response_format", schema=OBJECT)
    assert of(response_format={"type": "text"}) is None
    assert of(guided_json={"type": "object"}) == Constraint("guided_json", schema=OBJECT, is_strict=True)
    assert of(guided_json=OBJECT) == Constraint("guided_json", schema=OBJECT, is_strict=True)
    assert of(structured_outputs={"json": {"type": "object"}}) == Constraint(
        "structured_outputs.json", schema=OBJECT, is_strict=True
    )
    assert of(structured_outputs={"json_object": True}) == Constraint("structured_outputs.json_object", schema=OBJECT)
    assert of(guided_choice=["a"]) == Constraint("guided_choice", choices=("a",))
    assert of(structured_outputs={"regex": "a"}) == Constraint("structured_outputs.regex", regex="a")
    assert of(guided_grammar="start: A") == Constraint("guided_grammar", lark="start: A")
    assert of() is None


def test_tools_by_choice() -> None:
    auto = of(tools=[FUNCTION])
    assert auto is not None
    assert (auto.must_call, auto.is_parallel, [tool.name for tool in auto.tools]) == (False, True, ["f"])
    assert json.loads(auto.tools[0].schema)["type"] == "object"
    required = of(tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False)
    assert required is not None
    assert (required.must_call, required.is_parallel) == (True, False)
    other = {"type": "function", "function": {"name": "g"}}
    named = of(tools=[FUNCTION, other], tool_choice={"type": "function", "function": {"name": "g"}})
    assert named is not None
    assert (named.must_call, [tool.name for tool in named.tools]) == (True, ["g"])
    assert of(tools=[FUNCTION], tool_choice="none") is None
    both = of(tools=[FUNCTION], response_format={"type": "json_object"})
    assert both is not None
    assert (both.schema, len(both.tools)) == (OBJECT, 1)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (5, "s"),
        ({"type": "text"}, "s.type"),
        ({"type": ["string", 5]}, "s.type"),
        ({"type": {"a": 1}}, "s.type"),
        ({"items": {"type": [{}]}}, "s.items.type"),
        ({"properties": []}, "s.properties"),
        ({"properties": {"a": 5}}, "s.properties.a"),
        ({"items": {"enum": []}}, "s.items.enum"),
        ({"items": [True, 5]}, "s.items[1]"),
        ({"anyOf": []}, "s.anyOf"),
        ({"oneOf": [{}, {"required": "a"}]}, "s.oneOf[1].required"),
        ({"$defs": {"x": {"minimum": "1"}}}, "s.$defs.x.minimum"),
        ({"maxLength": -1}, "s.maxLength"),
        ({"maxItems": 1.5}, "s.maxItems"),
        ({"minimum": True}, "s.minimum"),
        ({"pattern": "a" * (MAX_PATTERN_CHARS + 1)}, "s.pattern"),
        ({"$ref": "other.json"}, "s.$ref"),
        (nested(MAX_DEPTH), "s" + ".items" * MAX_DEPTH),
        ({"enum": [*range(MAX_NODES)], "not": {}, "items": {}}, "s.items"),
    ],
)
def test_an_invalid_schema_is_refused_at_its_place(schema: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "s", is_strict=False)
    assert refused.value.param == param


def test_keywords_that_cannot_be_enforced_are_refused_where_the_schema_is_strict() -> None:
    schema = {"properties": {"a": {"uniqueItems": True}}}
    assert check_schema(schema, "s", is_strict=False) == schema
    with pytest.raises(UnsupportedFeature) as refused:
        check_schema(schema, "s", is_strict=True)
    assert refused.value.param == "s.properties.a.uniqueItems"


def test_a_schema_within_the_limits_is_accepted() -> None:
    check_schema(nested(MAX_DEPTH - 1), "s", is_strict=True)
    check_schema({"type": ["string", "null"], "minimum": -0.5, "additionalProperties": False}, "s", is_strict=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**FUNCTION, "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [FUNCTION], "guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
    ],
)
def test_limits_and_shapes(fields: Any, param: str) -> None:
    with pytest.raises(GatewayError) as refused:
        of(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param


def test_a_constraint_is_never_printed() -> None:
    constraint = of(tools=[FUNCTION], guided_regex="secret")
    assert "secret" not in repr(constraint)
    assert constraint is not None
    assert "null" not in repr(constraint.tools)
