"""The OpenAPI 3.1 document of the HTTP API, generated from the structs, errors and paths that the code uses.

A test compares it with the application: it has every path that is served, and no other.
"""

import re
from functools import cache

import msgspec

from inferry._version import __version__
from inferry.domain.errors import GatewayError
from inferry.ingress.openapi import responses
from inferry.ingress.openapi.headers import HEADERS_IN, HEADERS_OUT, REFUSAL_HEADERS, REFUSALS, headers
from inferry.ingress.openapi.jobs import webhooks
from inferry.ingress.openapi.message_responses import MessageError
from inferry.ingress.openapi.operation import Operation
from inferry.ingress.openapi.operations import operations
from inferry.ingress.openapi.schemas import Json, ref, schemas
from inferry.ingress.wire_format import OPENAI

_CALLER: list[Json] = [{"bearer": []}, {"api_key": []}]
_SECURITY_OF: dict[str, list[Json]] = {
    "calls": _CALLER,
    "runs": _CALLER,
    "storage": _CALLER,
    "admin": [{"admin": []}],
    "dashboard": [],
    "process": [],
}
_SECURITY: Json = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A tenant's key. A gateway without keys serves clients on its own machine without one.",
    },
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A tenant's key, as a header."},
    "admin": {
        "type": "http",
        "scheme": "bearer",
        "description": (
            "`server.admin_key`. Without one, clients on the gateway's machine, except proxies and web pages of others."
        ),
    },
}


@cache
def render_document() -> bytes:
    """The document as bytes, as served."""
    return msgspec.json.encode(document())


def render_page() -> str:
    """The document indented, for the repository."""
    return msgspec.json.format(render_document(), indent=1).decode() + "\n"


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Inferry",
            "version": __version__,
            "description": (
                "Inference gateway and scheduler for fleets of LLM agents. Every `GET` path supports `HEAD`. "
                "An unknown path gets 404 `not_found`; another method on a known path gets 405 `method_not_allowed` "
                "with `allow`. Malformed HTTP gets 400, 501 or 505; a request head of more than 64 KiB or 128 fields "
                "gets 431; a head that does not arrive in time gets 408. Each of these has an error body and closes "
                "the connection."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [
            {"name": "calls", "description": "Models and inference calls."},
            {
                "name": "runs",
                "description": "Runs of agents. Runs of other tenants are reported as unknown.",
            },
            {"name": "storage", "description": "Files, batches and jobs. Those of other tenants are unknown."},
            {"name": "admin", "description": "Workers, tenants and keys. For operators."},
            {"name": "dashboard", "description": "The page at `/`, and sign-in of browsers."},
            {"name": "process", "description": "State of the gateway process."},
        ],
        "paths": {path: {m: _operation(m, path, one) for m, one in ops.items()} for path, ops in operations().items()},
        "webhooks": webhooks(),
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
            "content": {one.media_type: {"schema": ref(one.body)}},
        }
    by_status = {str(status): response for status, response in one.responses.items()} | _error_responses(one)
    found["responses"] = dict(sorted(by_status.items()))
    found["security"] = _SECURITY_OF[one.tag]
    return found


def _operation_id(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"[a-z]+", path.removeprefix("/v1"))]) if path != "/" else "get_index"


def _error_responses(one: Operation) -> dict[str, Json]:
    """One response per status, with its codes."""
    by_status: dict[int, list[type[GatewayError]]] = {}
    for kind in sorted(one.errors, key=lambda kind: (kind.status, kind.code)):
        by_status.setdefault(one.format.error_status(kind("")), []).append(kind)
    found = {}
    for status, alike in by_status.items():
        codes = list(dict.fromkeys(kind.code for kind in alike))
        meanings = dict.fromkeys(f"`{kind.code}`: {' '.join((kind.__doc__ or '').split())}" for kind in alike)
        names = REFUSAL_HEADERS if alike[0].status in REFUSALS else ("x-request-id",)
        schema = ref(MessageError)
        if one.format is OPENAI:
            with_codes = {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}
            schema = {"allOf": [ref(responses.Error), with_codes]}
        found[str(status)] = {
            "description": "\n".join(meanings),
            "content": {"application/json": {"schema": schema}},
            "headers": headers(*names),
        }
    return found
