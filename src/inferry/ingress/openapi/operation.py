"""Operations of the HTTP API: what they have in common."""

from collections.abc import Mapping

from msgspec import Struct

from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.ingress.openapi.headers import CALL_HEADERS, HEADERS_IN, headers
from inferry.ingress.openapi.schemas import Json, ref
from inferry.ingress.wire_format import OPENAI, WireFormat

CALL_PARAMETERS: tuple[Json, ...] = tuple({"$ref": f"#/components/parameters/{name}"} for name in HEADERS_IN)


class Operation(Struct, frozen=True, kw_only=True):
    """One method on one path. `responses` are by status; `errors` the possible errors, in the given format."""

    summary: str
    description: str = ""
    tag: str
    responses: Mapping[int, Json]
    errors: tuple[type[GatewayError], ...] = ()
    format: WireFormat = OPENAI
    body: type[Struct] | None = None
    needs_body: bool = True
    media_type: str = "application/json"
    parameters: tuple[Json, ...] = ()


def error_kinds() -> list[type[GatewayError]]:
    """Every error that a client can receive."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]
    return [one for one in kinds if one not in (GatewayError, errors.ClientClosed, errors.IngressLost)]


ERRORS_NOT_FROM_CALLS = (
    errors.RunNotFound,
    errors.NotFound,
    errors.AdminOnly,
    errors.MethodNotAllowed,
    errors.Conflict,
    errors.StorageDisabled,
    errors.StorageQuotaExceeded,
    errors.ReportTimeout,
)


def call_errors() -> tuple[type[GatewayError], ...]:
    """The errors of inference calls."""
    return tuple(one for one in error_kinds() if one not in ERRORS_NOT_FROM_CALLS)


def call_operation(summary: str, body: type[Struct], full: type[Struct], event: type[Struct]) -> Operation:
    stream = {"schema": {"type": "string"}, "x-event-schema": ref(event)}
    content = {"application/json": {"schema": ref(full)}, "text/event-stream": stream}
    return Operation(
        summary=summary,
        description=(
            "With `stream` the response is server-sent events, each one `data:` line and an empty line: events of the "
            f"schema `{event.__name__}`, then with `stream_options.include_usage` one event with `usage` and without "
            "choices, then `data: [DONE]`. The comment `: waiting` may occur between events. An error after the first "
            "byte is an event of the schema `Error` that ends the stream without `[DONE]`. Fields that are not named "
            "here are forwarded to the worker."
        ),
        tag="calls",
        body=body,
        parameters=CALL_PARAMETERS,
        responses={200: {"description": "The response.", "content": content, "headers": headers(*CALL_HEADERS)}},
        errors=call_errors(),
    )


def pooled_operation(summary: str, body: type[Struct], full: type[Struct]) -> Operation:
    content = {"application/json": {"schema": ref(full)}}
    return Operation(
        summary=summary,
        description="Fields that are not named here are forwarded to the worker.",
        tag="calls",
        body=body,
        parameters=CALL_PARAMETERS,
        responses={200: {"description": "The response.", "content": content, "headers": headers(*CALL_HEADERS)}},
        errors=call_errors(),
    )


def json_response(kind: type[Struct], description: str, *others: type[Struct]) -> Json:
    """A response with a body of one of these kinds."""
    schema: Json = {"oneOf": [ref(one) for one in (kind, *others)]} if others else ref(kind)
    return {"description": description, "content": {"application/json": {"schema": schema}}}
