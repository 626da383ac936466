"""A scripted engine that thinks in token ids: what comes next depends on all ids before it, wherever it is asked.

So a continuation on another server is right exactly when its ids are. Some tokens are half a character: their text
comes with the next one, as engines do it.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from support.upstream import DONE, Upstream, begin, engine_id_of, event, usage


def next_id(ids: Sequence[int]) -> int:
    return (ids[-1] * 31 + len(ids) * 7 + 3) % 1000 + 10


def is_half(token: int) -> bool:
    return token % 4 == 0


def written(prompt: Sequence[int], count: int) -> list[int]:
    """The ids that follow a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_id(ids))
    return ids[len(prompt) :]


def text_of(ids: Sequence[int]) -> str:
    return "".join(f" t{one}" for one in ids)


def chat_prompt(body: dict[str, Any]) -> list[int]:
    return [1, 2, 3, len(json.dumps(body["messages"])) % 1000 + 10]


class TokenServer:
    """The script of an `Upstream`. `breaks_after` cuts the connection after so many events with text or without.

    One that `joins` puts several tokens into one event, as a server does that has fallen behind: their text as far as
    it is whole, and the ids of all.
    """

    def __init__(self, breaks_after: int | None = None, itl_s: float = 0.0, joins: int = 1) -> None:
        self.joins = joins
        self.breaks_after = breaks_after
        self.itl_s = itl_s

    async def __call__(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        prompt = chat_prompt(body) if chat else list(body["prompt"])
        shows_ids = body.get("return_token_ids") is True
        response = await begin(request)
        if chat:
            await response.write(self._event(chat, {"role": "assistant", "content": ""}, None, None, prompt, shows_ids))
        held = joined = ""
        ids: list[int] = []
        count = body.get("max_tokens") or 16
        for number, token in enumerate(written(prompt, count)):
            if self.breaks_after is not None and number >= self.breaks_after:
                await asyncio.sleep(0.01)  # what was written is on its way
                assert request.transport is not None
                request.transport.abort()
                return response
            last = number == count - 1
            text = held + f" t{token}"
            held, text = (text, "") if is_half(token) and not last else ("", text)
            joined += text
            ids.append(token)
            if not last and len(ids) < self.joins:
                continue
            first_ids = prompt if not chat and number < self.joins else None
            finish = "length" if last else None
            if up.aborted[engine_id_of(request)].is_set():
                await response.write(self._event(chat, {"content": ""}, "abort", [], None, shows_ids))
                await response.write(usage(len(prompt), number) + DONE)
                return response
            await response.write(self._event(chat, {"content": joined}, finish, ids, first_ids, shows_ids))
            joined, ids = "", []
            await self.pause(up, request, body)
        await response.write(usage(len(prompt), count) + DONE)
        return response

    async def pause(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> None:
        """What passes between two events."""
        await asyncio.sleep(self.itl_s)

    @staticmethod
    def _event(
        chat: bool,
        delta: dict[str, str],
        finish: str | None,
        ids: list[int] | None,
        prompt: list[int] | None,
        shows_ids: bool,
    ) -> bytes:
        """Field for field in vLLM's order."""
        head = {"id": "up-1", "created": 1, "model": "m"}
        own_ids = ids or None if shows_ids else None
        prompt = prompt if shows_ids else None
        choice: dict[str, Any] = {"index": 0}
        if not chat:
            choice |= {"text": delta["content"], "logprobs": None, "finish_reason": finish, "stop_reason": None}
            choice |= {"prompt_token_ids": prompt, "token_ids": own_ids}
            return event({**head, "object": "text_completion", "choices": [choice]})
        choice |= {"delta": delta, "logprobs": None, "finish_reason": finish}
        if ids is None:  # the opening
            return event({**head, "choices": [choice], "prompt_token_ids": prompt, "prompt_text": None})
        if finish:
            choice["stop_reason"] = None
        return event({**head, "choices": [{**choice, "token_ids": own_ids}]})
