"""Scripts of an upstream server that answers as a model with tools would."""

from typing import Any

from aiohttp import web

from support.upstream import DONE, Script, Upstream, begin, chunk, event, role, usage


def piece(finish: str | None = None, *, stop: str | int | None = None, **fields: Any) -> bytes:
    """One chunk with these fields of the delta, as vLLM writes it."""
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    return event({"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def tool_call(index: int, id: str, name: str, *arguments: str) -> list[bytes]:
    """The chunks of one tool call, its arguments in pieces."""
    head = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [piece(tool_calls=[{"index": index, "function": {"arguments": text}}]) for text in arguments]
    return [piece(tool_calls=[head]), *rest]


def answer(*events: bytes, prompt: int = 12, output: int = 5) -> Script:
    """A script that writes these events between the role and the usage, each with its own write."""

    async def script(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for one in (role(), *events, usage(prompt, output), DONE):
            await response.write(one)
        await response.write_eof()
        return response

    return script


WEATHER_CALLS = answer(
    piece(reasoning="I should look."),
    chunk("Let me look."),
    *tool_call(0, "call-a", "weather", '{"city":', ' "Bern"}'),
    *tool_call(1, "call-b", "weather", '{"city": "Basel"}'),
    piece("tool_calls"),
)
"""Reasoning, text and two parallel tool calls."""
