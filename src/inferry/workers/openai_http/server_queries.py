"""Requests to a server besides inference: models, capabilities, metrics and aborts."""

import zlib
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.errors import WorkerLost
from inferry.domain.response_shapes import shape_of
from inferry.domain.routes import GENERATES, Task
from inferry.domain.values import replace
from inferry.workers.openai_http.metrics_parser import read_metrics
from inferry.workers.openai_http.profiles import DetectedCapabilities, Profile
from inferry.workers.openai_http.server_client import ServerClient

PATHS = {
    "chat": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "embeddings": b"/v1/embeddings",
    "score": b"/v1/score",
    "classify": b"/classify",
}
_TASK_PROBES: dict[Task, tuple[bytes, dict[str, object]]] = {
    Task.EMBED: (PATHS["embeddings"], {"input": "ping"}),
    Task.SCORE: (PATHS["score"], {"text_1": "ping", "text_2": "ping"}),
    Task.CLASSIFY: (PATHS["classify"], {"input": "ping"}),
    Task.GENERATE: (PATHS["completions"], {"prompt": "ping", "max_tokens": 1}),
}
REQUEST_TIMEOUT_S = 5.0
"""Timeout of cheap requests: metrics, an abort."""
MAX_PROBE_S = 60.0
_IMAGE_PIXELS = 64
"""Width and height of the probe's image. Some models refuse smaller ones than 28."""


class ServedModel(Struct):
    """One entry of the server's /v1/models. `parent` is the base model of a LoRA adapter."""

    id: str
    max_model_len: int | None = None
    created: int = 0
    parent: str | None = None
    owned_by: str | None = None


class _ModelList(Struct):
    data: list[ServedModel]


class Shapes(Struct):
    """The shape of the server's non-streaming responses per API, where it was seen."""

    chat: dict[str, Any] | None = None
    completions: dict[str, Any] | None = None

    def of(self, api: str) -> dict[str, Any] | None:
        return self.chat if api == "chat" else self.completions


