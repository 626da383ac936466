"""Operations of the Responses API."""

from inferry.domain import errors
from inferry.ingress.openapi import response_objects
from inferry.ingress.openapi.headers import CALL_HEADERS, headers, integer_parameter, parameter
from inferry.ingress.openapi.operation import CALL_PARAMETERS, Operation, call_errors, json_response
from inferry.ingress.openapi.schemas import Json, ref
from inferry.ingress.responses.request_schema import ResponsesRequest
from inferry.ingress.responses.router import MAX_LISTED

_FOUND = (
    *(errors.InvalidRequest, errors.InvalidApiKey, errors.StorageDisabled, errors.NotFound),
    *(errors.LedgerUnavailable, errors.InternalError),
)
_ID = parameter("path", "id", {"type": "string", "minLength": 1}, "The response's id.")
_NUMBER: Json = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}
_ORDER: Json = {"type": "string", "enum": ["asc", "desc"]}


def response_operations() -> dict[str, dict[str, Operation]]:
    stream = {"schema": {"type": "string"}, "x-event-schema": ref(response_objects.ResponseEvent)}
    content = {"application/json": {"schema": ref(response_objects.Response)}, "text/event-stream": stream}
    with_headers = headers(*CALL_HEADERS, "x-inferry-tools-left-out")
    created = {"description": "The response.", "content": content, "headers": with_headers}
    return {
        "/v1/responses": {
            "post": Operation(
                summary="Create a response",
                description=(
                    "As OpenAI's Responses API. With `stream` the response is server-sent events with a name and a "
                    "`sequence_number`, from `response.created` to `response.completed`, `response.incomplete` or "
                    "`response.failed`. `keepalive` may occur at any time. With `background` the response is stored "
                    "and executed later. Options of chat completions that are not named here are refused; other fields "
                    "that are not named here are ignored."
                ),
                tag="calls",
                body=ResponsesRequest,
                parameters=CALL_PARAMETERS,
                responses={200: created},
                errors=(*call_errors(), errors.NotFound, errors.StorageDisabled, errors.StorageQuotaExceeded),
            )
        },
        **_stored(content),
    }


def _stored(content: Json) -> dict[str, dict[str, Operation]]:
    found = {200: json_response(response_objects.Response, "The response.")}
    after = parameter("query", "after", {"type": "string"}, "Only items behind the one with this id.")
    order = parameter("query", "order", _ORDER, "By place in the conversation; desc by default.")
    limit = integer_parameter("limit", 1, MAX_LISTED, 20, "Maximum number of items.")
    return {
        "/v1/responses/{id}": {
            "get": Operation(
                summary="Get a stored response",
                description="With `stream` the events of a background response that was created with `stream`.",
                tag="calls",
                parameters=(
                    _ID,
                    parameter("query", "stream", {"type": "string", "enum": ["true", "false"]}, "Whether to stream."),
                    parameter("query", "starting_after", _NUMBER, "The last event that is not wanted."),
                ),
                responses={200: {"description": "The response.", "content": content}},
                errors=_FOUND,
            ),
            "delete": Operation(
                summary="Delete a stored response",
                description="A background response that has not ended is cancelled.",
                tag="calls",
                parameters=(_ID,),
                responses={200: json_response(response_objects.DeletedResponse, "It is deleted.")},
                errors=_FOUND,
            ),
        },
        "/v1/responses/{id}/cancel": {
            "post": Operation(
                summary="Cancel a background response",
                description="Idempotent. A response that has ended stays as it is.",
                tag="calls",
                parameters=(_ID,),
                responses=found,
                errors=_FOUND,
            )
        },
        "/v1/responses/{id}/input_items": {
            "get": Operation(
                summary="List the items that a stored response was made from",
                description="Those of the responses it follows on come before its own.",
                tag="calls",
                parameters=(_ID, limit, order, after),
                responses={200: json_response(response_objects.ResponseItems, "The items.")},
                errors=_FOUND,
            )
        },
    }
