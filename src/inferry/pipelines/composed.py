"""The port of composed models: names in the list of models that no worker serves. `ingress.composed` implements it.

A composed model gets a `ComposedCall` and answers it exactly once: with the response of another model (`forward`), with
an answer it chose or made itself (`answer`), or by raising a GatewayError. Every step is an ordinary call of the same
caller and run, so quotas, budgets, lanes and the ledger apply to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from inferry.domain.attempts import Attempt
from inferry.domain.errors import UnsupportedFeature
from inferry.domain.jobs import InferenceJob

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Fields = Mapping[str, Any]
"""Fields of a JSON object. Values may be `Raw`: JSON that is passed on as it is."""
_NOT_IN_STEPS = frozenset({"stream", "stream_options"})


def asks_for(fields: Mapping[str, Raw], name: str) -> bool:
    """Whether a field is given and neither null nor false."""
    return name in fields and bytes(fields[name]) not in (b"null", b"false")


def with_logprobs(fields: dict[str, Any], given: Mapping[str, Raw], path: str) -> dict[str, Any]:
    """The fields of a step whose answer must have log probabilities."""
    wanted: object = True if path == CHAT else 1
    return fields | {"logprobs": given["logprobs"] if asks_for(given, "logprobs") else wanted}


def step_fields(fields: Fields, model: str, **changes: Any) -> dict[str, Any]:
    """The fields of a step that generates: the client's without streaming, for another model."""
    return {name: value for name, value in fields.items() if name not in _NOT_IN_STEPS} | {"model": model} | changes


class StepAnswer(NamedTuple):
    """The JSON body of a step's response, the step's job, and the attempt that made the body: perhaps of another job,
    whose execution the step has shared."""

    body: bytes
    job: InferenceJob
    attempt: Attempt

    def decode(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.body)
        return found


class ComposedCall(Protocol):
    """One call of a composed model.

    `path` is the endpoint that the client called. `fields` are those of the client's request; a request to Messages or
    Responses is translated to chat first. `step_path` is the endpoint whose requests have these fields. `generates`:
    the fields are those of one chat or completions request, so the call can be answered with `answer`. `streams`: the
    client asked for a stream. `headers` are the client's, in lower case. Every step belongs to the
    run `run_id`.
    """

    name: str
    tenant: str
    run_id: str
    lane: str
    path: str
    step_path: str
    fields: dict[str, Raw]
    generates: bool
    streams: bool
    headers: Mapping[bytes, bytes]

    async def step(
        self,
        stage: str,
        path: str,
        fields: Fields,
        *,
        lane: str | None = None,
        deadline_ms: int | None = None,
        is_shadow: bool = False,
    ) -> StepAnswer:
        """POST the fields to an endpoint as a stage of this call, not streamed. Raises the step's GatewayError.

        `stage` names the step in the ledger: letters, digits, `-`, `_` and `.`, different for each step of a call.

        Cancelling the task cancels the step. Steps may run at the same time. A lane or deadline replaces the call's;
        a deadline is never later than the call's. `is_shadow`: the step may run after the answer, without the call's
        deadline.
        """

    def forward(self, stage: str, model: str, path: Sequence[str]) -> None:
        """Answer with the model's response to the client's own request, streamed if the client asked for that.

        `path` are the models that were called, for the response header `x-inferry-path`.
        """

    async def respond(self, stage: str, fields: Fields, path: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """Answer with the response to a chat request of these fields, in the client's format, streamed if they say so.

        Returns when the step was submitted. An error of the step names the stage.
        """

    def answer_json(self, body: bytes, path: Sequence[str]) -> None:
        """Answer with this JSON."""

    def record(
        self,
        kind: str,
        path: Sequence[str],
        *,
        accepted: bool,
        reason: str,
        score: float | None = None,
        agreed: bool | None = None,
    ) -> None:
        """Write how the call was answered to the ledger, once per call. `score` is what a threshold is compared with,
        `agreed` whether a sampled comparison found the same answer.
        """

    def deadline_left_ms(self) -> int | None:
        """Milliseconds until the client's deadline; None where it set none."""

    def answer(self, step: StepAnswer, body: Fields, path: Sequence[str]) -> None:
        """Answer with the body of a chat or completions response, in the client's format. `step` is the one that
        generated the answer: its worker and usage are reported to the client.
        """


def check_generates(call: ComposedCall, kind: str) -> None:
    """Refuse a call of several prompts, in the background or for anything but text, by the field that says so."""
    if call.generates:
        return
    field = "prompt" if call.path == COMPLETIONS else "background" if asks_for(call.fields, "background") else "model"
    message = f"the {kind} `{call.name}` answers one chat or completions request at a time"
    raise UnsupportedFeature(message, param=field)


class ComposedModel(Protocol):
    """`kind` is shown in the list of models: route, cascade, ensemble or pipeline."""

    kind: str

    @property
    def typical_model(self) -> str | None:
        """The model by whose tokens a prompt's size is estimated; None where no model gets the prompt as it is."""

    async def serve(self, call: ComposedCall) -> None:
        """Answer the call, or raise the GatewayError that refuses it. Cancelled when the client disconnects."""
