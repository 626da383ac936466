"""Operations of pipelines."""

from inferry.domain import errors
from inferry.ingress.openapi.headers import CALL_HEADERS, headers, parameter
from inferry.ingress.openapi.operation import CALL_PARAMETERS, Operation, call_errors, json_response
from inferry.ingress.openapi.pipeline_objects import PipelineList, PipelineObject, PipelineResult
from inferry.ingress.openapi.responses import ChatCompletionChunk
from inferry.ingress.openapi.schemas import ref
from inferry.pipelines.model import PipelineRequest

_NAME = parameter("path", "name", {"type": "string", "minLength": 1}, "The pipeline's name.")
_READ = (errors.InvalidRequest, errors.InvalidApiKey, errors.InternalError)


def pipeline_operations() -> dict[str, dict[str, Operation]]:
    stream = {"schema": {"type": "string"}, "x-event-schema": ref(ChatCompletionChunk)}
    content = {"application/json": {"schema": ref(PipelineResult)}, "text/event-stream": stream}
    run = Operation(
        summary="Run a pipeline",
        description=(
            "An error of a stage has the status and code of the call that failed, and `param` is `stages.` and the "
            "name of the stage. With `stream` the response is that of the last stage, as chat completions stream it."
        ),
        tag="calls",
        body=PipelineRequest,
        needs_body=False,
        parameters=(_NAME, *CALL_PARAMETERS),
        responses={200: {"description": "The result.", "content": content, "headers": headers(*CALL_HEADERS)}},
        errors=(*call_errors(), errors.NotFound),
    )
    return {
        "/v1/pipelines": {
            "get": Operation(
                summary="List the pipelines that the key may use",
                tag="calls",
                responses={200: json_response(PipelineList, "The pipelines.")},
                errors=_READ,
            )
        },
        "/v1/pipelines/{name}": {
            "post": run,
            "get": Operation(
                summary="Get a pipeline",
                tag="calls",
                parameters=(_NAME,),
                responses={200: json_response(PipelineObject, "The pipeline.")},
                errors=(*_READ, errors.NotFound, errors.ModelNotAllowed),
            ),
        },
    }
