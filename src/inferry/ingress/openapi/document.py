"""The HTTP surface as an OpenAPI 3.1 document, made from the shapes, errors and paths that the code itself uses.

What is said here in words alone, a test compares with the application: every path it serves and no other.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache

import msgspec
from msgspec import Struct

from inferry._version import __version__
from inferry.dispatch.gateway import RunStatus
from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.domain.settings import TenantSettings
from inferry.ingress.admin_tenants import KEY_STATUSES, CreateKeyBody, RotateKeyBody
from inferry.ingress.openai import request_schema
from inferry.ingress.openapi import responses as answers
from inferry.ingress.openapi.headers import (
    CALL_HEADERS,
    HEADERS_IN,
    HEADERS_OUT,
    IDENTIFIER,
    REFUSAL_HEADERS,
    REFUSALS,
    headers,
    integer_parameter,
    parameter,
)
from inferry.ingress.openapi.schemas import TENANT_NAME, Json, ref, schemas
from inferry.ingress.runs import DEFAULT_WAIT_MS, MAX_LISTED, MAX_STEPS, MAX_WAIT_MS

Kinds = Iterable[type[GatewayError]]

_CALLER: list[Json] = [{"bearer": []}, {"api_key": []}]
_SECURITY_OF: dict[str, list[Json]] = {"calls": _CALLER, "runs": _CALLER, "admin": [{"admin": []}], "process": []}


class Operation(Struct, frozen=True, kw_only=True):
    """One method on one path. `answers` are by status; `errors` the kinds of error it may end with."""

    summary: str
    description: str = ""
    tag: str
    answers: Mapping[int, Json]
    errors: tuple[type[GatewayError], ...] = ()
    body: type[Struct] | None = None
    needs_body: bool = True
    parameters: tuple[Json, ...] = ()


@cache
def render_document() -> bytes:
    """The document as it is served."""
    return msgspec.json.encode(document())


def render_page() -> str:
    """The document as it is written down."""
    return msgspec.json.format(render_document(), indent=1).decode() + "\n"


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Inferry",
            "version": __version__,
            "description": (
                "The inference gateway and scheduler of an agent fleet. What `GET` answers is there for `HEAD` too. "
                "A path that is not here is 404 `not_found`, another method on one that is 405 `method_not_allowed` "
                "with `allow`. What is no HTTP/1.1 gets 400, 501 or 505, a head of more than 64 KiB or 128 fields 431, "
                "and one that does not arrive in time 408, each with an error as body, and the connection is closed."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [
            {"name": "calls", "description": "Models, and calls of them."},
            {
                "name": "runs",
                "description": "What the calls of an agent belong to. Others' runs are as if they were not.",
            },
            {"name": "admin", "description": "Workers, tenants and keys, for operators."},
            {"name": "process", "description": "The gateway itself."},
        ],
        "paths": {path: {m: _operation(m, path, one) for m, one in ops.items()} for path, ops in operations().items()},
        "components": {
            "schemas": schemas(),
            "parameters": HEADERS_IN,
            "headers": HEADERS_OUT,
            "securitySchemes": _SECURITY,
        },
    }


def operations() -> dict[str, dict[str, Operation]]:
    """Every operation by its path and method."""
    return {
        "/v1/chat/completions": {
            "post": _call(
                "A chat call", request_schema.ChatCompletionRequest, answers.ChatCompletion, answers.ChatCompletionChunk
            )
        },
        "/v1/completions": {
            "post": _call(
                "A completion of a text, or of token ids",
                request_schema.CompletionRequest,
                answers.Completion,
                answers.Completion,
            )
        },
        **_models(),
        **_runs(),
        **_workers(),
        **_tenants(),
        **_keys(),
        **_process(),
    }


def error_kinds() -> list[type[GatewayError]]:
    """Every error that a client may see."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]
    return [one for one in kinds if one not in (GatewayError, errors.ClientClosed)]


# -- the paths -------------------------------------------------------------------------------------------------------

_ERRORS_NOT_FROM_CALLS = (
    errors.RunNotFound,
    errors.NotFound,
    errors.AdminOnly,
    errors.MethodNotAllowed,
    errors.Conflict,
)
_RUN_ERRORS = (errors.InvalidRequest, errors.InvalidApiKey, errors.RunNotFound, errors.InternalError)
_ADMIN_ERRORS = (errors.AdminOnly, errors.InternalError)


def _call(summary: str, body: type[Struct], full: type[Struct], event: type[Struct]) -> Operation:
    stream = {"schema": {"type": "string"}, "x-event-schema": ref(event)}
    content = {"application/json": {"schema": ref(full)}, "text/event-stream": stream}
    return Operation(
        summary=summary,
        description=(
            "With `stream` the answer is server-sent events, one `data:` line each and an empty line after it: events "
            f"of the schema `{event.__name__}`, then with `stream_options.include_usage` one with `usage` and no "
            "choices, then `data: [DONE]`. The comment `: waiting` may stand anywhere between. An error after the "
            "first byte is an event of the schema `Error`, and the end, without `[DONE]`. Fields that are not named "
            "here go to the worker as they are."
        ),
        tag="calls",
        body=body,
        parameters=tuple({"$ref": f"#/components/parameters/{name}"} for name in HEADERS_IN),
        answers={200: {"description": "The answer.", "content": content, "headers": headers(*CALL_HEADERS)}},
        errors=tuple(one for one in error_kinds() if one not in _ERRORS_NOT_FROM_CALLS),
    )


