"""Batches of a real gateway process that is killed while they run: `kill -9`, restart, until they are finished.

`python -m support.killed_batches FIRST COUNT` plays seeds and keeps what they show; `--add` keeps earlier runs too.
"""

import asyncio
import json
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web
from openai import OpenAI

from support.children import environment
from support.seed_results import KILLS, play_killed
from support.serving import get
from support.upstream import DONE, Upstream, begin, chunk, role, usage

CHAT: Final = "/v1/chat/completions"
ITEMS = 120
LIMIT_S = 240.0


async def echo(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers with the question, after a moment."""
    response = await begin(request)
    await response.write(role())
    await asyncio.sleep(0.02)
    await response.write(chunk(f"echo {body['messages'][0]['content']}", "stop"))
    await response.write(usage(10, 5))
    await response.write(DONE)
    await response.write_eof()
    return response


class Engine:
    """An upstream on a thread of its own, which outlives the gateways."""

    def __init__(self) -> None:
        self.upstream = Upstream(echo)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.upstream.__aenter__(), self._loop).result(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self.upstream.__aexit__(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


class Gateway:
    """`inferry serve` in a directory that outlives it. `start_s`: until it was ready."""

    def __init__(self, directory: Path, engine_url: str, **more: Any) -> None:
        worker = {"kind": "openai", "name": "echo", "url": engine_url, "models": ["m"], "max_sequences": 16}
        config = {"workers": [worker], "prices": {"m": {"input": 1.0, "output": 2.0}}, **more}
        (directory / "inferry.yaml").write_text(json.dumps(config))
        self.log = directory / "log"
        command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", "0"]
        began = time.monotonic()
        with self.log.open("a") as log:
            written = log.tell()
            self.popen = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
        while not self._is_ready(written):
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < began + LIMIT_S, self.log.read_text()
            time.sleep(0.01)
        self.start_s = time.monotonic() - began

    def _is_ready(self, written: int) -> bool:
        """Whether the gateway, whose log begins at `written`, says where it listens and is ready there."""
        if (listening := re.search(r"listening on (http://[^ ]+:(\d+)) ", self.log.read_text()[written:])) is None:
            return False
        self.url, self.port = listening[1], int(listening[2])
        try:
            return get(self.url, "/ready")[0] == 200
        except OSError:
            return False

    def stop(self, number: int) -> None:
        self.popen.send_signal(number)
        self.popen.wait(timeout=60)


def a_line(number: int) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}]}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"


def kill_while_batches_run(directory: Path, seed: int, kills: int = KILLS) -> dict[str, float]:
    """Run a batch through several gateways that are killed; raises AssertionError where an invariant is broken."""
    rng, restarts_s = random.Random(seed), [0.0]
    with Engine() as engine:
        gateway = Gateway(directory, engine.upstream.url)
        with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as api:
            content = b"".join(a_line(number) for number in range(ITEMS))
            file = api.files.create(file=("in.jsonl", content), purpose="batch")
            batch_id = api.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ).id
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, 0.25))
            gateway.stop(signal.SIGKILL)
            gateway = Gateway(directory, engine.upstream.url)
            restarts_s.append(gateway.start_s)
        try:
            _check(directory, gateway, batch_id)
            return {"items": ITEMS, "calls": len(engine.upstream.bodies), "longest_restart_s": max(restarts_s)}
        finally:
            gateway.stop(signal.SIGTERM)


def _check(directory: Path, gateway: Gateway, batch_id: str) -> None:
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as api:
        end = time.monotonic() + LIMIT_S
        while (batch := api.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            assert time.monotonic() < end, gateway.log.read_text()
            time.sleep(0.02)
        assert batch.output_file_id is not None
        assert batch.error_file_id is None
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (ITEMS, ITEMS)
        lines = [json.loads(line) for line in api.files.content(batch.output_file_id).read().splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert len(lines) == ITEMS
    assert found == {f"r{number}": f"echo q{number}" for number in range(ITEMS)}
    charged = charges(directory / "inferry.db", batch_id)
    assert set(charged.values()) == {1}, "a result is charged once"
    assert len(charged) == ITEMS, "every result is charged"


def charges(database: Path, batch_id: str) -> Counter[str]:
    """How many rows of the ledger have a cost, by item."""
    query = "SELECT step_id FROM attempts WHERE run_id = ? AND cost_nanos > 0"
    with closing(sqlite3.connect(database)) as connection:
        return Counter(step for (step,) in connection.execute(query, (batch_id,)))


if __name__ == "__main__":
    sys.exit(play_killed("killed_batches", kill_while_batches_run))
