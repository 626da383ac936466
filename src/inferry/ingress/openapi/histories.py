"""Operations of summarised histories."""

from msgspec import Struct

from inferry.domain import errors
from inferry.ingress.openapi.headers import parameter
from inferry.ingress.openapi.operation import Operation, json_response
from inferry.ingress.openapi.storage_responses import DeletedHistory, HistoryObject

_ID = parameter("path", "id", {"type": "string", "minLength": 1}, "The id in the marker and in `x-inferry-history`.")
_ERRORS = (errors.InvalidApiKey, errors.NotFound, errors.LedgerUnavailable, errors.InternalError)


def history_operations() -> dict[str, dict[str, Operation]]:
    def operation(summary: str, kind: type[Struct], description: str) -> Operation:
        responses = {200: json_response(kind, description)}
        return Operation(summary=summary, tag="storage", parameters=(_ID,), responses=responses, errors=_ERRORS)

    return {
        "/v1/histories/{id}": {
            "get": operation("Get the original of a summarised history", HistoryObject, "The history."),
            "delete": operation("Delete a history; its summary is no longer used", DeletedHistory, "It is deleted."),
        }
    }
