"""Gateways that share workers, in the test's own process. The test gives them their roles."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.listening import bind
from inferry.cli.owned_workers import OwnedWorkers
from inferry.cli.roles import Roles
from inferry.dispatch.workers_file import WatchedFile, WorkerReconciler, WorkersFileWatcher
from inferry.domain.clock import SystemClock
from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import ResumeMode
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, Worker
from inferry.domain.streams import Failed, Item
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.ingress.http import lifecycle
from inferry.ingress.member_app import MemberApp
from inferry.workers.remote.owner_link import OwnerAddress
from support.builders import a_job
from support.loop_helpers import read
from support.scripted_worker import ScriptedWorker
from support.serving import get, post
from support.waiting import async_until

WORDS = [f" w{number}" for number in range(60)]
SECRET = b"shared"


class ClosingWorker(ScriptedWorker):
    """Loses its jobs when it is closed, as engines do."""

    is_closing = False

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        def pass_on(item: Item) -> None:
            is_lost = self.is_closing and isinstance(item, Failed)
            emit(replace(item, error=WorkerLost("it was closed")) if is_lost else item)

        await super().run(plan, pass_on)

    async def close(self) -> None:
        self.is_closing = True
        await super().close()


def an_engine() -> ScriptedWorker:
    return ClosingWorker("engine", words=WORDS, can_resume=True, capacity=Capacity(sequences=64))


class Member:
    """A gateway of the domain. Its engines are the script's own: each gateway makes workers for the same ones."""

    def __init__(
        self,
        directory: Path,
        name: str,
        make: Callable[[], ScriptedWorker] = an_engine,
        *,
        file: Path | None = None,
        **config: Any,
    ) -> None:
        self.workers: list[ScriptedWorker] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._make_worker = make
        parsed = parse({"ledger": f"sqlite:///{directory / name}.db", **config})
        self.service = wiring.assemble(parsed, [], {}, SystemClock(), app_type=MemberApp)
        self.roles = Roles(
            self.service,
            self._make,
            SystemClock(),
            listen=("127.0.0.1", 0),
            secret=SECRET,
            watch_file=None if file is None else partial(self._watch, file),
        )
        self._sock = bind("127.0.0.1", 0, 1).sockets[0]
        self._stop = lifecycle.StopSignals()
        self._serving: asyncio.Task[None] | None = None

    async def _make(self) -> Sequence[tuple[Worker, str]]:
        return [(self._made(self._make_worker()), "scripted")]

    def _made(self, worker: ScriptedWorker) -> ScriptedWorker:
        worker.gate = self.gate
        self.workers.append(worker)
        return worker

    def _watch(self, file: Path, owned: OwnedWorkers) -> WorkersFileWatcher[str]:
        """Lines of the file are the names of workers, each of a model of its own."""

        async def make(name: str) -> tuple[Worker, str]:
            models = [f"of-{name}"]
            return self._made(ClosingWorker(name, models=models, words=WORDS, capacity=Capacity(sequences=64))), "file"

        def read(content: bytes) -> dict[str, str]:
            return {name: name for name in content.decode().split()}

        return WorkersFileWatcher(WatchedFile(file), read, WorkerReconciler(owned, make, {}, grace_s=100.0))

    async def start(self) -> None:
        self.service.start()
        app, gateway, listening = self.service.app, self.service.gateway, asyncio.Event()
        serving = lifecycle.serve(
            app,
            gateway,
            self._sock,
            self._stop,
            idle_timeout_s=60,
            drain_timeout_s=0,
            use_server=self.roles.owner.use_http,
            on_listening=listening.set,
        )
        self._serving = asyncio.get_running_loop().create_task(serving)
        await listening.wait()

    async def close(self) -> None:
        await self.roles.close()
        self._stop.request()
        if self._serving is not None:
            await self._serving
        await self.service.close()
        self._sock.close()

    def address(self, epoch: int) -> OwnerAddress:
        assert self.roles.port is not None
        return OwnerAddress(None, "127.0.0.1", self.roles.port, SECRET, epoch)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and body of a request to this gateway."""
        status, _, body = await asyncio.to_thread(get, self._url, path, headers)
        return status, body

    async def post(self, path: str, body: Any = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, _, answer = await asyncio.to_thread(post, self._url, path, body, headers)
        return status, answer

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    def begin(self, number: int) -> "asyncio.Task[tuple[str, Any]]":
        return asyncio.create_task(self._read(number))

    async def _read(self, number: int) -> tuple[str, Any]:
        # Unlike bodies: equal calls would share one execution.
        job = a_job(job_id=f"{id(self)}-{number}", at=self.service.gateway.now(), output=len(WORDS) + number)
        payload = replace(job.payload, prompt_ids=(1, 2, 3))
        job = replace(job, stream=True, resume=ResumeMode.CONTINUE, payload=payload)
        deltas, end = await read(self.service.gateway.submit(job))
        return "".join(delta.text for delta in deltas), end


@asynccontextmanager
async def members(
    directory: Path, make: Callable[[], ScriptedWorker] = an_engine, **config: Any
) -> AsyncIterator[tuple[Member, Member]]:
    found = Member(directory, "a", make, **config), Member(directory, "b", make, **config)
    for one in found:
        await one.start()
    try:
        yield found
    finally:
        for one in found:
            await one.close()


async def ready(*wanted: Member) -> None:
    for one in wanted:
        await async_until(lambda one=one: one.service.gateway.is_ready)  # type: ignore[misc]
