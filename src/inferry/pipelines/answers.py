"""What an answer says and how sure its model was: texts, log probabilities, equality, schemas. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

_SPACE = re.compile(r"\s+")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a chat or completions choice."""
    message = choice.get("message")
    found = choice.get("text") if message is None else message.get("content")
    return found if isinstance(found, str) else ""


def logprobs_of(body: Mapping[str, Any]) -> list[float] | None:
    """Log probabilities of all generated tokens; None where a choice has none."""
    found: list[float] = []
    for choice in body.get("choices", ()):
        given = choice.get("logprobs")
        if not isinstance(given, dict):
            return None
        tokens = given.get("content")  # of chat; completions have a list of numbers
        values = [one.get("logprob") for one in tokens] if isinstance(tokens, list) else given.get("token_logprobs")
        if not values:
            return None
        found += [value for value in values if value is not None]
    return found or None


def meaning(choice: Mapping[str, Any]) -> object:
    """A value that is equal for answers that agree: equal tool calls, equal JSON, or equal text apart from case, white
    space and a final full stop.
    """
    calls = (choice.get("message") or {}).get("tool_calls")
    if calls:
        return tuple((one["function"]["name"], _freeze(_json(one["function"]["arguments"]))) for one in calls)
    text = text_of(choice).strip()
    if text[:1] in ("{", "["):
        value = _json(text)
        if not isinstance(value, str):
            return _freeze(value)
    return _SPACE.sub(" ", text).rstrip(". ").casefold()


def agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two bodies have choices of the same meaning, in order."""
    return [meaning(choice) for choice in one["choices"]] == [meaning(choice) for choice in other["choices"]]


def without_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for a client that has not asked for log probabilities."""
    return {**body, "choices": [{**choice, "logprobs": None} for choice in body["choices"]]}


def schema_problem(fields: Mapping[str, Raw], body: Mapping[str, Any]) -> str | None:
    """Why an answer is not what `response_format` asks for; None where it is, or nothing is asked for.

    Tool calls are no such answer. Keywords of schemas that are not checked here are ignored.
    """
    raw = fields.get("response_format")
    wanted: Any = None if raw is None else msgspec.json.decode(raw)
    if not isinstance(wanted, dict) or wanted.get("type") not in ("json_object", "json_schema"):
        return None
    schema = (wanted.get("json_schema") or {}).get("schema", {}) if wanted["type"] == "json_schema" else {}
    for choice in body["choices"]:
        if (choice.get("message") or {}).get("tool_calls"):
            continue
        try:
            value = msgspec.json.decode(text_of(choice))
        except msgspec.DecodeError:
            return "not JSON"
        if wanted["type"] == "json_object" and not isinstance(value, dict):
            return "not a JSON object"
        problem = next(_violations(value, schema, 0), None)
        if problem is not None:
            return problem
    return None


def _violations(value: Any, schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 32:
        return
    kinds = schema.get("type")
    if kinds is not None and not any(_is_a(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield "a value of the wrong type"
    if "enum" in schema and value not in schema["enum"]:
        yield "a value outside its enum"
    if "const" in schema and value != schema["const"]:
        yield "a value that differs from its const"
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(next(_violations(value, one, depth + 1), None) is None for one in schema[name]):
            yield f"a value that fits no branch of {name}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if any(name not in value for name in schema.get("required", ())):
            yield "a required property is missing"
        if schema.get("additionalProperties") is False and any(name not in known for name in value):
            yield "an unknown property"
        for name, inner in known.items():
            if name in value:
                yield from _violations(value[name], inner, depth + 1)
    if isinstance(value, list):
        for one in value:
            yield from _violations(one, schema.get("items"), depth + 1)


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("number", "integer"):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _freeze(value: Any) -> object:
    if isinstance(value, dict):
        return frozenset((key, _freeze(one)) for key, one in value.items())
    if isinstance(value, list):
        return tuple(_freeze(one) for one in value)
    return (value,) if isinstance(value, bool) else value  # true is not 1
