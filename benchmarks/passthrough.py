"""A minimal Python gateway: raw ASGI in front, aiohttp behind, nothing in between.

The cost of the gateway is measured against this pass-through.

    python -m benchmarks.passthrough PORT UPSTREAM_PORT
"""

import asyncio
import sys
from typing import Any

import aiohttp
import uvicorn
import uvloop


class PassThrough:
    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, read_bufsize=1 << 20
            )
        parts = []
        more = True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        url = self._upstream + scope["path"]
        async with self._http.request(scope["method"], url, data=b"".join(parts), headers=headers) as answer:
            kind = answer.headers.get("content-type", "application/json").encode()
            if not kind.startswith(b"text/event-stream"):
                body = await answer.read()
                length = str(len(body)).encode()
                await send(_start(answer.status, [(b"content-type", kind), (b"content-length", length)]))
                await send({"type": "http.response.body", "body": body})
                return
            await send(_start(answer.status, [(b"content-type", kind)]))
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


async def main(port: int, upstream_port: int) -> None:
    app = PassThrough(f"http://127.0.0.1:{upstream_port}")
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, http="httptools", ws="none", lifespan="off", access_log=False,
        log_level="warning", backlog=4096, server_header=False, date_header=False,
    )  # fmt: skip
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), int(sys.argv[2])))
