"""A pipeline as clients call it: by its own endpoint, or as a model in chat completions."""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.workers import Phase
from inferry.pipelines.batch_sizes import MapLoad
from inferry.pipelines.composed import CHAT, ComposedCall, Fields
from inferry.pipelines.executor import PipelineRun, ServedPipeline
from inferry.pipelines.graph import answers_chat, models_of
from inferry.pipelines.value_types import read_value

MAX_NAME_CHARS = 64
"""Longest name of an unknown input or part that an error repeats."""
_PREFILL = "continue_final_message"
_OWN_FIELDS = frozenset({"model", "messages", _PREFILL, "add_generation_prompt"})
"""Fields of a chat request that say nothing of the request of the last stage, which has messages of its own."""


class PipelineRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a pipeline. `include_stages` adds the results of all stages to the answer."""

    input: dict[str, Any] = {}
    stream: bool | None = None
    include_stages: bool = False


class _Part(Struct):
    type: str = ""
    text: str = ""


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


class PipelineModel:
    """One pipeline. `lanes` are those in use; `loads` are shared by all pipelines."""

    kind = "pipeline"
    typical_model = None

    def __init__(
        self,
        pipeline: ServedPipeline,
        gateway: Gateway,
        lanes: Mapping[Lane, LanePolicy],
        loads: Mapping[Lane, MapLoad],
    ) -> None:
        self.pipeline = pipeline
        self._gateway = gateway
        self._lanes = lanes
        self._loads = loads
        self._path = list(dict.fromkeys(models_of(pipeline.checked.graph)))

    @property
    def is_chat_model(self) -> bool:
        return self.pipeline.checked.declared.chat_input is not None

    async def serve(self, call: ComposedCall) -> None:
        """Answer a chat request: its last user message is the chat input. Raises UnsupportedFeature where the answer
        shall continue the client's last message, and for other parts than text.
        """
        name = self.pipeline.checked.declared.chat_input
        if name is None or not call.generates or call.step_path != CHAT:
            raise UnsupportedFeature(f"the pipeline `{call.name}` answers chat requests only", param="model")
        if call.fields.get(_PREFILL) == Raw(b"true"):
            raise UnsupportedFeature(f"`{_PREFILL}` is not supported by the pipeline `{call.name}`", param=_PREFILL)
        inputs = self._read_inputs({name: _last_user_text(call.fields["messages"])})
        fields = {field: value for field, value in call.fields.items() if field not in _OWN_FIELDS}
        await self._run(call, inputs, fields)

    async def serve_request(self, call: ComposedCall, request: PipelineRequest) -> None:
        """Answer a request to the pipeline's own endpoint."""
        inputs = self._read_inputs(request.input)
        if request.stream:
            if not answers_chat(self.pipeline.checked.graph):
                raise UnsupportedFeature("only a pipeline that ends with a generate stage streams", param="stream")
            if request.include_stages:
                raise UnsupportedFeature("`include_stages` cannot be streamed", param="include_stages")
            await self._run(call, inputs, {"stream": True, "stream_options": {"include_usage": True}})
            return
        run, output = await self._run(call, inputs, None)
        found = {
            "id": f"pipeline-{call.run_id}",
            "object": "pipeline.result",
            "created": int(self._gateway.wall()),
            "pipeline": call.name,
            "run_id": call.run_id,
            "output": output,
            **({"stages": run.results} if request.include_stages else {}),
            "usage": run.usage,
        }
        call.answer_json(msgspec.json.encode(found, enc_hook=_encode_vector), self._path)

    async def _run(self, call: ComposedCall, inputs: Fields, answer_fields: Fields | None) -> tuple[PipelineRun, Any]:
        calls = _RunCalls(call, self._gateway, self._lanes, self._loads, self._path)
        limits = [ms for ms in (call.deadline_left_ms(), self.pipeline.checked.declared.deadline_ms) if ms is not None]
        deadline = self._gateway.now() + min(limits) / 1000 if limits else None
        run = PipelineRun(self.pipeline, calls, deadline, answer_fields)
        size = sum(len(raw) for raw in call.fields.values())  # kept as long as the run, also between its jobs
        with self._gateway.reserved_bytes(size):
            return run, await run.run(inputs)

    def _read_inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with their defaults. Raises InvalidRequest."""
        checked = self.pipeline.checked
        for name in given:
            if name not in checked.inputs:
                known = ", ".join(checked.inputs) or "none"
                # Other text may be part of a prompt.
                wrong = f"input `{name}`" if name.isidentifier() and len(name) <= MAX_NAME_CHARS else "such input"
                raise InvalidRequest(f"the pipeline has no {wrong}; its inputs are: {known}", param="input")
        found = {}
        for name, type in checked.inputs.items():
            value = given.get(name, checked.declared.inputs[name].default)
            if value is UNSET:
                raise InvalidRequest(f"`input.{name}` is required", param=f"input.{name}")
            found[name] = read_value(value, type, f"input.{name}")
        return found


class _RunCalls:
    """The calls of one run (`ports.Calls`)."""

    def __init__(
        self,
        call: ComposedCall,
        gateway: Gateway,
        lanes: Mapping[Lane, LanePolicy],
        loads: Mapping[Lane, MapLoad],
        path: list[str],
    ) -> None:
        self._call = call
        self._gateway = gateway
        self._lane = Lane[call.lane]
        self._lanes = lanes
        self._loads = loads
        self._path = path
        self.now = gateway.now

    async def step(self, stage: str, path: str, fields: Fields, deadline_ms: int | None) -> bytes:
        return (await self._call.step(stage, path, fields, deadline_ms=deadline_ms)).body

    async def respond(self, stage: str, fields: Fields, deadline_ms: int | None) -> None:
        await self._call.respond(stage, fields, self._path, deadline_ms=deadline_ms)

    def queued(self) -> int:
        return self._gateway.queue_depths().get(self._lane, 0)

    def queued_for(self, model: str) -> int:
        return self._gateway.queue_depth_of(self._lane, model)

    def queue_limit(self) -> int:
        policy = self._lanes[self._lane]
        return int(policy.queue_limit * policy.high_watermark)

    def map_load(self) -> MapLoad:
        return self._loads[self._lane]

    def workers(self, model: str) -> int:
        return sum(model in view.models for view in self._gateway.views() if view.phase is Phase.READY)


def _last_user_text(raw: Raw) -> str:
    try:
        messages = _messages.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`messages`: {error}", param="messages") from None
    for message in reversed(messages):
        if message.role == "user" and message.content is not None:
            if isinstance(message.content, str):
                return message.content
            return "".join(map(_text_of, message.content))
    raise InvalidRequest("`messages` has no user message", param="messages")


def _text_of(part: _Part) -> str:
    if part.type == "text":
        return part.text
    # Other text may be part of a prompt.
    kind = f" `{part.type}`" if part.type.isidentifier() and len(part.type) <= MAX_NAME_CHARS else " other"
    raise UnsupportedFeature(f"`messages`: a pipeline takes text only and no{kind} parts", param="messages")


def _encode_vector(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError
