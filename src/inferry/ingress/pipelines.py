"""`/v1/pipelines…`: the pipelines that the caller may use, and their runs."""

from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import UNSET

from inferry.domain.callers import Caller
from inferry.domain.errors import ModelNotAllowed, NotFound
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.composed import ComposedCalls
from inferry.ingress.composed_call import Call
from inferry.ingress.errors import printable
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.router import JSON, Fail, Refuse, Router
from inferry.pipelines.model import PipelineModel, PipelineRequest
from inferry.pipelines.versions import ComposedVersions

_decoder = msgspec.json.Decoder(PipelineRequest)


class PipelinesRouter(Router):
    prefix = "/v1/pipelines"
    paths = ("GET /v1/pipelines", "GET /v1/pipelines/{name}", "POST /v1/pipelines/{name}")

    def __init__(self, refuse: Refuse, fail: Fail, versions: ComposedVersions, calls: ComposedCalls) -> None:
        super().__init__(refuse, fail)
        self._versions = versions
        self._calls = calls

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        name = unquote(path.removeprefix(self.prefix)[1:])
        if not name:
            if request.method not in (b"GET", b"HEAD"):
                raise WrongMethod(self.prefix, "GET, HEAD")
            pipelines = self._versions.active.pipelines
            found = [pipeline_object(one) for name, one in pipelines.items() if caller.allows_model(name)]
            reply.respond(200, JSON, msgspec.json.encode({"object": "list", "data": found}))
            return
        if request.method not in (b"GET", b"HEAD", b"POST"):
            raise WrongMethod(f"{self.prefix}/{{name}}", "GET, HEAD, POST")
        if request.method == b"POST":
            if name not in self._versions.pipeline_names():
                raise _unknown(name)
            self._check_allowed(name, caller)
            work = partial(self._run, decode_body(_decoder, request.body))
            self._calls.start(work, name, None, request, reply, caller)
            return
        pipeline = self._versions.active.pipelines.get(name)
        if pipeline is None:
            raise _unknown(name)
        self._check_allowed(name, caller)
        reply.respond(200, JSON, msgspec.json.encode(pipeline_object(pipeline)))

    def _check_allowed(self, name: str, caller: Caller) -> None:
        if not caller.allows_model(name):
            raise ModelNotAllowed(f"this key may not use the pipeline `{name}`")

    async def _run(self, body: PipelineRequest, call: Call) -> None:
        pipeline = self._versions.of(call.tenant, call.run_id).pipelines.get(call.name)
        if pipeline is None:  # only the other version of the settings has it
            raise _unknown(call.name)
        await pipeline.serve_request(call, body)


def _unknown(name: str) -> NotFound:
    return NotFound(f"unknown pipeline `{printable(name)}`")


def pipeline_object(model: PipelineModel) -> dict[str, Any]:
    """What clients need to know of a pipeline. Its templates are the operator's."""
    checked = model.pipeline.checked
    return {
        "id": checked.name,
        "object": "pipeline",
        "inputs": {
            name: {"type": str(type), "required": checked.declared.inputs[name].default is UNSET}
            for name, type in checked.inputs.items()
        },
        "stages": [
            {
                "name": node.name,
                "kind": str(node.stage.__struct_config__.tag),
                "needs": list(node.needs),
                "type": str(node.type),
            }
            for node in checked.graph.nodes
        ],
        "output": checked.graph.output,
        "chat_input": checked.declared.chat_input,
        "deadline_ms": checked.declared.deadline_ms,
    }
