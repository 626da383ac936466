"""An engine in a process of its own: `python -m support.chaos_engine PORT`. It imports little, to start fast."""

import asyncio
import sys
from typing import Any

from aiohttp import web

from contracts import scripted_server
from support.upstream import DONE, Upstream, begin, chunk, role, usage

TOKEN_S = 0.004


async def answer(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Completions continue their prompt, so that a lost or repeated token shows. Chats repeat the question."""
    if "prompt" in body:
        return await scripted_server.words(upstream, request, body, lambda _: asyncio.sleep(TOKEN_S))
    response = await begin(request)
    await response.write(role())
    await asyncio.sleep(0.05)
    await response.write(chunk(f"echo {body['messages'][0]['content']}", "stop"))
    await response.write(usage(10, 5) + DONE)
    await response.write_eof()
    return response


async def _serve(port: int) -> None:
    upstream = Upstream(answer)
    upstream.port = port
    async with upstream:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
