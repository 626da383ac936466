"""A server that answers as a model would: it calls the tools that the user names, fills schemas, reasons when told to.

`ScriptedModelGateway` is a gateway before it, in one process. A gateway of its own process uses `ScriptedModelServer`
or `python -m support.scripted_model PORT`. The answers are those of `support.model_rules`.
"""

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

from aiohttp import web

from support.http_gateway import HttpGateway
from support.model_rules import Call, Reply, Rule, reply, text_of
from support.upstream import DONE, Upstream, begin, event

CONTEXT_TOKENS = 200_000
_TOKEN = re.compile(r"\s*\S{1,8}|\s+")


class ScriptedModel:
    """Answers of vLLM's shape for chat and text completions, streamed and whole. `rules` come before the usual ones.

    A prompt that was sent before counts as cached.
    """

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = tuple(rules)
        self._seen: set[int] = set()
        self.stops_after: int | None = None
        """Chunks of a stream after which it stands still; None for no such limit."""

    async def script(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        answer = _Answer(body, self._reply(body, is_chat=is_chat), is_chat=is_chat)
        answer.is_cached = answer.prompt in self._seen
        self._seen.add(answer.prompt)
        if not body.get("stream"):
            return web.json_response(answer.whole())
        response = await begin(request)
        for number, one in enumerate((*answer.chunks(), DONE)):
            if number == self.stops_after:
                await asyncio.Event().wait()
            await response.write(one)
        await response.write_eof()
        return response

    def _reply(self, body: dict[str, Any], *, is_chat: bool) -> Reply:
        if is_chat:
            return reply(body, self._rules)
        prompt = body["prompt"]
        return reply({"messages": [{"role": "user", "content": prompt if isinstance(prompt, str) else "ids"}]})


class _Answer:
    """One answer on the wire. A token is a word or a piece of one; its id is a checksum."""

    def __init__(self, body: dict[str, Any], said: Reply, *, is_chat: bool) -> None:
        self._chat = is_chat
        self._with_ids = bool(body.get("return_token_ids"))
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        prompt = "\n".join(text_of(one) for one in body["messages"]) if is_chat else str(body["prompt"])
        self.prompt = crc32(prompt.encode())
        self.is_cached = False
        self._prompt_ids = [_id(one) for one in _TOKEN.findall(prompt)] or [1]
        self._reasoning = _TOKEN.findall(said.reasoning) if is_chat else []
        text, self.stop = _stopped(said.text, body.get("stop"))
        self._text = _TOKEN.findall(text)
        self._calls = said.calls
        self.finish = "tool_calls" if said.calls else "stop"
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or (None if is_chat else 16)
        if limit is not None and len(self._reasoning) + len(self._text) > limit:
            self._reasoning = self._reasoning[:limit]
            self._text = self._text[: limit - len(self._reasoning)]
            self._calls, self.finish, self.stop = (), "length", None
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {"id": "chatcmpl-scripted", "object": kind, "created": 1, "model": body["model"]}

    @property
    def usage(self) -> dict[str, Any]:
        calls = sum(1 + len(_TOKEN.findall(call.arguments)) for call in self._calls)
        output = len(self._reasoning) + len(self._text) + calls + (self.finish != "length")
        prompt = len(self._prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": prompt if self.is_cached else 0},
            "completion_tokens_details": {"reasoning_tokens": len(self._reasoning)} if self._reasoning else None,
        }

    def whole(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish, "stop_reason": self.stop}
        text = "".join(self._text)
        if self._chat:
            calls = [_tool_call(number, call, call.arguments) for number, call in enumerate(self._calls)]
            message = {"role": "assistant", "content": text or None, "reasoning": "".join(self._reasoning) or None}
            choice["message"] = {**message, "tool_calls": calls}
        else:
            choice["text"] = text
        return {**self._head, "choices": [choice], "usage": self.usage}

    def chunks(self) -> list[bytes]:
        found: list[bytes] = []
        if self._chat:
            found.append(self._chunk({"role": "assistant", "content": ""}, first=True))
            found += [self._chunk({"reasoning": one}, one) for one in self._reasoning]
        found += [self._chunk({"content": one}, one, first=not found) for one in self._text]
        for number, call in enumerate(self._calls):
            found.append(self._chunk({"tool_calls": [{**_tool_call(number, call, ""), "index": number}]}, call.name))
            for piece in _TOKEN.findall(call.arguments):
                found.append(self._chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]}, piece))
        found.append(self._chunk({}, "" if self.finish == "length" else "<end>", finish=self.finish))
        if self._with_usage:
            found.append(event({**self._chunk_head, "choices": [], "usage": self.usage}))
        return found

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _chunk(
        self, delta: dict[str, Any], token: str = "", *, first: bool = False, finish: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice["stop_reason"] = self.stop if finish else None
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        head = self._chunk_head
        if self._with_ids:
            choice["token_ids"] = [_id(token)] if token else None
            if first:
                (head if self._chat else choice)["prompt_token_ids"] = self._prompt_ids
        return event({**head, "choices": [choice]})


def _tool_call(number: int, call: Call, arguments: str) -> dict[str, Any]:
    id = f"call_{number}_{crc32((call.name + call.arguments).encode()):08x}"
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _stopped(text: str, stop: str | list[str] | None) -> tuple[str, str | None]:
    """The text before the first stop string, and that string."""
    stops = [stop] if isinstance(stop, str) else stop or []
    found = min(((text.find(one), one) for one in stops if one in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


def _id(token: str) -> int:
    return crc32(token.encode()) % 100_000


class ScriptedModelGateway(HttpGateway):
    """A gateway that asks for keys, with the model behind it."""

    def __init__(self, directory: Path, config: dict[str, Any] | None = None, *, rules: Sequence[Rule] = ()) -> None:
        super().__init__(directory, ScriptedModel(rules).script, config)
        self.upstream.context_tokens = CONTEXT_TOKENS


class ScriptedModelServer:
    """The model as a server on a thread, for gateways of their own process. `with` starts it; `upstream` has its port
    and what it received."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.model = ScriptedModel(rules)
        self.upstream = Upstream(self.model.script)
        self.upstream.context_tokens = CONTEXT_TOKENS
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    @property
    def url(self) -> str:
        return self.upstream.url

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(120)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.upstream:
            self._started.set()
            await self._stop.wait()


async def _main(port: int) -> None:
    upstream = Upstream(ScriptedModel().script)
    upstream.port, upstream.context_tokens = port, CONTEXT_TOKENS
    async with upstream:
        print(json.dumps({"url": upstream.url}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1])))
