"""The shapes of bodies and answers, for the OpenAPI document: as decoders have them, with the bounds they leave out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.settings import NUMBERS, LimitSettings, TenantSettings
from inferry.ingress import answers, wire
from inferry.ingress.admin_tenants import LONGEST_S, KeyBody, RotateBody
from inferry.ingress.parse import LARGEST_ID, LONGEST_STOP, MOST_STOP_TOKENS, MOST_STOPS

Json = dict[str, Any]

TENANT_NAME = r"^[A-Za-z0-9_.\-]{1,64}$"
_REF = "#/components/schemas/{name}"


def ref(kind: type[Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


_OBJECT: Json = {"type": "object"}
_PART: Json = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_OR_NULL: Json = {"type": "null"}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "function": {"type": "object"}},
    "required": ["type"],
}
_RANGES: dict[str, Json] = {
    "max_tokens": {"minimum": 1, "maximum": LARGEST_ID},
    "max_completion_tokens": {"minimum": 1, "maximum": LARGEST_ID},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": LARGEST_ID},
    "n": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "stop_token_ids": {"maxItems": MOST_STOP_TOKENS},
    "service_tier": {"enum": ["auto", "default", "priority", "flex"]},
}
"""What `parse` refuses of the right type, by field."""
_ABOVE_NOTHING: Json = {"exclusiveMinimum": 0, "exclusiveMaximum": 2**63}
_ADMIN_RANGES: dict[str, Json] = {
    **dict.fromkeys(NUMBERS, _ABOVE_NOTHING),
    "expires_in_s": {"minimum": 1, "maximum": LONGEST_S},
    "grace_s": {"minimum": 0, "maximum": LONGEST_S},
    "tenant": {"pattern": TENANT_NAME},
    "label": {"maxLength": 200},
}
_STOP: Json = {"type": "string", "maxLength": LONGEST_STOP}
_WHOLE_FIELDS: dict[str, Json] = {
    # What is left as it came is checked later, or by the worker.
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, _OR_NULL]},
    "prompt": {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]},
    "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MOST_STOPS, "items": {**_STOP, "minLength": 1}}, _OR_NULL]},
    "logit_bias": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _OR_NULL]},
    "tools": {"anyOf": [{"type": "array", "items": _FUNCTION}, _OR_NULL]},
    "functions": {"anyOf": [{"type": "array", "items": _OBJECT}, _OR_NULL]},
    "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _FUNCTION, _OR_NULL]},
    "modalities": {"anyOf": [{"type": "array", "items": {"type": "string"}}, _OR_NULL]},
    "audio": {"anyOf": [_OBJECT, _OR_NULL]},
}


def schemas() -> Json:
    """Every shape by its name."""
    named = [one for one in vars(answers).values() if isinstance(one, type) and issubclass(one, Struct)]
    kinds = [wire.ChatBody, wire.CompletionBody, TenantSettings, KeyBody, RotateBody]
    kinds += [one for one in named if one.__module__ == answers.__name__]
    _, found = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in (wire.ChatBody, wire.CompletionBody, wire.MessageShape):
        fields = found[kind.__name__]["properties"]
        for name in fields:
            fields[name] = _with_range(_WHOLE_FIELDS.get(name, fields[name]), _RANGES.get(name, {}))
    found[wire.ChatBody.__name__]["properties"]["messages"]["minItems"] = 1
    for settings in (LimitSettings, TenantSettings, KeyBody, RotateBody):
        fields = found[settings.__name__]["properties"]
        for name in fields:
            fields[name] = _with_range(fields[name], _ADMIN_RANGES.get(name, {}))
    return found


def _with_range(schema: Json, bounds: Json) -> Json:
    """The schema with bounds on what is not null in it."""
    if not bounds:
        return schema
    choices: Sequence[Json] = schema.get("anyOf", [schema])
    bound = [one if one == _OR_NULL else {**one, **bounds} for one in choices]
    return {**schema, "anyOf": bound} if "anyOf" in schema else bound[0]
