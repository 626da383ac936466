"""Every operation of the HTTP API: its path, parameters, bodies, responses and errors."""

from inferry.dispatch.gateway import RunStatus
from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.domain.tenant_settings import TenantSettings
from inferry.ingress.admin_adapters import LOAD, UNLOAD, LoadAdapterBody, UnloadAdapterBody
from inferry.ingress.admin_tenants import KEY_STATUSES, CreateKeyBody, RotateKeyBody
from inferry.ingress.openai import request_schema
from inferry.ingress.openapi import pooled, responses
from inferry.ingress.openapi.dashboard import dashboard_operations
from inferry.ingress.openapi.headers import IDENTIFIER, integer_parameter, parameter
from inferry.ingress.openapi.histories import history_operations
from inferry.ingress.openapi.jobs import callback_secret_operations, job_operations
from inferry.ingress.openapi.message_responses import MessageModel, MessageModelList
from inferry.ingress.openapi.messages import message_operations
from inferry.ingress.openapi.observation import observation_operations
from inferry.ingress.openapi.operation import Operation, call_operation, json_response, pooled_operation
from inferry.ingress.openapi.pipelines import pipeline_operations
from inferry.ingress.openapi.responses_api import response_operations
from inferry.ingress.openapi.schemas import TENANT_NAME, Json
from inferry.ingress.openapi.storage import storage_operations
from inferry.ingress.openapi.storage_responses import DeletedTenantData
from inferry.ingress.openapi.timeline_responses import PerfettoTrace, RunTimeline
from inferry.ingress.run_tools import FinishRunBody
from inferry.ingress.runs import DEFAULT_WAIT_MS, MAX_LISTED, MAX_STEPS, MAX_TIMELINE_CALLS, MAX_WAIT_MS


def operations() -> dict[str, dict[str, Operation]]:
    """Every operation by path and method."""
    return {
        "/v1/chat/completions": {
            "post": call_operation(
                "Create a chat completion",
                request_schema.ChatCompletionRequest,
                responses.ChatCompletion,
                responses.ChatCompletionChunk,
            )
        },
        "/v1/completions": {
            "post": call_operation(
                "Create completions of one prompt or several, as text or token ids",
                request_schema.CompletionRequest,
                responses.Completion,
                responses.Completion,
            )
        },
        **message_operations(),
        **response_operations(),
        **storage_operations(),
        **{path: {"post": pooled_operation(*call)} for path, call in pooled.CALLS.items()},
        **history_operations(),
        **job_operations(),
        **pipeline_operations(),
        **_models(),
        **_runs(),
        **_workers(),
        **_adapters(),
        **_tenants(),
        **callback_secret_operations(),
        **_keys(),
        **dashboard_operations(),
        **observation_operations(),
        **_process(),
    }


_RUN_ERRORS = (errors.InvalidRequest, errors.InvalidApiKey, errors.RunNotFound, errors.InternalError)
_ADMIN_ERRORS = (errors.AdminOnly, errors.InternalError)


def _models() -> dict[str, dict[str, Operation]]:
    wrong = (errors.InvalidApiKey, errors.InvalidRequest)
    one = parameter("path", "model", {"type": "string", "minLength": 1}, "The model's name. It may contain slashes.")
    return {
        "/v1/models": {
            "get": Operation(
                summary="List the models that the key may use",
                description=(
                    "A request with the header `anthropic-version` gets the list and its errors in Anthropic's shape, "
                    "with the query parameters `limit`, `after_id` and `before_id`."
                ),
                tag="calls",
                responses={200: json_response(responses.ModelList, "The models.", MessageModelList)},
                errors=wrong,
            )
        },
        "/v1/models/{model}": {
            "get": Operation(
                summary="Get a model",
                tag="calls",
                parameters=(one,),
                responses={200: json_response(responses.Model, "The model.", MessageModel)},
                errors=(*wrong, errors.ModelNotFound),
            )
        },
    }


