"""A scripted OpenAI-compatible server: it answers like vLLM, or misbehaves as told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Script = Callable[["Upstream", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def chunk(text: str, finish: str | None = None, *, chat: bool = True, id: str = "up-1") -> bytes:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if chat:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    kind = "chat.completion.chunk" if chat else "text_completion"
    return event({"id": id, "object": kind, "created": 1, "model": "m", "choices": [choice]})


def role() -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return event({"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    head = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": [], "usage": counts})


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
NO_CHAT_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


class Upstream:
    """Start it with `async with`; set `script` to change how it answers; `bodies` and `headers` hold what came."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or well_behaved
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.accepts_priorities = True
        self.returns_token_ids = True
        self.shows_metrics = True
        self.takes_images = True
        self.has_chat_template = True
        self.metrics_page: str | None = None
        self.foreign = 0
        self.running: set[str] = set()
        self.aborts = False
        self.abort_calls: list[list[str]] = []
        self.aborted: dict[str, asyncio.Event] = {}
        self.disconnects = 0
        self.gone = asyncio.Event()
        self.release = asyncio.Event()
        self.port = 0
        self.adapters: tuple[str, ...] = ()
        self.context_tokens = 4096
        self.owner = "vllm"
        self.detokenize: Callable[[list[int]], str] | None = None
        self.tokenize: Callable[[dict[str, Any]], int] | None = None
        self.pools: Script | None = None
        self.generates = True
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Upstream":
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/abort_requests", self._abort)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._call)
        app.router.add_post("/v1/completions", self._call)
        app.router.add_post("/v1/embeddings", self._pool)
        app.router.add_post("/v1/score", self._pool)
        app.router.add_post("/classify", self._pool)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{**self._model(name), "parent": "m"} for name in self.adapters]
        return web.json_response({"object": "list", "data": [self._model("m"), *adapters]})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 7,
            "owned_by": self.owner,
            "max_model_len": self.context_tokens,
        }

    async def _pool(self, request: web.Request) -> web.StreamResponse:
        """A server that does not pool has no such paths."""
        if self.pools is None:
            return web.Response(status=404)
        body = await request.json()
        if "ping" not in json.dumps(body):
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self.pools(self, request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnects += 1
            self.gone.set()
            raise

    async def _call(self, request: web.Request) -> web.StreamResponse:
        if not self.generates:
            return web.Response(status=404)
        body = await request.json()
        if "messages" in body and not self.has_chat_template:
            return _bad_request(NO_CHAT_TEMPLATE)
        if body.get("priority") and not self.accepts_priorities:
            return _bad_request("priority scheduling is not enabled")
        is_probe = body.get("max_tokens") == 1 and "ping" in json.dumps(body)
        if is_probe and not self.takes_images and "image_url" in json.dumps(body):
            return _bad_request("m is not a multimodal model")
        if is_probe:
            return await well_behaved(self, request, body) if body.get("stream") else self._answer_probe(body)
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        engine_id = engine_id_of(request)
        self.running.add(engine_id)
        self.aborted[engine_id] = asyncio.Event()
        try:
            return await self.script(self, request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnects += 1
            self.gone.set()
            raise
        finally:
            self.running.discard(engine_id)

    def _answer_probe(self, body: dict[str, Any]) -> web.Response:
        ids = bool(self.returns_token_ids and body.get("return_token_ids"))
        choice = {"index": 0, "text": "a", "finish_reason": "length", "token_ids": [7] if ids else None}
        return web.json_response({"choices": [{**choice, "prompt_token_ids": [1, 2] if ids else None}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.shows_metrics:
            return web.Response(status=404)
        page = metrics_page(len(self.running) + self.foreign) if self.metrics_page is None else self.metrics_page
        return web.Response(text=page)

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        if self.detokenize is None:
            return web.Response(status=404)
        return web.json_response({"prompt": self.detokenize((await request.json())["tokens"])})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        if self.tokenize is None:
            return web.Response(status=404)
        body = await request.json()
        if "messages" in body and not self.has_chat_template:
            return _bad_request(NO_CHAT_TEMPLATE)
        return web.json_response({"count": self.tokenize(body), "max_model_len": 4096, "tokens": []})

    async def _abort(self, request: web.Request) -> web.Response:
        """As vLLM does: it counts the ids sent, whether there are such requests or not."""
        if not self.aborts:
            return web.Response(status=404)
        ids = (await request.json())["request_ids"]
        self.abort_calls.append(ids)
        for engine_id in ids:
            if engine_id in self.aborted:
                self.aborted[engine_id].set()
        return web.json_response({"status": "aborted", "aborted": len(ids)})


def _bad_request(message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "code": 400}
    return web.json_response({"error": error}, status=400)


def engine_id_of(request: web.Request) -> str:
    """What vLLM's engine calls a request."""
    request_id = request.headers.get("x-request-id", "nameless")
    return f"chatcmpl-{request_id}" if request.path.endswith("chat/completions") else f"cmpl-{request_id}-0"


def metrics_page(running: int, waiting: int = 0, *, kv_usage: float = 0.0, more: str = "") -> str:
    """A page as vLLM writes it, with what a worker looks for and some of what it does not."""
    labels = '{engine="0",model_name="m"}'
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} {waiting}.0\n"
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0\n'
        f"vllm:kv_cache_usage_perc{labels} {kv_usage}\n"
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0\n'
        f"{more}"
    )


async def begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def well_behaved(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    chat = request.path.endswith("chat/completions")
    response = await begin(request)
    words = ["Hello", " wor", "ld"][: body.get("max_tokens") or 3]
    if chat:
        await response.write(role())
    for number, word in enumerate(words):
        await response.write(chunk(word, "length" if number == len(words) - 1 else None, chat=chat))
    await response.write(usage(12, len(words)))
    await response.write(DONE)
    await response.write_eof()
    return response
