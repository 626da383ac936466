"""Worker groups in the running gateway: two servers behind it, one for live calls and one for batch jobs.

The servers hold batch calls after their first token until the test releases them, so a batch call ends only by release
or by an abort. Every call at a server is an event, and the order of events is asserted, not a duration.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.gateway_process import Answer, StreamReaders
from support.gateway_process import Request as Call
from support.serving import Serving, get
from support.token_server import TokenServer, text_of, written
from support.upstream import Upstream, engine_id_of
from support.waiting import async_until

SEQUENCES = 2
TOKENS = 6
LIVE_LANES = ("P0", "P1")
LIMIT_S = 120.0


class GroupServer(TokenServer):
    """A server of one group. An event is a lane and `began`, `aborted` or `ended`.

    `held` counts the batch calls that are held. `abort_requests` are those received before each live call.
    """

    def __init__(self, lane_of: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.held = 0
        self.abort_requests: list[int] = []
        self.release = asyncio.Event()
        self._lane_of = lane_of
        self.upstream = Upstream(self)
        self.upstream.aborts = True

    async def __call__(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        lane = self._lane(body)
        self.events.append((lane, "began"))
        if lane != "P2":
            self.abort_requests.append(sum(aborted.is_set() for aborted in up.aborted.values()))
        response = await super().__call__(up, request, body)
        if not up.aborted[engine_id_of(request)].is_set():
            self.events.append((lane, "ended"))
        return response

    async def pause(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> None:
        if self._lane(body) == "P2":
            aborted = up.aborted[engine_id_of(request)]
            waits = [asyncio.ensure_future(one.wait()) for one in (self.release, aborted)]
            self.held += 1
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.held -= 1
                for one in waits:
                    one.cancel()
            if aborted.is_set():
                self.events.append(("P2", "aborted"))

    def count(self, lane: str, what: str) -> int:
        return self.events.count((lane, what))

    def _lane(self, body: dict[str, Any]) -> str:
        """A resumed call has the prompt of its job, then the tokens it has written."""
        (lane,) = {lane for ids, lane in self._lane_of.items() if tuple(body["prompt"][: len(ids)]) == ids}
        return lane


class Scene:
    """The gateway, its two servers, and a client."""

    def __init__(
        self, url: str, readers: StreamReaders, lane_of: dict[tuple[int, ...], str], servers: list[GroupServer]
    ) -> None:
        self.batch, self.interactive = servers
        self._url = url
        self._readers = readers
        self._lane_of = lane_of

    def call(self, number: int, lane: str) -> asyncio.Task[Answer]:
        request = Call(number, tokens=TOKENS, lane=lane)
        self._lane_of[tuple(request.prompt_ids)] = lane
        return asyncio.create_task(self._readers.read(request))

    def flood(self, calls: int) -> list[asyncio.Task[Answer]]:
        return [self.call(number, "P2") for number in range(calls)]

    async def until_queued(self, jobs: int) -> None:
        while True:
            _, _, page = await asyncio.to_thread(get, self._url, "/metrics")
            if sum(map(float, re.findall(r"inferry_queue_depth\{.*\} (.*)", page))) == jobs:
                return

    async def finish(self, calls: list[asyncio.Task[Answer]]) -> None:
        """Release the batch calls and check every answer against an undisturbed run."""
        for server in (self.batch, self.interactive):
            server.release.set()
        for number, answer in enumerate(await asyncio.gather(*calls)):
            assert answer.text == text_of(written(Call(number).prompt_ids, TOKENS))
            assert answer.finish == "length"


@asynccontextmanager
async def a_scene(directory: Path, *, borrow: bool) -> AsyncIterator[Scene]:
    lane_of: dict[tuple[int, ...], str] = {}
    servers = [GroupServer(lane_of), GroupServer(lane_of)]
    async with servers[0].upstream, servers[1].upstream:
        workers = [
            {"kind": "vllm", "name": group, "group": group, "url": server.upstream.url, "models": ["m"]}
            for group, server in zip(("batch", "interactive"), servers, strict=True)
        ]
        config = {
            "workers": [{**worker, "max_sequences": SEQUENCES, "capacity": "fixed"} for worker in workers],
            "lanes": {
                **{lane: {"groups": ["interactive"]} for lane in LIVE_LANES},
                "P2": {"groups": ["batch"], "borrow_groups": borrow, "reserve": 0.0},
            },
        }
        gateway = Serving(directory, config=config)
        await asyncio.to_thread(gateway.__enter__)
        try:
            async with StreamReaders(gateway.url) as readers, asyncio.timeout(LIMIT_S):
                yield Scene(gateway.url, readers, lane_of, servers)
        finally:
            await asyncio.to_thread(gateway.__exit__, None, None, None)


def run(directory: Path, act: Callable[[Scene], Coroutine[Any, Any, None]], *, borrow: bool) -> None:
    async def whole() -> None:
        async with a_scene(directory, borrow=borrow) as scene:
            await act(scene)

    asyncio.run(whole())


@pytest.mark.parametrize("lane", LIVE_LANES)
def test_a_batch_flood_leaves_interactive_workers_untouched(tmp_path: Path, lane: str) -> None:
    async def act(scene: Scene) -> None:
        calls = scene.flood(20)
        await async_until(lambda: scene.batch.held == SEQUENCES)
        await scene.until_queued(20 - SEQUENCES)
        for number in range(20, 24):  # each is answered while every batch worker is full
            calls.append(scene.call(number, lane))
            await calls[-1]
        assert scene.batch.events == [("P2", "began")] * SEQUENCES
        assert scene.interactive.events == [(lane, "began"), (lane, "ended")] * 4
        await scene.finish(calls)
        assert scene.interactive.count("P2", "began") == 0
        assert scene.batch.count("P2", "ended") == 20
        assert scene.batch.count(lane, "began") == 0

    run(tmp_path, act, borrow=False)


@pytest.mark.parametrize("lane", LIVE_LANES)
def test_borrowed_workers_are_yielded_to_the_first_live_call(tmp_path: Path, lane: str) -> None:
    async def act(scene: Scene) -> None:
        calls = scene.flood(8)
        await async_until(lambda: scene.interactive.held == scene.batch.held == SEQUENCES)
        await scene.until_queued(8 - 2 * SEQUENCES)
        live = scene.call(8, lane)
        await live
        # The worker was asked to abort a borrower before the live call came, and all borrowers are aborted.
        (requests,) = scene.interactive.abort_requests
        assert requests >= 1
        await async_until(lambda: scene.interactive.count("P2", "aborted") == SEQUENCES)
        # The live call has waited for no batch call's end, and those of the batch workers are left alone.
        assert scene.batch.events == [("P2", "began")] * SEQUENCES
        assert scene.interactive.count("P2", "ended") == 0
        await scene.finish([*calls, live])

    run(tmp_path, act, borrow=True)