def _runs() -> dict[str, dict[str, Operation]]:
    run = parameter("path", "id", IDENTIFIER, "The run's id, percent-encoded.")
    steps = integer_parameter("steps", 0, MAX_STEPS, 20, "Number of latest steps in the response.")
    wait = integer_parameter(
        "wait_ms", 0, MAX_WAIT_MS, DEFAULT_WAIT_MS, "How long to wait for workers to confirm, in milliseconds."
    )
    statuses: Json = {"type": "string", "enum": [one.value for one in RunStatus]}
    seconds: Json = {"type": "string", "pattern": r"^\d{1,12}(\.\d{1,9})?$"}
    listing = (
        parameter("query", "status", statuses, "Only those with this status."),
        parameter("query", "parent", {"type": "string"}, "Only sub-runs of this run."),
        parameter("query", "since", seconds, "Only runs with calls since this time, in seconds since 1970."),
        integer_parameter("limit", 1, MAX_LISTED, 20, "Maximum number of runs."),
        parameter("query", "cursor", {"type": "string"}, "`next_cursor` of the previous page."),
    )
    some = (errors.InvalidRequest, errors.InvalidApiKey, errors.InternalError)
    run_found = {200: json_response(responses.RunDetail, "The run.")}
    return {
        "/v1/runs": {
            "get": Operation(
                summary="List the tenant's runs",
                tag="runs",
                parameters=listing,
                responses={200: json_response(responses.RunList, "The runs.")},
                errors=some,
            )
        },
        "/v1/runs/{id}": {
            "get": Operation(
                summary="Get a run", tag="runs", parameters=(run, steps), responses=run_found, errors=_RUN_ERRORS
            ),
            "delete": Operation(
                summary="Cancel a run and its sub-runs",
                description="Queued jobs are evicted, running ones aborted, new ones refused. Idempotent.",
                tag="runs",
                parameters=(run, wait),
                responses={200: json_response(responses.CancelledRun, "What was cancelled.")},
                errors=_RUN_ERRORS,
            ),
        },
        "/v1/runs/{id}/timeline": {"get": _timeline(run)},
        "/v1/runs/{id}/finish": {
            "post": Operation(
                summary="Mark a run as finished",
                description="A later call reopens it. The body is optional.",
                tag="runs",
                parameters=(run,),
                body=FinishRunBody,
                needs_body=False,
                responses=run_found,
                errors=_RUN_ERRORS,
            )
        },
    }


def _timeline(run: Json) -> Operation:
    return Operation(
        summary="Get the calls of a run and its sub-runs in order",
        description="Waits, worker and decision of every attempt. `format=perfetto` gives a trace in the JSON format "
        "of Chrome, for ui.perfetto.dev.",
        tag="runs",
        parameters=(
            run,
            parameter("query", "format", {"type": "string", "enum": ["json", "perfetto"]}, "Default: json."),
            integer_parameter("limit", 1, MAX_TIMELINE_CALLS, 200, "Maximum number of ended attempts."),
            parameter("query", "cursor", {"type": "string"}, "`next_cursor` of the previous page."),
        ),
        responses={200: json_response(RunTimeline, "The calls in order of arrival.", PerfettoTrace)},
        errors=_RUN_ERRORS,
    )


def _workers() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "minLength": 1}, "The worker's name.")
    listed = {200: json_response(responses.WorkerList, "The state of every worker.")}

    def act(summary: str, *more: type[GatewayError]) -> dict[str, Operation]:
        wrong: tuple[type[GatewayError], ...] = (*_ADMIN_ERRORS, errors.NotFound, *more)
        one = Operation(summary=summary, tag="admin", parameters=(name,), responses=listed, errors=wrong)
        return {"post": one}

    return {
        "/admin/workers": {
            "get": Operation(summary="List the workers", tag="admin", responses=listed, errors=_ADMIN_ERRORS)
        },
        "/admin/workers/{name}/drain": act("Drain a worker: no new jobs, running ones finish"),
        "/admin/workers/{name}/readmit": act("Readmit a drained worker", errors.Draining),
        "/admin/alerts": {
            "get": Operation(
                summary="List pending and firing alerts",
                tag="admin",
                responses={200: json_response(responses.AlertList, "The alerts, firing ones first.")},
                errors=_ADMIN_ERRORS,
            )
        },
    }


def _adapters() -> dict[str, dict[str, Operation]]:
    wrong = (*_ADMIN_ERRORS, errors.InvalidRequest, errors.BodyTooLarge)
    return {
        LOAD: {
            "post": Operation(
                summary="Load a LoRA adapter into the embedded engine, as vLLM does",
                tag="admin",
                body=LoadAdapterBody,
                responses={200: json_response(responses.AdapterState, "The adapter is loaded.")},
                errors=(*wrong, errors.Conflict, errors.NoWorker),
            )
        },
        UNLOAD: {
            "post": Operation(
                summary="Unload a LoRA adapter once its running calls have ended",
                tag="admin",
                body=UnloadAdapterBody,
                responses={200: json_response(responses.AdapterState, "The adapter is unloaded.")},
                errors=(*wrong, errors.NotFound),
            )
        },
    }


