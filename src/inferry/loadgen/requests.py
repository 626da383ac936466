"""Requests of calls: body and headers, with lane, tenant and run."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.loadgen.prompt_texts import PromptTexts
from inferry.sim.calls import Run, Step
from inferry.workers.http_client import Client, Request

LaneBy = Literal["header", "priority", "none"]
Prompts = Literal["ids", "text", "chat"]
PRIORITIES = {Lane.P0: -10, Lane.P1: 0, Lane.P2: 10}
"""vLLM priorities by lane: lower values are served first."""


class RequestForm(Struct, frozen=True):
    """The form of requests that this server accepts. `end` makes answers as long as requested."""

    prompts: Prompts = "ids"
    usage: bool = True
    end: Literal["ignore_eos", "min_tokens", ""] = "ignore_eos"
    words_per_token: float = 1.0


class RequestMetadata(Struct, frozen=True, kw_only=True):
    """Metadata of a call besides its prompt. None: not sent."""

    lane_by: LaneBy = "header"
    tenant_header: str | None = "x-inferry-tenant"
    run_ids: bool = True
    headers: Mapping[str, str] = {}


class RequestMaker:
    """Writes the requests of one load test."""

    def __init__(
        self, client: Client, model: str, form: RequestForm, request_metadata: RequestMetadata, salt: str
    ) -> None:
        self.form = form
        self._client = client
        self._model = model
        self._request_metadata = request_metadata
        self._prompt_texts = PromptTexts(salt, None if form.prompts == "ids" else form.words_per_token)
        self._path = b"/v1/chat/completions" if form.prompts == "chat" else b"/v1/completions"
        # Runs of different load tests must have different ids.
        self._bench = salt[:8]

    def make(self, run: Run, index: int) -> Request:
        step = run.steps[index]
        return self._client.request(b"POST", self._path, self._headers(run, index), self._body(run.lane, step))

    def _body(self, lane: Lane, step: Step) -> bytes:
        form = self.form
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": step.output,
            "temperature": 0,
            "stream": True,
        }
        if form.usage:
            body["stream_options"] = {"include_usage": True}
        if form.end == "ignore_eos":
            body["ignore_eos"] = True
        elif form.end == "min_tokens":
            body["min_tokens"] = step.output
        if self._request_metadata.lane_by == "priority":
            body["priority"] = PRIORITIES[lane]
        before, after = {
            "ids": (b',"prompt":[', b"]}"),
            "text": (b',"prompt":"', b'"}'),
            "chat": (b',"messages":[{"role":"user","content":"', b'"}]}'),
        }[form.prompts]
        return b"".join((msgspec.json.encode(body)[:-1], before, self._prompt_texts.prompt(step.prompt), after))

    def _headers(self, run: Run, index: int) -> bytes:
        request_metadata = self._request_metadata
        lines = dict(request_metadata.headers)
        if request_metadata.lane_by == "header":
            lines["x-inferry-lane"] = run.lane.name
        if request_metadata.tenant_header is not None:
            lines[request_metadata.tenant_header] = run.tenant
        if request_metadata.run_ids:
            lines["x-inferry-run-id"] = f"{self._bench}-{run.run_id}"
            lines["x-inferry-step-id"] = f"{index}-{run.steps[index].name}"
        return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1", "replace")
