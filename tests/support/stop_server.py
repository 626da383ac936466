"""A scripted engine with stop strings as vLLM has them: it holds text back, and looks only at what it writes itself.

What comes next depends on all ids before it, wherever it is asked. Its tokens are short pieces of a small alphabet, so
that stop strings begin and end anywhere in them; some are half a character.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from support.upstream import DONE, Upstream, begin, event, usage

PIECES = ["a", "b", "ab", "ba", " a", "bb ", "é", "aab", "", " b", "b\n", "a a"]
"""The empty one is the first half of a character, whose whole comes with the next token."""
HALF = PIECES.index("")
WHOLE = "ü"


def next_id(ids: Sequence[int]) -> int:
    mixed = (ids[-1] * 7919 + len(ids) * 104_729 + sum(ids[-3:]) * 31) % 1_000_003
    return mixed % len(PIECES)


def texts(ids: Sequence[int]) -> list[str]:
    """What each token adds to the text: a half character nothing, the token behind it all of it."""
    found, is_open = [], False
    for one in ids:
        found.append("" if one == HALF else (WHOLE if is_open else "") + PIECES[one])
        is_open = is_open or one == HALF if one == HALF else False
    return found


def read(ids: Sequence[int]) -> str:
    """As /detokenize reads them: half a character cannot be read."""
    return "".join(texts(ids)) + ("\ufffd" if ids and ids[-1] == HALF else "")


class StopServer:
    """The script of an `Upstream`. `breaks_after` tokens it cuts the connection; `joins` of them make an event."""

    def __init__(self, breaks_after: int | None = None, joins: int = 1) -> None:
        self.breaks_after = breaks_after
        self.joins = joins
        self.last_prompt = 0

    async def __call__(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        ids = [3, 1, 4] if chat else list(body["prompt"])
        prompt = len(ids)
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        includes = body.get("include_stop_str_in_output") is True
        hold = max(map(len, stops)) - 1 if stops and not includes else 0
        least, count = body.get("min_tokens") or 0, body.get("max_tokens") or 16
        response = await begin(request)
        if chat:
            await response.write(_event(True, {"role": "assistant", "content": ""}, None, None, None, ids))
        text, given, pending, first = "", 0, list[int](), True
        for number in range(1, count + 1):
            if self.breaks_after is not None and number > self.breaks_after:
                await asyncio.sleep(0.002)
                assert request.transport is not None
                request.transport.abort()
                return response
            ids.append(next_id(ids))
            pending.append(ids[-1])
            # The text of a half character at the seam is not the continuation's to know: the prompt ends whole.
            before, text = len(text), "".join(texts(ids)[prompt:])
            finish: str | None = "length" if number == count else None
            reason: str | None = None
            found = _first_stop(text, before, stops) if number > least else None
            if found is not None:
                end, at, reason = found
                finish, text = "stop", text[: end if includes else at]
            if not finish and len(pending) < self.joins:
                continue
            upto = len(text) if finish else max(given, len(text) - hold)
            opening = ids[:prompt] if first and not chat else None
            piece = text[given:upto]
            await response.write(_event(chat, {"content": piece}, finish, reason, pending, opening))
            given, pending, first = max(given, upto), [], False
            if finish:
                await response.write(usage(prompt, number) + DONE)
                return response
        raise AssertionError("it ends by its length")


def _first_stop(text: str, before: int, stops: list[str]) -> tuple[int, int, str] | None:
    found = None
    for stop in stops:
        at = text.find(stop, max(0, before - len(stop) + 1))
        if len(text) > before and at >= 0 and (found is None or at + len(stop) < found[0]):
            found = (at + len(stop), at, stop)
    return found


def _event(
    chat: bool,
    delta: dict[str, str],
    finish: str | None,
    reason: str | None,
    ids: list[int] | None,
    prompt: list[int] | None,
) -> bytes:
    head = {"id": "up-1", "created": 1, "model": "m"}
    choice: dict[str, Any] = {"index": 0}
    if not chat:
        choice |= {"text": delta["content"], "logprobs": None, "finish_reason": finish, "stop_reason": reason}
        return event({**head, "choices": [{**choice, "prompt_token_ids": prompt, "token_ids": ids}]})
    choice |= {"delta": delta, "logprobs": None, "finish_reason": finish}
    if ids is None:
        return event({**head, "choices": [choice], "prompt_token_ids": prompt, "prompt_text": None})
    if finish:
        choice["stop_reason"] = reason
    return event({**head, "choices": [{**choice, "token_ids": ids}]})
