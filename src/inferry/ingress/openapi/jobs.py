"""Operations of async jobs and of the secrets that sign their callbacks."""

from msgspec import Struct

from inferry.domain import errors
from inferry.ingress.admin_tenants import RotateKeyBody
from inferry.ingress.openapi import job_responses
from inferry.ingress.openapi.headers import integer_parameter, parameter
from inferry.ingress.openapi.operation import CALL_PARAMETERS, Operation, json_response
from inferry.ingress.openapi.schemas import TENANT_NAME, Json, ref
from inferry.ingress.stored_work.async_jobs import MAX_LISTED, CreateJobBody

_READ = (
    *(errors.InvalidRequest, errors.InvalidApiKey, errors.StorageDisabled),
    *(errors.LedgerUnavailable, errors.InternalError),
)
_FIND = (*_READ, errors.NotFound)
_LANES = (errors.UnknownLane, errors.LaneNotAllowed)
_ID = parameter("path", "id", {"type": "string", "minLength": 1}, "The job's id.")


def job_operations() -> dict[str, dict[str, Operation]]:
    job = job_responses.JobObject
    refused = (errors.BodyTooLarge, errors.StorageQuotaExceeded, errors.QueueFull, errors.Conflict)
    listing = (
        integer_parameter("limit", 1, MAX_LISTED, 20, "Maximum number of jobs."),
        parameter("query", "order", {"type": "string", "enum": ["asc", "desc"]}, "By time of creation."),
        parameter("query", "after", {"type": "string"}, "Only jobs behind the one with this id."),
    )
    create = Operation(
        summary="Create an async job",
        description=(
            "`endpoint` executes `body` later, in lane P2 or the one of `x-inferry-lane`. The job is stored before the "
            "response. An invalid `body` makes the job fail. A repetition with the same `idempotency-key` gets the "
            "same job. With `callback_url` the end of the job is sent there as a `JobEvent`, signed as Standard "
            "Webhooks defines it."
        ),
        tag="storage",
        body=CreateJobBody,
        parameters=CALL_PARAMETERS,
        responses={202: json_response(job, "The job is stored.")},
        errors=(*_READ, *_LANES, *refused),
    )
    deleted, log = job_responses.DeletedJob, job_responses.DeliveryLog
    delete = "Delete an async job with its response, callback and delivery log; end it if it runs"
    return {
        "/v1/jobs": {
            "post": create,
            "get": Operation(
                summary="List async jobs",
                tag="storage",
                parameters=listing,
                responses={200: json_response(job_responses.JobList, "The jobs.")},
                errors=_READ,
            ),
        },
        "/v1/jobs/{id}": {
            "get": _operation("Get an async job with its response", job, "The job."),
            "delete": _operation(delete, deleted, "It is deleted."),
        },
        "/v1/jobs/{id}/cancel": {"post": _operation("Cancel an async job", job, "The job.", errors.Conflict)},
        "/v1/jobs/{id}/deliveries": {
            "get": _operation("Get the delivery log of a callback", log, "The attempts, the first one first.")
        },
    }


def _operation(summary: str, kind: type[Struct], description: str, *others: type[errors.GatewayError]) -> Operation:
    return Operation(
        summary=summary,
        tag="storage",
        parameters=(_ID,),
        responses={200: json_response(kind, description)},
        errors=(*_FIND, *others),
    )


def webhooks() -> Json:
    """What the gateway itself sends."""
    text: Json = {"type": "string"}
    signed = [
        parameter("header", "webhook-id", text, "The job's id. It is the same in every attempt."),
        parameter("header", "webhook-timestamp", text, "When the attempt was made, in seconds since 1970."),
        parameter("header", "webhook-signature", text, "`v1,` and HMAC-SHA256 in base64, one per valid secret."),
    ]
    body = {"required": True, "content": {"application/json": {"schema": ref(job_responses.JobEvent)}}}
    answers = {"2XX": {"description": "Delivered."}, "default": {"description": "The attempt is repeated."}}
    summary = "The end of an async job, sent to its `callback_url`"
    return {
        "job_ended": {"post": {"summary": summary, "parameters": signed, "requestBody": body, "responses": answers}}
    }


def callback_secret_operations() -> dict[str, dict[str, Operation]]:
    name = parameter("path", "name", {"type": "string", "pattern": TENANT_NAME}, "The tenant's name.")
    wrong = (errors.AdminOnly, errors.InvalidRequest, errors.InternalError, errors.LedgerUnavailable)
    created = json_response(job_responses.CreatedCallbackSecret, "The new secret. Only this response has its text.")
    return {
        "/admin/tenants/{name}/callback-secrets": {
            "get": Operation(
                summary="List the callback secrets of a tenant",
                tag="admin",
                parameters=(name,),
                responses={200: json_response(job_responses.CallbackSecretList, "The secrets, the newest first.")},
                errors=wrong,
            ),
            "post": Operation(
                summary="Create or rotate the callback secret of a tenant",
                description="Earlier secrets sign beside the new one until `grace_s` has passed.",
                tag="admin",
                parameters=(name,),
                body=RotateKeyBody,
                needs_body=False,
                responses={201: created},
                errors=(*wrong, errors.BodyTooLarge),
            ),
        }
    }
