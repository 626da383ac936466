"""Operations of reports, of the diagnosis and of settings."""

from inferry.domain import errors
from inferry.domain.reports import REPORTS
from inferry.domain.settings_versions import NewSettings, SettingsComparison, SettingsHistory, SettingsState
from inferry.ingress.admin_diagnosis import DEFAULT_WINDOW_S, MIN_WINDOW_S
from inferry.ingress.admin_reports import PARAMETERS
from inferry.ingress.admin_settings import RollbackBody
from inferry.ingress.openapi.headers import parameter
from inferry.ingress.openapi.observation_responses import DeadLetterList, ReportList, ReportTable, ScaleReport
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
        **_settings_operations(),
        "/admin/dead-letters": {
            "get": Operation(
                summary="List stored work that was given up",
                tag="admin",
                responses={200: json_response(DeadLetterList, "Dead letters of all tenants, the oldest first.")},
                errors=_ERRORS,
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


def _settings_operations() -> dict[str, dict[str, Operation]]:
    state = {200: json_response(SettingsState, "The versions in use.")}
    failures = (*_ERRORS, errors.NotFound, errors.Conflict, errors.LedgerUnavailable)
    history = json_response(SettingsHistory, "All versions and the latest changes.")
    comparison = json_response(SettingsComparison, "Both versions of the latest trial, with intervals.")
    return {
        "/admin/settings": {
            "get": Operation(
                summary="List the versions of the settings", tag="admin", responses={200: history}, errors=failures
            ),
            "post": Operation(
                summary="Apply settings, or try them with a share of the runs",
                tag="admin",
                body=NewSettings,
                responses=state,
                errors=failures,
            ),
        },
        "/admin/settings/rollback": {
            "post": Operation(
                summary="End a trial, or use the version before",
                tag="admin",
                body=RollbackBody,
                needs_body=False,
                responses=state,
                errors=failures,
            )
        },
        "/admin/settings/comparison": {
            "get": Operation(
                summary="Compare the two versions of the latest trial",
                tag="admin",
                responses={200: comparison},
                errors=failures,
            )
        },
    }
