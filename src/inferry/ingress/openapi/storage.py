"""Operations of files and batches."""

from msgspec import Struct

from inferry.domain import errors
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.openapi import storage_responses
from inferry.ingress.openapi.headers import integer_parameter, parameter
from inferry.ingress.openapi.operation import Operation, json_response
from inferry.ingress.openapi.schemas import Json, ref
from inferry.ingress.stored_work import anthropic_batches, files, openai_batches
from inferry.ingress.wire_format import OPENAI, WireFormat

_READ = (
    *(errors.InvalidRequest, errors.InvalidApiKey, errors.StorageDisabled),
    *(errors.LedgerUnavailable, errors.InternalError),
)
_FIND = (*_READ, errors.NotFound)
_CREATE = (*_READ, errors.BodyTooLarge, errors.StorageQuotaExceeded)
_ID = parameter("path", "id", {"type": "string", "minLength": 1}, "The object's id.")
_AFTER = parameter("query", "after", {"type": "string"}, "Only objects behind the one with this id.")


def storage_operations() -> dict[str, dict[str, Operation]]:
    return {**_files(), **_batches(), **_message_batches()}


def _files() -> dict[str, dict[str, Operation]]:
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    listing = (
        parameter("query", "purpose", {"type": "string"}, "Only files with this purpose."),
        integer_parameter("limit", 1, files.MAX_LISTED, files.MAX_LISTED, "Maximum number of files."),
        parameter("query", "order", {"type": "string", "enum": ["asc", "desc"]}, "By time of creation."),
        _AFTER,
    )
    return {
        "/v1/files": {
            "post": Operation(
                summary="Upload a file",
                description="The body is stored while it arrives.",
                tag="storage",
                body=storage_responses.UploadForm,
                media_type="multipart/form-data",
                responses={200: json_response(storage_responses.File, "The file.")},
                errors=(*_CREATE, errors.NotFound),
            ),
            "get": _operation("List files", storage_responses.FileList, "The files.", parameters=listing),
        },
        "/v1/files/{id}": {
            "get": _operation("Get a file", storage_responses.File, "The file.", parameters=(_ID,), wrong=_FIND),
            "delete": _operation(
                "Delete a file", storage_responses.DeletedFile, "It is deleted.", parameters=(_ID,), wrong=_FIND
            ),
        },
        "/v1/files/{id}/content": {
            "get": Operation(
                summary="Download a file",
                tag="storage",
                parameters=(_ID,),
                responses={200: {"description": "The content.", "content": content}},
                errors=_FIND,
            )
        },
    }


def _batches() -> dict[str, dict[str, Operation]]:
    listing = (integer_parameter("limit", 1, openai_batches.MAX_LISTED, 20, "Maximum number of batches."), _AFTER)
    batch = storage_responses.BatchObject
    return {
        "/v1/batches": {
            "post": Operation(
                summary="Create a batch from an uploaded file",
                description=(
                    "Each line of the file is a request: `custom_id`, `method` (POST), `url` (the batch's endpoint) "
                    "and `body`. Requests run in lane P2 with the limits of the key. The batch's id is that of its run."
                ),
                tag="storage",
                body=openai_batches.CreateBatchBody,
                responses={200: json_response(batch, "The batch.")},
                errors=_CREATE,
            ),
            "get": _operation("List batches", storage_responses.BatchList, "The batches.", parameters=listing),
        },
        "/v1/batches/{id}": {"get": _operation("Get a batch", batch, "The batch.", parameters=(_ID,), wrong=_FIND)},
        "/v1/batches/{id}/cancel": {
            "post": _operation(
                "Cancel a batch", batch, "The batch.", parameters=(_ID,), wrong=(*_FIND, errors.Conflict)
            )
        },
    }


def _message_batches() -> dict[str, dict[str, Operation]]:
    wire = MessagesFormat()
    batch = storage_responses.MessageBatch
    lines: Json = {"schema": {"type": "string"}, "x-line-schema": ref(storage_responses.MessageBatchResult)}
    listing = (
        integer_parameter("limit", 1, anthropic_batches.MAX_LISTED, 20, "Maximum number of batches."),
        parameter("query", "after_id", {"type": "string"}, "Only batches behind the one with this id."),
        parameter("query", "before_id", {"type": "string"}, "Only batches before the one with this id."),
    )
    conflict = (*_FIND, errors.Conflict)
    listed, deleted = storage_responses.MessageBatchList, storage_responses.DeletedMessageBatch
    prefix = "/v1/messages/batches"
    return {
        prefix: {
            "post": Operation(
                summary="Create a message batch",
                tag="storage",
                body=anthropic_batches.CreateMessageBatchBody,
                responses={200: json_response(batch, "The batch.")},
                errors=_CREATE,
                format=wire,
            ),
            "get": _operation("List message batches", listed, "The batches.", parameters=listing, wire=wire),
        },
        f"{prefix}/{{id}}": {
            "get": _operation("Get a message batch", batch, "The batch.", parameters=(_ID,), wrong=_FIND, wire=wire),
            "delete": _operation(
                "Delete an ended message batch", deleted, "It is deleted.", parameters=(_ID,), wrong=conflict, wire=wire
            ),
        },
        f"{prefix}/{{id}}/results": {
            "get": Operation(
                summary="Get the results of an ended message batch",
                tag="storage",
                parameters=(_ID,),
                responses={200: {"description": "One line per request.", "content": {"application/x-jsonl": lines}}},
                errors=_FIND,
                format=wire,
            )
        },
        f"{prefix}/{{id}}/cancel": {
            "post": _operation(
                "Cancel a message batch", batch, "The batch.", parameters=(_ID,), wrong=conflict, wire=wire
            )
        },
    }


def _operation(
    summary: str,
    kind: type[Struct],
    description: str,
    *,
    parameters: tuple[Json, ...] = (),
    wrong: tuple[type[errors.GatewayError], ...] = _READ,
    wire: WireFormat = OPENAI,
) -> Operation:
    return Operation(
        summary=summary,
        tag="storage",
        parameters=parameters,
        responses={200: json_response(kind, description)},
        errors=wrong,
        format=wire,
    )
