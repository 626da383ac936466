"""Operations of reports and of the diagnosis."""

from inferry.domain import errors
from inferry.domain.reports import REPORTS
from inferry.ingress.admin_diagnosis import DEFAULT_WINDOW_S, MIN_WINDOW_S
from inferry.ingress.admin_reports import PARAMETERS
from inferry.ingress.openapi.headers import parameter
from inferry.ingress.openapi.observation_responses import ReportList, ReportTable, ScaleReport
from inferry.ingress.openapi.operation import Operation, json_response
from inferry.ingress.openapi.schemas import Json
from inferry.observe.diagnosis.findings import Diagnosis
from inferry.observe.history import KEPT_S

_ERRORS = (errors.AdminOnly, errors.InvalidRequest, errors.InternalError)
_SCHEMAS: dict[str, Json] = {
    "limit": {"type": "integer", "minimum": 1},
    "budget": {"type": "number", "minimum": 0},
    "format": {"type": "string", "enum": ["json", "csv"]},
}


def observation_operations() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "enum": list(REPORTS)}, "The report's name.")
    query = tuple(
        parameter("query", one, _SCHEMAS.get(one, {"type": "string"}), text) for one, text in PARAMETERS.items()
    )
    table = json_response(ReportTable, "The report.")
    table = {**table, "content": {**table["content"], "text/csv": {"schema": {"type": "string"}}}}
    window: Json = {"type": "number", "minimum": MIN_WINDOW_S, "maximum": KEPT_S, "default": DEFAULT_WINDOW_S}
    return {
        "/admin/reports": {
            "get": Operation(
                summary="List the reports",
                tag="admin",
                responses={200: json_response(ReportList, "The reports.")},
                errors=_ERRORS,
            )
        },
        "/admin/reports/{name}": {
            "get": Operation(
                summary="Get a report of the ledger",
                tag="admin",
                parameters=(name, *query),
                responses={200: table},
                errors=(*_ERRORS, errors.NotFound, errors.LedgerUnavailable, errors.ReportTimeout),
            )
        },
        "/admin/diagnosis": {
            "get": Operation(
                summary="Diagnose the gateway: where latency comes from, and the one setting to try",
                tag="admin",
                parameters=(parameter("query", "window_s", window, "How far back to look, in seconds."),),
                responses={200: json_response(Diagnosis, "The diagnosis.")},
                errors=(*_ERRORS, errors.ReportTimeout),
            )
        },
        "/admin/scale": {
            "get": Operation(
                summary="Get how many workers each group should have",
                tag="admin",
                parameters=(parameter("query", "group", {"type": "string"}, "Only this worker group."),),
                responses={200: json_response(ScaleReport, "Advice by group.")},
                errors=_ERRORS,
            )
        },
    }