def _models() -> dict[str, dict[str, Operation]]:
    wrong = (errors.InvalidApiKey, errors.InvalidRequest)
    one = parameter("path", "model", {"type": "string", "minLength": 1}, "The model's name; it may have slashes in it.")
    return {
        "/v1/models": {
            "get": Operation(
                summary="The models that the key may use",
                tag="calls",
                answers={200: _json(answers.ModelList, "The models.")},
                errors=wrong,
            )
        },
        "/v1/models/{model}": {
            "get": Operation(
                summary="One model",
                tag="calls",
                parameters=(one,),
                answers={200: _json(answers.Model, "The model.")},
                errors=(*wrong, errors.ModelNotFound),
            )
        },
    }


def _runs() -> dict[str, dict[str, Operation]]:
    run = parameter("path", "id", IDENTIFIER, "The run's id, percent-encoded.")
    steps = integer_parameter("steps", 0, MAX_STEPS, 20, "How many of the latest steps to show.")
    wait = integer_parameter("wait_ms", 0, MAX_WAIT_MS, DEFAULT_WAIT_MS, "How long to wait for workers to confirm.")
    statuses: Json = {"type": "string", "enum": [one.value for one in RunStatus]}
    seconds: Json = {"type": "string", "pattern": r"^\d{1,12}(\.\d{1,9})?$"}
    listing = (
        parameter("query", "status", statuses, "Only those that are so."),
        parameter("query", "parent", {"type": "string"}, "Only those that this run started."),
        parameter("query", "since", seconds, "Only those with calls since then, in seconds since 1970."),
        integer_parameter("limit", 1, MAX_LISTED, 20, "How many."),
        parameter("query", "cursor", {"type": "string"}, "Where an earlier page ended: its `next_cursor`."),
    )
    some = (errors.InvalidRequest, errors.InvalidApiKey, errors.InternalError)
    render_page = {200: _json(answers.RunDetail, "The run.")}
    return {
        "/v1/runs": {
            "get": Operation(
                summary="The tenant's runs",
                tag="runs",
                parameters=listing,
                answers={200: _json(answers.RunList, "The runs.")},
                errors=some,
            )
        },
        "/v1/runs/{id}": {
            "get": Operation(
                summary="One run", tag="runs", parameters=(run, steps), answers=render_page, errors=_RUN_ERRORS
            ),
            "delete": Operation(
                summary="Cancel a run with everything below it",
                description="What is queued goes, what runs is stopped, what comes is refused. Again is no error.",
                tag="runs",
                parameters=(run, wait),
                answers={200: _json(answers.CancelledRun, "What was found and done.")},
                errors=_RUN_ERRORS,
            ),
        },
        "/v1/runs/{id}/finish": {
            "post": Operation(
                summary="Say that a run is over",
                description="A later call opens it again.",
                tag="runs",
                parameters=(run,),
                answers=render_page,
                errors=_RUN_ERRORS,
            )
        },
    }


def _workers() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "minLength": 1}, "The worker's name.")
    listed = {200: _json(answers.WorkerList, "Every worker, as things stand now.")}

    def act(summary: str, *more: type[GatewayError]) -> dict[str, Operation]:
        wrong: tuple[type[GatewayError], ...] = (*_ADMIN_ERRORS, errors.NotFound, *more)
        one = Operation(summary=summary, tag="admin", parameters=(name,), answers=listed, errors=wrong)
        return {"post": one}

    return {
        "/admin/workers": {"get": Operation(summary="The workers", tag="admin", answers=listed, errors=_ADMIN_ERRORS)},
        "/admin/workers/{name}/drain": act("No new work for a worker; what runs there goes on"),
        "/admin/workers/{name}/readmit": act("New work for a worker again", errors.Draining),
    }


def _tenants() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "pattern": TENANT_NAME}, "The tenant's name.")
    render_page = {200: _json(answers.TenantDetail, "The tenant.")}
    found = (*_ADMIN_ERRORS, errors.NotFound)
    put = (*_ADMIN_ERRORS, errors.InvalidRequest, errors.Conflict, errors.BodyTooLarge)
    removed = {200: _json(answers.RemovedTenant, "It is gone, and its keys are revoked.")}
    return {
        "/admin/tenants": {
            "get": Operation(
                summary="The tenants",
                tag="admin",
                answers={200: _json(answers.TenantList, "Those of the configuration first.")},
                errors=(*_ADMIN_ERRORS, errors.InvalidRequest),
            )
        },
        "/admin/tenants/{name}": {
            "get": Operation(summary="One tenant", parameters=(name,), answers=render_page, errors=found, tag="admin"),
            "put": Operation(
                summary="Make or replace a tenant",
                tag="admin",
                description="What is left out has its default. Those of the configuration are changed there.",
                parameters=(name,),
                body=TenantSettings,
                answers=render_page,
                errors=put,
            ),
            "delete": Operation(
                summary="Remove a tenant",
                tag="admin",
                parameters=(name,),
                answers=removed,
                errors=(*found, errors.Conflict, errors.InvalidRequest),
            ),
        },
    }


