"""Gateway processes that share Redis and PostgreSQL, and an engine behind them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from support.children import environment
from support.serving import free_port, get
from support.upstream import DONE, Upstream, begin, chunk, role, usage

PROMPT_TOKENS = 12
SECRET = "a secret of sixteen or more"


async def write_words(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As many words as are asked for, in bursts."""
    response = await begin(request)
    await response.write(role())
    tokens = int(body.get("max_tokens") or 1)
    for number in range(tokens):
        await response.write(chunk("w", "length" if number == tokens - 1 else None))
        if number % 8 == 0:
            await asyncio.sleep(0.01)
    await response.write(usage(PROMPT_TOKENS, tokens))
    await response.write(DONE)
    await response.write_eof()
    return response


@contextmanager
def an_engine() -> Iterator[str]:
    """Its URL. It runs on a thread of its own."""
    started, stop = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        async with Upstream(write_words) as upstream:
            found["url"], found["loop"] = upstream.url, asyncio.get_running_loop()
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(60)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join(60)


class GatewayChild:
    """`inferry serve` in a directory of its own."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        directory.mkdir()
        (directory / "inferry.yaml").write_text(json.dumps(config))
        self.port = free_port()
        self.log = directory / "log"
        command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=environment(CLUSTER_SECRET=SECRET)
            )

    def is_ready(self) -> bool:
        try:
            return get(f"http://127.0.0.1:{self.port}", "/ready")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """End it where it has not ended."""
        self.popen.kill()
        self.popen.wait(timeout=120)

    def metric(self, name: str) -> float:
        page: str = get(f"http://127.0.0.1:{self.port}", "/metrics")[2]
        return float(next(line for line in page.splitlines() if line.startswith(f"{name} ")).split()[1])

    def stop(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(timeout=120)
