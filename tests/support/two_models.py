"""A gateway before two scripted models: `small`, which gives log probabilities, and `large`."""

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.tenant_gateway import TenantGateway
from support.upstream import DONE, Upstream, begin, event


class TwoModelGateway(TenantGateway):
    """`answers`: text by model, or a function of the body. `tool_calls`: by model, instead of the text of a chat.
    `logprob`: of each token of the small model; None gives none. `hold`: models that answer once `released` is set.
    `status`: models that fail with this status.
    """

    def __init__(self, directory: Path, config: dict[str, Any] | None = None) -> None:
        self.upstream = Upstream(self._script)
        self.answers: dict[str, Any] = {"small": "Small", "large": "Large"}
        self.tool_calls: dict[str, list[dict[str, Any]]] = {}
        self.logprob: float | None = -0.1
        self.hold: set[str] = set()
        self.released = asyncio.Event()
        self.status: dict[str, int] = {}
        worker = {"name": "up", "kind": "vllm", "url": "http://127.0.0.1:1", "models": ["small", "large"]}
        given = {"auth": {"mode": "off"}, "workers": [worker], **(config or {})}
        super().__init__(directory, self._workers, given)

    def asked(self) -> list[str]:
        return [body["model"] for body in self.upstream.bodies]

    def release(self) -> None:
        """Let the models that are held answer, and hold no more."""
        self.hold = set()
        self.run(self._release())

    async def _release(self) -> None:
        self.released.set()

    def _workers(self) -> Any:
        settings = HttpWorkerSettings(url=self.upstream.url, profile=PROFILES["vllm"], models=("small", "large"))
        return [OpenAIHttpWorker("up", settings, SystemClock(), DEFAULT_LANES)], {}

    async def _main(self) -> None:
        async with self.upstream:
            await super()._main()

    async def _script(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        model = body["model"]
        if model in self.status:
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=self.status[model])
        if model in self.hold:
            await self.released.wait()
        answer = self.answers[model]
        text: str = answer(body) if callable(answer) else answer
        is_chat = request.path.endswith("chat/completions")
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": "up-1", "object": kind, "created": 1, "model": model}
        response = await begin(request)
        words = [text] if len(text) < 4 else [text[:3], text[3:]]
        for number, word in enumerate(words):
            logprobs: Any = None
            if body.get("logprobs") and self.logprob is not None:
                tokens = [{"token": word, "logprob": self.logprob, "bytes": None, "top_logprobs": []}]
                logprobs = {"content": tokens} if is_chat else {"tokens": [word], "token_logprobs": [self.logprob]}
            piece: dict[str, Any] = {"delta": {"content": word}} if is_chat else {"text": word}
            finish = "stop" if number == len(words) - 1 else None
            if is_chat and model in self.tool_calls:
                piece = {"delta": {"tool_calls": self.tool_calls[model] if number == 0 else []}}
                finish = finish and "tool_calls"
            choice = {"index": 0, **piece, "logprobs": logprobs, "finish_reason": finish}
            await response.write(event({**head, "choices": [choice]}))
        counts = {"prompt_tokens": 10, "completion_tokens": len(words), "total_tokens": 10 + len(words)}
        await response.write(event({**head, "choices": [], "usage": counts}))
        await response.write(DONE)
        await response.write_eof()
        return response


def chat(model: str, text: str = "Hello?", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16, **more}


def streamed_text(body: bytes) -> str:
    """The text of a streamed chat answer."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
