"""A scripted server whose output depends on the whole prompt, so that resuming from token ids is visible."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from inferry.domain.event_ids import strip_token_ids
from support import upstream

CONTEXT = 4096
WORDS = 400


def next_id(ids: list[int]) -> int:
    return (31 * sum(ids[-7:]) + 17 * len(ids) + ids[0]) % WORDS


def text_of(token: int) -> str:
    """Some tokens say nothing yet, as the first half of a character does."""
    return "" if token % 10 == 3 else f" w{token}"


async def yield_once(number: int) -> None:
    await asyncio.sleep(0)


async def words(
    up: upstream.Upstream,
    request: web.Request,
    body: dict[str, Any],
    pause: Callable[[int], Awaitable[None]] = yield_once,
) -> web.StreamResponse:
    """As vLLM answers /v1/completions with token ids: events with ids, the last with a reason, usage, [DONE].

    `pause` is awaited after each token, with the number of tokens so far.
    """
    ids: list[int] = list(body["prompt"])
    if len(ids) >= CONTEXT:
        message = f"This model's maximum context length is {CONTEXT} tokens."
        error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
        return web.json_response({"error": error}, status=400)
    response = await upstream.begin(request)
    prompt_tokens, stops = len(ids), body.get("stop") or []
    written = ""
    for number in range(body["max_tokens"]):
        ids.append(next_id(ids))
        finish = "length" if number == body["max_tokens"] - 1 else None
        text = text_of(ids[-1])
        found = [at for stop in stops if (at := (written + text).find(stop)) >= 0]
        if found:
            text, finish = (written + text)[len(written) : min(found)], "stop"
        written += text
        event = _event(text, ids[-1:], finish, None if number else ids[:-1])
        await response.write(event if body.get("return_token_ids") else strip_token_ids(event))
        if finish == "stop":
            break
        await pause(number + 1)
    await response.write(upstream.usage(prompt_tokens, len(ids) - prompt_tokens) + upstream.DONE)
    return response


def _event(text: str, ids: list[int], finish: str | None, prompt_ids: list[int] | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice |= {"prompt_token_ids": prompt_ids, "token_ids": ids}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
