"""The OpenAPI 3.1 document of the HTTP API, generated from the structs, errors and paths that the code uses.

A test compares it with the application: it has every path that is served, and no other.
"""

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from inferry._version import __version__
from inferry.domain.errors import GatewayError
from inferry.ingress.openapi import responses as answers
from inferry.ingress.openapi.headers import HEADERS_IN, HEADERS_OUT, REFUSAL_HEADERS, REFUSALS, headers
from inferry.ingress.openapi.operations import Operation, operations
from inferry.ingress.openapi.schemas import Json, ref, schemas

_CALLER: list[Json] = [{"bearer": []}, {"api_key": []}]
_SECURITY_OF: dict[str, list[Json]] = {"calls": _CALLER, "runs": _CALLER, "admin": [{"admin": []}], "process": []}
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


def _error_responses(kinds: Iterable[type[GatewayError]]) -> dict[str, Json]:
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
