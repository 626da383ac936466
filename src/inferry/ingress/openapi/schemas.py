"""JSON schemas of bodies and responses: those of the structs, with the bounds that the code checks beyond the types."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.keys import MAX_DURATION_S
from inferry.domain.settings_versions import NewSettings, SettingsComparison, SettingsHistory, SettingsState
from inferry.domain.tenant_settings import NUMERIC_LIMITS, LimitSettings, TenantSettings
from inferry.ingress.admin_adapters import LoadAdapterBody, UnloadAdapterBody
from inferry.ingress.admin_settings import RollbackBody
from inferry.ingress.admin_tenants import CreateKeyBody, RotateKeyBody
from inferry.ingress.anthropic import decode as message_decode
from inferry.ingress.anthropic.request_schema import CountTokensRequest, MessagesRequest
from inferry.ingress.dashboard import values
from inferry.ingress.openai import request_schema
from inferry.ingress.openai.decode import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MAX_TOKEN_ID
from inferry.ingress.openapi import (
    job_responses,
    message_responses,
    observation_responses,
    pipeline_objects,
    pooled,
    response_objects,
    responses,
    storage_responses,
    timeline_responses,
)
from inferry.ingress.pooling.decode import MAX_INPUTS
from inferry.ingress.responses import decode as response_decode
from inferry.ingress.responses.request_schema import ResponsesRequest
from inferry.ingress.responses.response_object import SEALED_REASONING, TEXT_LOGPROBS
from inferry.ingress.run_tools import FinishRunBody
from inferry.ingress.stored_work.anthropic_batches import MAX_CUSTOM_ID_CHARS, CreateMessageBatchBody
from inferry.ingress.stored_work.async_jobs import CreateJobBody
from inferry.ingress.stored_work.openai_batches import MAX_METADATA, CreateBatchBody
from inferry.ingress.stored_work.upload import MAX_TTL_S, MIN_TTL_S
from inferry.observe.diagnosis.findings import Diagnosis
from inferry.pipelines.model import PipelineRequest

Json = dict[str, Any]

TENANT_NAME = r"^[A-Za-z0-9_.\-]{1,64}$"
_REF = "#/components/schemas/{name}"


def ref(kind: type[Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


_OBJECT: Json = {"type": "object"}
_PART: Json = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_OR_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": "string", "minLength": 1}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "function": {"type": "object"}},
    "required": ["type"],
}
_RANGES: dict[str, Json] = {
    "max_tokens": {"minimum": 1, "maximum": MAX_TOKEN_ID},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_TOKEN_ID},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOKEN_ID},
    "n": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "service_tier": {"enum": ["auto", "default", "priority", "flex"]},
}
"""Bounds that parsing checks, by field."""
_POOLED_RANGES: dict[str, Json] = {
    "dimensions": {"minimum": 1, "maximum": MAX_TOKEN_ID},
    "truncate_prompt_tokens": {"anyOf": [{"const": -1}, {"minimum": 1, "maximum": MAX_TOKEN_ID}]},
    "top_n": {"minimum": 0},
    "service_tier": _RANGES["service_tier"],
}
_POSITIVE: Json = {"exclusiveMinimum": 0, "exclusiveMaximum": 2**63}
_ADMIN_RANGES: dict[str, Json] = {
    **dict.fromkeys(NUMERIC_LIMITS, _POSITIVE),
    "expires_in_s": {"minimum": 1, "maximum": MAX_DURATION_S},
    "grace_s": {"minimum": 0, "maximum": MAX_DURATION_S},
    "tenant": {"pattern": TENANT_NAME},
    "label": {"maxLength": 200},
}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_FIELD_SCHEMAS: dict[str, Json] = {
    # Fields that stay undecoded are checked later, or by the worker.
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, _OR_NULL]},
    "prompt": {
        "description": "Text, token ids, or a list of several prompts: choice j of prompt i has the index i · n + j.",
        "anyOf": [
            _TEXT,
            _TOKEN_IDS,
            {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKEN_IDS]}},
        ],
    },
    "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}, _OR_NULL]},
    "logit_bias": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _OR_NULL]},
    "tools": {"anyOf": [{"type": "array", "items": _FUNCTION}, _OR_NULL]},
    "functions": {"anyOf": [{"type": "array", "items": _OBJECT}, _OR_NULL]},
    "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _FUNCTION, _OR_NULL]},
    "modalities": {"anyOf": [{"type": "array", "items": {"type": "string"}}, _OR_NULL]},
    "audio": {"anyOf": [_OBJECT, _OR_NULL]},
}

_UNREAD = ("stream_options", "user", "prompt_cache_key")
_OTHER_CHATS = (
    (MessagesRequest, message_decode.OPTIONS, _UNREAD),
    (CountTokensRequest, message_decode.OPTIONS, (*_UNREAD, "max_tokens", "stream", "service_tier")),
    (ResponsesRequest, response_decode.OPTIONS, ()),
)
"""Requests of other APIs for chats, the rule for their options, and further fields that they ignore."""


def schemas() -> Json:
    """Every schema by name."""
    calls = (responses, message_responses, response_objects)
    modules = (
        *calls,
        storage_responses,
        job_responses,
        timeline_responses,
        observation_responses,
        pipeline_objects,
        values,
    )
    named = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    kinds = [
        NewSettings,
        RollbackBody,
        SettingsComparison,
        SettingsHistory,
        SettingsState,
        request_schema.ChatCompletionRequest,
        request_schema.CompletionRequest,
        TenantSettings,
        CreateKeyBody,
        RotateKeyBody,
        LoadAdapterBody,
        UnloadAdapterBody,
        MessagesRequest,
        CountTokensRequest,
        ResponsesRequest,
        CreateBatchBody,
        CreateMessageBatchBody,
        *(*pooled.REQUESTS, *pooled.RESPONSES),
        CreateJobBody,
        FinishRunBody,
        PipelineRequest,
        Diagnosis,
    ]
    owners = {module.__name__ for module in modules}
    kinds += [one for one in named if issubclass(one, Struct) and one.__module__ in owners]
    _, found = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_REF)
    _bound_options(found)
    for name, changed in (_message_fields() | _response_fields() | _storage_fields()).items():
        for field, schema in changed.items():
            found[name]["properties"][field] = schema
    for kind in (request_schema.ChatCompletionRequest, request_schema.CompletionRequest, request_schema.MessageSchema):
        fields = found[kind.__name__]["properties"]
        for name in fields:
            fields[name] = _with_range(_FIELD_SCHEMAS.get(name, fields[name]), _RANGES.get(name, {}))
    found[request_schema.ChatCompletionRequest.__name__]["properties"]["messages"]["minItems"] = 1
    for request in pooled.REQUESTS:
        fields = found[request.__name__]["properties"]
        for name, schema in (*pooled.field_schemas(MAX_INPUTS).items(), *_POOLED_RANGES.items()):
            if name in fields:
                fields[name] = schema if name not in _POOLED_RANGES else _with_range(fields[name], schema)
    for settings in (LimitSettings, TenantSettings, CreateKeyBody, RotateKeyBody):
        fields = found[settings.__name__]["properties"]
        for name in fields:
            fields[name] = _with_range(fields[name], _ADMIN_RANGES.get(name, {}))
    return found


def _bound_options(found: Json) -> None:
    """Options of chat completions in the requests of other APIs: without those that they refuse or do not read."""
    for kind, options, unread in _OTHER_CHATS:
        fields = found[kind.__name__]["properties"]
        for name in (*options.refused, *unread):
            fields.pop(name, None)
        for name in request_schema.ChatOptions.__struct_fields__:
            if name in fields and (kind, name) != (MessagesRequest, "service_tier"):  # its tiers have other names
                fields[name] = _with_range(_FIELD_SCHEMAS.get(name, fields[name]), _RANGES.get(name, {}))


def _storage_fields() -> dict[str, dict[str, Json]]:
    """Bounds of forms, batches and jobs."""
    metadata = {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    }
    return {
        "UploadForm": {"file": {"type": "string", "format": "binary"}},
        "CreateBatchBody": {
            "completion_window": {"type": "string", "pattern": r"^([1-9]|[1-9][0-9]|1[0-5][0-9])h$|^[1-7]d$"},
            "metadata": {"anyOf": [metadata, _OR_NULL]},
        },
        "CreateJobBody": {"body": _OBJECT, "metadata": {"anyOf": [metadata, _OR_NULL]}},
        "ExpiresAfter": {
            "anchor": {"type": "string", "enum": ["created_at"]},
            "seconds": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
        },
        "CreateMessageBatchBody": {
            "requests": {"type": "array", "minItems": 1, "items": {"$ref": _REF.format(name="BatchRequest")}}
        },
        "BatchRequest": {
            "custom_id": {"type": "string", "minLength": 1, "maxLength": MAX_CUSTOM_ID_CHARS},
            "params": _OBJECT,
        },
    }


def _message_fields() -> dict[str, dict[str, Json]]:
    """Fields of Messages requests that stay undecoded, and bounds."""
    blocks: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
    stops = {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": {**_STOP, "minLength": 1}}
    request: dict[str, Json] = {
        "max_tokens": {"type": "integer", **_RANGES["max_tokens"]},
        "system": {"anyOf": [*blocks["anyOf"], _OR_NULL]},
        "stop_sequences": {"anyOf": [stops, _OR_NULL]},
        "container": _OR_NULL,
        "mcp_servers": {"anyOf": [{"type": "array", "maxItems": 0}, _OR_NULL]},
    }
    return {
        "MessagesRequest": request,
        "CountTokensRequest": {name: request[name] for name in ("system", "container", "mcp_servers")},
        "Turn": {"content": blocks},
        "Tool": {"input_schema": _OBJECT},
        "OutputFormat": {"schema": _OBJECT},
    }


def _response_fields() -> dict[str, dict[str, Json]]:
    """Fields of Responses requests that stay undecoded, and bounds."""
    item: Json = {"type": "object", "properties": {"type": {"type": "string"}}}
    included = [SEALED_REASONING, TEXT_LOGPROBS]
    metadata = {
        "type": "object",
        "maxProperties": 16,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    }
    request: dict[str, Json] = {
        "input": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": item}]},
        "instructions": {"anyOf": [{"type": "string"}, _OR_NULL]},
        "tools": {"anyOf": [{"type": "array", "items": _PART}, _OR_NULL]},
        "tool_choice": {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _PART, _OR_NULL]},
        "metadata": {"anyOf": [metadata, _OR_NULL]},
        "max_output_tokens": {"anyOf": [{"type": "integer", **_RANGES["max_tokens"]}, _OR_NULL]},
        "include": {"anyOf": [{"type": "array", "items": {"type": "string", "enum": included}}, _OR_NULL]},
        "truncation": {"anyOf": [{"type": "string", "enum": ["disabled"]}, _OR_NULL]},
        **dict.fromkeys(("conversation", "prompt", "context_management", "moderation"), _OR_NULL),
    }
    return {"ResponsesRequest": request, "TextFormat": {"schema": _OBJECT}}


def _with_range(schema: Json, bounds: Json) -> Json:
    """The schema with bounds on its non-null variants."""
    if not bounds:
        return schema
    choices: Sequence[Json] = schema.get("anyOf", [schema])
    bound = [one if one == _OR_NULL else {**one, **bounds} for one in choices]
    return {**schema, "anyOf": bound} if "anyOf" in schema else bound[0]
