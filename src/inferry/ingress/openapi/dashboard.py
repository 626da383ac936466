"""Operations of the dashboard: its files, its data, and the sessions of browsers."""

from inferry.domain import errors
from inferry.ingress.dashboard.values import LiveState, Overview, RunStates, Series, SessionState, Timeline
from inferry.ingress.openapi import responses
from inferry.ingress.openapi.headers import IDENTIFIER, integer_parameter, parameter
from inferry.ingress.openapi.operation import Operation, json_response
from inferry.ingress.openapi.schemas import ref
from inferry.ingress.openapi.timeline_responses import PerfettoTrace
from inferry.ingress.runs import DEFAULT_WAIT_MS, MAX_STEPS, MAX_WAIT_MS

_ADMIN = (errors.AdminOnly, errors.InternalError)


def dashboard_operations() -> dict[str, dict[str, Operation]]:
    return {**_files(), **_sessions(), **_data(), **_runs()}


def _files() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "minLength": 1}, "The file's name. It may contain a slash.")
    file = {"description": "The file.", "content": {"text/html": {}, "text/css": {}, "text/javascript": {}, "*/*": {}}}
    return {
        "/dashboard/{name}": {
            "get": Operation(
                summary="Get a file of the dashboard's page",
                tag="dashboard",
                parameters=(name,),
                responses={200: file},
                errors=(errors.NotFound,),
            )
        }
    }


def _sessions() -> dict[str, dict[str, Operation]]:
    found = {200: json_response(SessionState, "The session.")}
    return {
        "/admin/session": {
            "get": Operation(summary="Get the session of a browser", tag="dashboard", responses=found),
            "post": Operation(
                summary="Sign in",
                description=(
                    "Exchanges the admin key, sent as a bearer token, for a session cookie. Five failures per minute "
                    "and address are allowed."
                ),
                tag="dashboard",
                responses=found,
                errors=(errors.AdminOnly, errors.RateLimited),
            ),
            "delete": Operation(summary="Sign out", tag="dashboard", responses=found),
        }
    }


def _data() -> dict[str, dict[str, Operation]]:
    parts = {"event": {"type": "string", "enum": ["series", "live", "end"]}, "data": {"type": "string"}}
    event = {
        "schema": {"type": "object", "properties": parts, "required": list(parts)},
        "x-event-schema": {"oneOf": [ref(LiveState), ref(Series)]},
    }
    return {
        "/admin/overview": {
            "get": Operation(
                summary="Get the state of the gateway",
                tag="admin",
                responses={200: json_response(Overview, "The state now, and the last minutes.")},
                errors=_ADMIN,
            )
        },
        "/admin/overview/stream": {
            "get": Operation(
                summary="Follow the state of the gateway",
                description=(
                    "Server-sent events: `series` (the last minutes) at first and every five seconds, `live` (the "
                    "state) every second, `end` when the gateway shuts down or the session expires. A client that does "
                    "not accept `text/event-stream` gets one event of both kinds."
                ),
                tag="admin",
                responses={200: {"description": "The events.", "content": {"text/event-stream": event}}},
                errors=(*_ADMIN, errors.RateLimited, errors.Draining),
            )
        },
    }


def _runs() -> dict[str, dict[str, Operation]]:
    run = parameter("path", "id", IDENTIFIER, "The run's id, percent-encoded.")
    tenant = parameter("query", "tenant", IDENTIFIER, "The run's tenant.") | {"required": True}
    steps = integer_parameter("steps", 0, MAX_STEPS, 20, "Number of latest steps in the response.")
    wait = integer_parameter(
        "wait_ms", 0, MAX_WAIT_MS, DEFAULT_WAIT_MS, "How long to wait for workers to confirm, in milliseconds."
    )
    trace = {"type": "string", "enum": ["perfetto"]}
    format = parameter("query", "format", trace, "A trace of the run and its sub-runs for ui.perfetto.dev.")
    wrong = (*_ADMIN, errors.InvalidRequest, errors.RunNotFound)
    return {
        "/admin/runs": {
            "get": Operation(
                summary="List the latest runs of all tenants",
                tag="admin",
                responses={200: json_response(RunStates, "The runs, those with calls in flight first.")},
                errors=_ADMIN,
            )
        },
        "/admin/runs/{id}": {
            "get": Operation(
                summary="Get a run of any tenant",
                tag="admin",
                parameters=(run, tenant, steps),
                responses={200: json_response(responses.RunDetail, "The run.")},
                errors=wrong,
            ),
            "delete": Operation(
                summary="Cancel a run of any tenant and its sub-runs",
                tag="admin",
                parameters=(run, tenant, wait),
                responses={200: json_response(responses.CancelledRun, "What was cancelled.")},
                errors=wrong,
            ),
        },
        "/admin/runs/{id}/timeline": {
            "get": Operation(
                summary="Get the attempts of a run in time",
                tag="admin",
                parameters=(run, tenant, format),
                responses={200: json_response(Timeline, "The latest attempts by arrival.", PerfettoTrace)},
                errors=wrong,
            )
        },
    }