def _keys() -> dict[str, dict[str, Operation]]:
    key = parameter("path", "id", {"type": "string", "minLength": 1}, "The key's id, which is public.")
    statuses: Json = {"type": "string", "enum": list(KEY_STATUSES)}
    render_page = {200: _json(answers.KeyDetail, "The key.")}
    made = {201: _json(answers.CreatedKey, "The new key, with its text this once.")}
    found = (*_ADMIN_ERRORS, errors.NotFound)
    wrong = (errors.InvalidRequest, errors.BodyTooLarge)
    return {
        "/admin/keys": {
            "get": Operation(
                summary="The keys",
                tag="admin",
                parameters=(
                    parameter("query", "tenant", {"type": "string"}, "Only those of this tenant."),
                    parameter("query", "status", statuses, "Only those that are so."),
                ),
                answers={200: _json(answers.KeyList, "The oldest first.")},
                errors=(*_ADMIN_ERRORS, errors.InvalidRequest),
            ),
            "post": Operation(
                summary="Make a key",
                tag="admin",
                description="A tenant that is new is made with it.",
                body=CreateKeyBody,
                answers=made,
                errors=(*_ADMIN_ERRORS, *wrong, errors.NotFound),
            ),
        },
        "/admin/keys/{id}": {
            "get": Operation(summary="One key", parameters=(key,), answers=render_page, errors=found, tag="admin"),
            "delete": Operation(
                summary="Revoke a key",
                tag="admin",
                description="Again is no error.",
                parameters=(key,),
                answers=render_page,
                errors=found,
            ),
        },
        "/admin/keys/{id}/rotate": {
            "post": Operation(
                summary="Make a key with the rights of another, which ends after a grace",
                tag="admin",
                parameters=(key,),
                body=RotateKeyBody,
                needs_body=False,
                answers=made,
                errors=(*found, *wrong, errors.Conflict),
            )
        },
    }


def _process() -> dict[str, dict[str, Operation]]:
    text = {"description": "The Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    itself = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    ready = {200: _json(answers.Ready, "It is."), 503: _json(answers.Ready, "Not yet, or no longer.")}
    return {
        "/": {"get": Operation(summary="What there is", tag="process", answers={200: _json(answers.Index, "A list.")})},
        "/health": {
            "get": Operation(
                summary="Alive?", tag="process", answers={200: _json(answers.Health, "The process answers.")}
            )
        },
        "/ready": {"get": Operation(summary="Is new work welcome?", tag="process", answers=ready)},
        "/metrics": {"get": Operation(summary="Metrics", tag="process", answers={200: text})},
        "/openapi.json": {"get": Operation(summary="This document", tag="process", answers={200: itself})},
    }


# -- the document ----------------------------------------------------------------------------------------------------

_SECURITY: Json = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A tenant's key. A gateway without any keys serves its own machine without one.",
    },
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, where it is easier."},
    "admin": {
        "type": "http",
        "scheme": "bearer",
        "description": "`server.admin_key`. Without one: clients on its machine, but neither browsers nor proxies.",
    },
}


def _operation(method: str, path: str, one: Operation) -> Json:
    found: Json = {"operationId": _operation_id(method, path), "summary": one.summary, "tags": [one.tag]}
    if one.description:
        found["description"] = one.description
    if one.parameters:
        found["parameters"] = list(one.parameters)
    if one.body is not None:
        found["requestBody"] = {
            "required": one.needs_body,
            "content": {"application/json": {"schema": ref(one.body)}},
        }
    responses = {str(status): answer for status, answer in one.answers.items()}
    responses |= _error_responses(one.errors)
    found["responses"] = dict(sorted(responses.items()))
    found["security"] = _SECURITY_OF[one.tag]
    return found


def _operation_id(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"[a-z]+", path.removeprefix("/v1"))]) if path != "/" else "get_index"


def _error_responses(kinds: Kinds) -> dict[str, Json]:
    """An answer for every status, with the codes it may have."""
    by_status: dict[int, list[type[GatewayError]]] = {}
    for kind in sorted(kinds, key=lambda kind: (kind.status, kind.code)):
        by_status.setdefault(kind.status, []).append(kind)
    found = {}
    for status, alike in by_status.items():
        codes = list(dict.fromkeys(kind.code for kind in alike))
        meanings = dict.fromkeys(f"`{kind.code}`: {' '.join((kind.__doc__ or '').split())}" for kind in alike)
        names = REFUSAL_HEADERS if status in REFUSALS else ("x-request-id",)
        schema = {"allOf": [ref(answers.Error), {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}]}
        found[str(status)] = {
            "description": "\n".join(meanings),
            "content": {"application/json": {"schema": schema}},
            "headers": headers(*names),
        }
    return found


def _json(kind: type[Struct], description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(kind)}}}