def _tenants() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "pattern": TENANT_NAME}, "The tenant's name.")
    tenant_found = {200: json_response(responses.TenantDetail, "The tenant.")}
    found = (*_ADMIN_ERRORS, errors.NotFound)
    put = (*_ADMIN_ERRORS, errors.InvalidRequest, errors.Conflict, errors.BodyTooLarge)
    removed = {200: json_response(responses.RemovedTenant, "The tenant is removed and its keys are revoked.")}
    return {
        "/admin/tenants": {
            "get": Operation(
                summary="List the tenants",
                tag="admin",
                responses={
                    200: json_response(responses.TenantList, "The tenants, those from the configuration first.")
                },
                errors=(*_ADMIN_ERRORS, errors.InvalidRequest),
            )
        },
        "/admin/tenants/{name}": {
            "get": Operation(
                summary="Get a tenant", parameters=(name,), responses=tenant_found, errors=found, tag="admin"
            ),
            "put": Operation(
                summary="Create or replace a tenant",
                tag="admin",
                description="Missing fields get defaults. Tenants from the configuration are changed there.",
                parameters=(name,),
                body=TenantSettings,
                responses=tenant_found,
                errors=put,
            ),
            "delete": Operation(
                summary="Remove a tenant",
                tag="admin",
                parameters=(name,),
                responses=removed,
                errors=(*found, errors.Conflict, errors.InvalidRequest),
            ),
        },
        "/admin/tenants/{name}/data": {
            "delete": Operation(
                summary="Delete the stored content of a tenant",
                tag="admin",
                description="Running batches, jobs and background responses stop. Tenant, keys and ledger stay.",
                parameters=(parameter("path", "name", IDENTIFIER, "The tenant's name, percent-encoded."),),
                responses={200: json_response(DeletedTenantData, "What was deleted.")},
                errors=(*found, errors.InvalidRequest, errors.LedgerUnavailable),
            )
        },
    }


def _keys() -> dict[str, dict[str, Operation]]:
    key = parameter("path", "id", {"type": "string", "minLength": 1}, "The key's public id.")
    statuses: Json = {"type": "string", "enum": list(KEY_STATUSES)}
    key_found = {200: json_response(responses.KeyDetail, "The key.")}
    made = {201: json_response(responses.CreatedKey, "The new key. Only this response has its text.")}
    found = (*_ADMIN_ERRORS, errors.NotFound)
    wrong = (errors.InvalidRequest, errors.BodyTooLarge)
    return {
        "/admin/keys": {
            "get": Operation(
                summary="List the keys",
                tag="admin",
                parameters=(
                    parameter("query", "tenant", {"type": "string"}, "Only keys of this tenant."),
                    parameter("query", "status", statuses, "Only those with this status."),
                ),
                responses={200: json_response(responses.KeyList, "The keys, the oldest first.")},
                errors=(*_ADMIN_ERRORS, errors.InvalidRequest),
            ),
            "post": Operation(
                summary="Create a key",
                tag="admin",
                description="Creates the tenant too where it does not exist.",
                body=CreateKeyBody,
                responses=made,
                errors=(*_ADMIN_ERRORS, *wrong, errors.NotFound),
            ),
        },
        "/admin/keys/{id}": {
            "get": Operation(summary="Get a key", parameters=(key,), responses=key_found, errors=found, tag="admin"),
            "delete": Operation(
                summary="Revoke a key",
                tag="admin",
                description="Idempotent.",
                parameters=(key,),
                responses=key_found,
                errors=found,
            ),
        },
        "/admin/keys/{id}/rotate": {
            "post": Operation(
                summary="Replace a key; the old one expires after a grace period",
                tag="admin",
                parameters=(key,),
                body=RotateKeyBody,
                needs_body=False,
                responses=made,
                errors=(*found, *wrong, errors.Conflict),
            )
        },
    }


def _process() -> dict[str, dict[str, Operation]]:
    text = {"description": "The Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    itself = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    ready = {200: json_response(responses.Ready, "Ready."), 503: json_response(responses.Ready, "Not ready.")}
    return {
        "/": {
            "get": Operation(
                summary="List the endpoints",
                description="A browser, which accepts `text/html`, gets the dashboard.",
                tag="process",
                responses={200: json_response(responses.Index, "The endpoints.")},
            )
        },
        "/health": {
            "get": Operation(
                summary="Liveness",
                tag="process",
                responses={200: json_response(responses.Health, "The process responds.")},
            )
        },
        "/ready": {"get": Operation(summary="Readiness", tag="process", responses=ready)},
        "/metrics": {"get": Operation(summary="Prometheus metrics", tag="process", responses={200: text})},
        "/openapi.json": {"get": Operation(summary="OpenAPI document", tag="process", responses={200: itself})},
    }