class _ProbeChoice(Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _ProbeResponse(Struct):
    choices: list[_ProbeChoice] = []


class _TokenCount(Struct):
    count: int


class ServerQueries:
    """One server. `monitor_client` has connections of its own. Methods raise WorkerLost unless they say otherwise."""

    def __init__(
        self,
        profile: Profile,
        client: ServerClient,
        monitor_client: ServerClient,
        authorization: bytes,
        timeout_s: float,
    ) -> None:
        self._profile = profile
        self._client = client
        self._monitor_client = monitor_client
        self._authorization = authorization
        self._timeout_s = timeout_s
        self.shapes = Shapes()
        self.is_other_than_vllm = False

    async def models(self, configured: Sequence[str] = ()) -> dict[str, ServedModel]:
        """The models that the server lists. One that lists others than it serves is only asked whether it is there,
        where the configuration names its models.
        """
        if configured and not self._profile.lists_models:
            await self.ping(self._timeout_s)
            return {name: ServedModel(id=name) for name in configured}
        status, body = await self._client.get(b"/v1/models", self._authorization, self._timeout_s)
        if status != 200:
            raise WorkerLost(f"GET /v1/models returned {status}")
        try:
            listed = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise WorkerLost("GET /v1/models returned no list of models") from None
        self.is_other_than_vllm = bool(listed) and all(one.owned_by != "vllm" for one in listed)
        return {one.id: one for one in listed}

    async def tasks(self, models: Sequence[str]) -> frozenset[Task]:
        """What the server does with its models. The first one is asked for one result of each pooled task, because
        a server mostly has one model and adapters of it. A server that does none generates. A hosted API is not asked.
        """
        possible = self._profile.tasks
        if len(possible) == 1 or self._profile.is_hosted or not models:
            return possible
        pooled = sorted(possible - GENERATES, key=lambda task: task.value)
        found = frozenset([task for task in pooled if await self._does(task, models[0])])
        return found | GENERATES if not found or await self._does(Task.GENERATE, models[0]) else found

    async def _does(self, task: Task, model: str) -> bool:
        path, fields = _TASK_PROBES[task]
        try:
            status, _ = await self._post(path, {"model": model, **fields})
        except WorkerLost:
            return False
        return status == 200

    async def metrics_page(self, timeout_s: float = REQUEST_TIMEOUT_S) -> tuple[int, bytes]:
        assert self._profile.metrics is not None
        return await self._monitor_client.get(self._profile.metrics.path, self._authorization, timeout_s)

    async def ping(self, timeout_s: float) -> None:
        """Return when the server has answered a cheap request, with any status."""
        await self._monitor_client.get(self._profile.ping_path, self._authorization, timeout_s)

    async def abort(self, request_ids: Sequence[str], timeout_s: float = REQUEST_TIMEOUT_S) -> bool:
        """Abort requests by id; return whether the server supports that. It does not report which requests it had."""
        assert self._profile.abort_path is not None
        body = msgspec.json.encode({"request_ids": request_ids})
        status, _ = await self._client.post(self._profile.abort_path, self._authorization, body, timeout_s)
        return status == 200

    async def count_tokens(self, body: bytes) -> int | None:
        """Prompt tokens of a chat request; None where the server does not tell."""
        path = self._profile.tokenize_path
        if path is None:
            return None
        try:
            status, answer = await self._client.post(path, self._authorization, body, REQUEST_TIMEOUT_S)
            return msgspec.json.decode(answer, type=_TokenCount).count if status == 200 else None
        except (WorkerLost, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    async def capabilities(self, model: str | None, *, wants_priorities: bool) -> DetectedCapabilities:
        """The capabilities that the server shows, among those of its profile."""
        profile = self._profile
        capabilities = DetectedCapabilities(
            supports_abort=await self._supports_abort(),
            has_metrics=await self._has_metrics(),
            accepts_images=await self._accepts_images(model) if model is not None and profile.probes_images else None,
        )
        wants_priorities &= profile.supports_priority
        if model is None or not (profile.can_resume or wants_priorities):
            return capabilities
        return await self._probe(model, capabilities, wants_priorities)

    async def _probe(
        self, model: str, capabilities: DetectedCapabilities, wants_priority: bool
    ) -> DetectedCapabilities:
        """Generate one token, to see whether token ids are returned and a priority is accepted.

        A server without priority scheduling refuses any priority except the default.
        """
        fields = {"model": model, "prompt": "ping", "max_tokens": 1, "return_token_ids": True}
        accepts_priority = None
        status, body = 0, b""
        try:
            if wants_priority:
                accepts_priority = False
                status, body = await self._generate({**fields, "priority": 1})
                accepts_priority = status == 200
            if status != 200:
                status, body = await self._generate(fields)
            choices = msgspec.json.decode(body, type=_ProbeResponse).choices if status == 200 else []
        except (WorkerLost, msgspec.MsgspecError, UnicodeDecodeError):
            choices = []
        if choices:
            self.shapes = Shapes(await self._chat_shape(model), _shape(body, "text_completion"))
        returns_ids = bool(choices and choices[0].token_ids and choices[0].prompt_token_ids)
        return replace(capabilities, accepts_priority=accepts_priority, returns_token_ids=returns_ids)

    async def _chat_shape(self, model: str) -> dict[str, Any] | None:
        fields = {"model": model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
        try:
            status, body = await self._post(PATHS["chat"], fields)
        except WorkerLost:
            return None
        return _shape(body, "chat.completion") if status == 200 else None

    async def _accepts_images(self, model: str) -> bool | None:
        """Whether the model takes images: a server refuses one with 400 where it does not."""
        content = [{"type": "text", "text": "ping"}, {"type": "image_url", "image_url": {"url": _gray_image()}}]
        fields = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        try:
            status, _ = await self._post(PATHS["chat"], fields)
        except WorkerLost:
            return None
        return {200: True, 400: False}.get(status)

    async def _generate(self, fields: dict[str, object]) -> tuple[int, bytes]:
        return await self._post(PATHS["completions"], fields)

    async def _post(self, path: bytes, fields: dict[str, object]) -> tuple[int, bytes]:
        body = msgspec.json.encode(fields)
        timeout_s = min(MAX_PROBE_S, self._timeout_s)
        return await self._client.post(path, self._authorization, body, timeout_s)

    async def _supports_abort(self) -> bool | None:
        if self._profile.abort_path is None:
            return None
        try:
            return await self.abort(["inferry-probe"])  # the response is the same for unknown ids
        except WorkerLost:
            return False

    async def _has_metrics(self) -> bool | None:
        if self._profile.metrics is None:
            return None
        try:
            status, page = await self.metrics_page()
        except WorkerLost:
            return False
        return status == 200 and read_metrics(page, self._profile.metrics) is not None


def _shape(body: bytes, kind: str) -> dict[str, Any] | None:
    """The shape of a non-streaming response; None where it is malformed."""
    try:
        response = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return shape_of(response) if isinstance(response, dict) and response.get("object") == kind else None


def _gray_image() -> str:
    """A grey PNG as a data URL."""

    def piece(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + checksum

    side = _IMAGE_PIXELS.to_bytes(4, "big")
    head = piece(b"IHDR", side + side + bytes([8, 0, 0, 0, 0]))  # 8 bits, greyscale
    rows = zlib.compress((b"\0" + b"\x80" * _IMAGE_PIXELS) * _IMAGE_PIXELS)
    image = b"\x89PNG\r\n\x1a\n" + head + piece(b"IDAT", rows) + piece(b"IEND", b"")
    return "data:image/png;base64," + b64encode(image).decode()
