"""A gateway process with a configuration of its own before real engines, and clients that read many streams at once."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from openai import AsyncOpenAI

from support.serving import free_port, get

READY_S = 300.0


class GatewayProcess:
    """`inferry serve` in a directory of its own. A context manager."""

    def __init__(self, directory: Path, config: dict[str, Any], *, processes: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / "gateway.log"
        self._directory = directory
        self.processes = processes
        (directory / "inferry.yaml").write_text(json.dumps(config))
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "GatewayProcess":
        command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", str(self.port)]
        command += [] if self.processes == 1 else ["--workers", str(self.processes)]
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.until(lambda: all(up == 1 for up in self.metric_by_label("inferry_worker_up").values()), READY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen is not None
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def wait(self) -> int:
        """Wait until the process has ended; its exit status."""
        assert self._popen is not None
        return self._popen.wait(timeout=120)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass
            assert self._popen is not None
            assert self._popen.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum(self.metric_by_label(name).values())

    def metric_by_label(self, name: str) -> dict[str, float]:
        status, _, page = get(self.url, "/metrics")
        if status != 200:
            raise OSError(f"/metrics answered {status}")
        found = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        assert found, name
        return {labels: float(value) for labels, value in found}

    def is_empty(self) -> bool:
        """Whether nothing of any job is left in it."""
        names = (
            "inferry_jobs_in_flight",
            "inferry_open_streams",
            "inferry_queue_depth",
            "inferry_worker_running_sequences",
        )
        return all(self.metric(name) == 0 for name in names)


class Request(Struct, frozen=True):
    """One greedy streamed call, as a chat or with a prompt of token ids."""

    number: int
    tokens: int = 96
    chat: bool = False
    lane: str = "P1"
    stop: tuple[str, ...] = ()
    includes_stop: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        return [20 + (self.number * 37 + place * 11) % 900 for place in range(6 + self.number % 9)]


class Answer(Struct):
    """What a client has read of a stream."""

    text: str = ""
    chunks: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    output_tokens: int | None = None
    ids: set[str] = set()
    first_s: float | None = None

    @property
    def visible(self) -> tuple[str, str | None, int | None]:
        """What must not depend on what happened on the way."""
        return self.text, self.finish, self.output_tokens


class StreamReaders:
    """Many streams at once through the official client, retries off: whatever is not hidden from it shows."""

    def __init__(self, url: str, model: str = "m") -> None:
        self._model = model
        self._api = AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=300)
        self.answers: dict[int, Answer] = {}

    async def __aenter__(self) -> "StreamReaders":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def read(self, request: Request, *, until: Callable[[Answer], bool] = lambda _: False) -> Answer:
        """The whole stream, or as much of it as `until` wants, after which the connection is closed."""
        answer = self.answers[request.number] = Answer(ids=set())
        began = time.monotonic()
        stream = await self._begin(request)
        try:
            async for chunk in stream:
                answer.ids.add(chunk.id)
                if chunk.usage is not None:
                    answer.output_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    text = choice.delta.content if request.chat else choice.text
                    if text:
                        answer.first_s = answer.first_s or time.monotonic() - began
                        answer.text += text
                        answer.chunks += 1
                    answer.finish = choice.finish_reason or answer.finish
                    answer.stop_reason = getattr(choice, "stop_reason", None) or answer.stop_reason
                if until(answer):
                    break
        finally:
            await stream.close()
        return answer

    async def read_all(
        self, requests: Sequence[Request], meanwhile: Coroutine[Any, Any, None] | None = None
    ) -> list[Answer]:
        """Every stream to its end. What is done meanwhile is given up when they are over before it."""
        reading: asyncio.Future[Any] = asyncio.gather(*(self.read(request) for request in requests))
        other: asyncio.Future[Any] | None = None if meanwhile is None else asyncio.ensure_future(meanwhile)
        try:
            if other is not None:
                await asyncio.wait([reading, other], return_when=asyncio.FIRST_COMPLETED)
                if other.done():
                    other.result()
            answers: list[Answer] = await reading
            return answers
        finally:
            reading.cancel()
            if other is not None:
                other.cancel()

    async def _begin(self, request: Request) -> Any:
        more: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True, "include_stop_str_in_output": request.includes_stop},
            "extra_headers": {"x-inferry-lane": request.lane},
        }
        if request.stop:
            more["stop"] = list(request.stop)
        if request.chat:
            words = " ".join(f"word{(request.number * 7 + place) % 50}" for place in range(5 + request.number % 4))
            return await self._api.chat.completions.create(messages=[{"role": "user", "content": words}], **more)
        return await self._api.completions.create(prompt=request.prompt_ids, **more)


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
