"""A gateway of several processes before a scripted engine, and clients that reach any of them."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from contracts import scripted_server
from support.gateway_process import GatewayProcess
from support.upstream import Upstream
from support.waiting import until

PROCESSES = 4


class EngineThread:
    """An engine that resumes from token ids, on a thread of its own. It pauses after `first` tokens until `open`."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._opened = asyncio.Event()
        self._opened.set()

    def __enter__(self) -> "EngineThread":
        self._thread.start()
        self.upstream = self.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self.run(self.upstream.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def hold(self, first: int) -> None:
        """Calls stop after this many tokens."""
        self.first = first
        self._loop.call_soon_threadsafe(self._opened.clear)

    def open(self) -> None:
        """Let every call continue."""
        self._loop.call_soon_threadsafe(self._opened.set)

    @property
    def running(self) -> int:
        return len(self.upstream.running)

    async def _begin(self) -> Upstream:
        up = Upstream(self._answer)
        return await up.__aenter__()

    async def _answer(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await scripted_server.words(up, request, body, self._pause)

    async def _pause(self, number: int) -> None:
        if self.first is not None and number >= self.first:
            await self._opened.wait()
        else:
            await asyncio.sleep(self.delay_s)


class Answered:
    """What one client received. `error` is the exception that ended it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.error: Exception | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The text of a stream's events."""
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def events(self) -> list[Any]:
        found = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]
        return [json.loads(part) for part in found if part != b"[DONE]"]

    @property
    def process(self) -> str:
        """The process that answered: the first part of its request ids."""
        return self.headers["x-request-id"].rpartition("-")[0]


class Processes(GatewayProcess):
    """The gateway, and calls that each have a connection of their own."""

    def __init__(
        self, directory: Path, engine: EngineThread, config: dict[str, Any] | None = None, count: int = PROCESSES
    ) -> None:
        worker = {"name": "up", "kind": "vllm", "url": engine.upstream.url, "capacity": "fixed"}
        worker |= {"max_sequences": 64}
        super().__init__(directory, {"workers": [worker], **(config or {})}, processes=count)
        self.threads = ThreadPoolExecutor(64)

    def __enter__(self) -> "Processes":
        super().__enter__()
        ready = f"serves {self.url}"
        self.until(lambda: self.whole_log().count(ready) == self.processes - 1, 300)
        self.until(lambda: self.whole_log().count("worker owner is ready") == self.processes - 1, 300)
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.threads.shutdown()

    def whole_log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def pid_of(self, name: str) -> int:
        """The process that has this role now."""
        return int(re.findall(rf"started process {name} \(pid (\d+)\)", self.whole_log())[-1])

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        answered = Answered()
        self._call(answered, method, path, body, headers or {})
        return answered

    def begin(self, body: Any, headers: dict[str, str] | None = None) -> Answered:
        """A call that runs meanwhile."""
        answered = Answered()
        self.threads.submit(self._call, answered, "POST", "/v1/completions", body, headers or {})
        return answered

    def call_many(self, calls: Sequence[tuple[Any, dict[str, str]]]) -> list[Answered]:
        """All at the same time."""
        begun = [self.threads.submit(self.call, "POST", "/v1/completions", body, headers) for body, headers in calls]
        return [one.result(timeout=300) for one in begun]

    def _call(self, answered: Answered, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            answered.headers = {name.lower(): value for name, value in response.getheaders()}
            while piece := response.read1(65_536):
                answered.body += piece
            answered.status = response.status
        except Exception as error:
            answered.error = error
        finally:
            connection.close()


def a_body(number: int = 0, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A call whose output depends on its number."""
    prompt = [20 + number * 7 + place for place in range(5 + number % 4)]
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0.5, **more}


def expected_text(body: dict[str, Any]) -> str:
    """What the engine writes without a disturbance."""
    ids: list[int] = list(body["prompt"])
    for _ in range(body["max_tokens"]):
        ids.append(scripted_server.next_id(ids))
    return "".join(scripted_server.text_of(token) for token in ids[len(body["prompt"]) :])


@contextmanager
def processes(
    directory: Path, config: dict[str, Any] | None = None, count: int = PROCESSES
) -> Iterator[tuple[Processes, EngineThread]]:
    with EngineThread() as engine, Processes(directory, engine, config, count) as gateway:
        yield gateway, engine


def over_all(gateway: Processes, attempt: Callable[[], Answered], limit: int = 200) -> list[Answered]:
    """Repeat a call until every process has answered one; all answers."""
    found: list[Answered] = []
    while len({one.process for one in found}) < gateway.processes:
        found.append(attempt())
        assert len(found) < limit, "not every process was reached"
    return found


__all__ = ["Answered", "EngineThread", "Processes", "a_body", "expected_text", "over_all", "processes", "until"]
