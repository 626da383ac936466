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


class Upstream:
    """Start it with `async with`; set `script` to change how it answers; `bodies` and `headers` hold what came."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or well_behaved
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.takes_priorities = True
        self.disconnects = 0
        self.gone = asyncio.Event()
        self.release = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Upstream":
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._call)
        app.router.add_post("/v1/completions", self._call)
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
        models = [{"id": "m", "object": "model", "created": 7, "owned_by": "up", "max_model_len": 4096}]
        return web.json_response({"object": "list", "data": models})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("priority") and not self.takes_priorities:
            error = {"message": "priority scheduling is not enabled", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        is_probe = body.get("max_tokens") == 1 and "ping" in json.dumps(body)
        if is_probe:
            return await well_behaved(self, request, body)
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self.script(self, request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.disconnects += 1
            self.gone.set()
            raise


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
