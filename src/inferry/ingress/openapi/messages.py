"""Operations of the Messages API."""

from inferry.domain import errors
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.anthropic.request_schema import CountTokensRequest, MessagesRequest
from inferry.ingress.openapi import message_responses
from inferry.ingress.openapi.headers import CALL_HEADERS, headers
from inferry.ingress.openapi.operation import CALL_PARAMETERS, Operation, call_errors, json_response
from inferry.ingress.openapi.schemas import ref

_FORMAT = MessagesFormat()
_COUNT_ERRORS = (
    *(errors.InvalidRequest, errors.UnsupportedFeature, errors.ContextLengthExceeded, errors.InvalidApiKey),
    *(errors.ModelNotAllowed, errors.ModelNotFound, errors.BodyTooLarge, errors.QueueFull, errors.NoWorker),
    errors.InternalError,
)


def message_operations() -> dict[str, dict[str, Operation]]:
    stream = {"schema": {"type": "string"}, "x-event-schema": ref(message_responses.MessageEvent)}
    content = {"application/json": {"schema": ref(message_responses.Message)}, "text/event-stream": stream}
    found = {"description": "The message.", "content": content, "headers": headers(*CALL_HEADERS, "request-id")}
    counted = json_response(message_responses.TokenCount, "The count.") | {
        "headers": headers("x-inferry-token-count", "x-request-id", "request-id")
    }
    return {
        "/v1/messages/count_tokens": {
            "post": Operation(
                summary="Count the prompt tokens of a message",
                description=(
                    "The count is exact where the gateway has the model's tokenizer or a worker of the model counts, "
                    "else estimated from the bytes, for composed models always; the header `x-inferry-token-count` "
                    "says which."
                ),
                tag="calls",
                body=CountTokensRequest,
                responses={200: counted},
                errors=_COUNT_ERRORS,
                format=_FORMAT,
            )
        },
        "/v1/messages": {
            "post": Operation(
                summary="Create a message",
                description=(
                    "As Anthropic's Messages API. With `stream` the response is server-sent events with a name: "
                    "`message_start`, for every block `content_block_start`, `content_block_delta` and "
                    "`content_block_stop`, then `message_delta` and `message_stop`. `ping` may occur at any time. An "
                    "error after the first byte is an event `error` that ends the stream. The usage of "
                    "`message_start` is an estimate. Options of chat completions that are not named here are refused; "
                    "other fields that are not named here are ignored."
                ),
                tag="calls",
                body=MessagesRequest,
                parameters=CALL_PARAMETERS,
                responses={200: found},
                errors=call_errors(),
                format=_FORMAT,
            )
        },
    }
