"""The pictures of the dashboard in docs/images.

    PYTHONPATH=src:tests .venv/bin/python -m benchmarks.dashboard_images

A gateway serves a fleet of agents on three simulated engines for some minutes of virtual time, with a burst above the
engines' capacity. Its last snapshot is then shown by the dashboard's own page, in Chromium, in both themes and at the
width of a phone. Nothing depends on the speed of the machine, and a second run gives the same figures.
"""

import argparse
import asyncio
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

import inferry.observe.dashboard
from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import Lane
from inferry.domain.tenants import Tenant
from inferry.domain.values import replace
from inferry.sim.costs import CostModel, EngineFlags
from support.browser import Viewer, chromium
from support.builders import a_job
from support.staging.engines import ContinuousWorker
from support.virtual_time import LoopClock, run_virtual
from support.waiting import async_until

PAGE = Path(next(iter(inferry.observe.dashboard.__path__)))
IMAGES = Path(__file__).parent.parent / "docs" / "images"
MODEL = "llama-3.1-8b"
DURATION_S = 330.0
FLUSH_INTERVAL_S = 20.0
LIVE_ENGINE = CostModel(base_s=0.014, prefill_token_s=28e-6, sequence_s=1e-4, kv_token_s=5e-9)
BATCH_ENGINE = CostModel(base_s=0.026, prefill_token_s=80e-6, sequence_s=3e-4, kv_token_s=1e-8)
WORKERS = (("h200-a", "live"), ("h200-b", "live"), ("a100-batch", "batch"))
"""Names and groups. The configuration has them too, so that its lanes may name their groups."""
CONFIG: dict[str, Any] = {
    "workers": [
        {"kind": "vllm", "name": name, "group": group, "url": "http://127.0.0.1:1", "models": [MODEL]}
        for name, group in WORKERS
    ],
    "lanes": {
        "P0": {"groups": ["live"], "itl_ms": 60},
        "P1": {"groups": ["live"], "itl_ms": 100},
        "P2": {"groups": ["batch"], "borrow_groups": True},
    },
    "prices": {MODEL: {"input": 0.6, "output": 2.4}},
    "tenants": {"research": {"run_token_ceiling": 740_000}},
}


class Agents(NamedTuple):
    """`agents` agents of a tenant. Each makes runs of `steps` calls, with a tool of `tool_s` seconds between two."""

    name: str
    tenant: str
    lane: Lane
    agents: int
    steps: tuple[str, ...]
    prompt: tuple[int, int]
    output: tuple[int, int]
    tool_s: tuple[float, float]
    has_sub_runs: bool = False


AGENTS = (
    Agents("support-agent", "acme", Lane.P0, 14, ("classify", "look-up", "answer"), (300, 1500), (20, 90), (1.0, 6.0)),
    Agents("code-review", "globex", Lane.P1, 9, ("read-diff", "find-callers", "review", "verify", "summarise"),
           (1200, 6000), (60, 240), (2.0, 9.0), has_sub_runs=True),
    Agents("refactor", "initech", Lane.P1, 5, ("plan", "edit", "run-tests", "fix", "run-tests-again", "commit"),
           (2000, 9000), (80, 300), (4.0, 15.0)),
)  # fmt: skip
DIGESTS = (("nightly-digest", "research", 12), ("ticket-labels", "data-eng", 7))
"""Batch runs: name, tenant and the number of calls in flight."""
SHOWN_RUN = "code-review"
"""Kind of the run whose timeline is shown."""


class Fleet:
    """Traffic of the agents. Numbers are drawn from one seed."""

    def __init__(self, service: wiring.Service) -> None:
        self._service = service
        self._rng = random.Random(7)
        self._runs = 0

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._agent(kind)) for kind in AGENTS for _ in range(kind.agents)]
            tasks += [group.create_task(self._digest(*one)) for one in DIGESTS]
            tasks.append(group.create_task(self._bursts()))
            tasks.append(group.create_task(self._flush()))
            await asyncio.sleep(DURATION_S)
            for task in tasks:
                task.cancel()

    async def _agent(self, kind: Agents) -> None:
        rng = self._rng
        await asyncio.sleep(rng.uniform(0.0, 20.0))
        while True:
            run = self._new_run(kind.name)
            for number, step in enumerate(kind.steps * rng.randint(1, 3)):
                sub_run = f"{run}/callers" if kind.has_sub_runs and step == "find-callers" else None
                grown = 1 + 0.1 * number
                prompt = int(rng.randint(*kind.prompt) * grown)
                await self._call(kind.tenant, kind.lane, sub_run or run, step, prompt, rng.randint(*kind.output),
                                 parent=run if sub_run else None)  # fmt: skip
                await asyncio.sleep(rng.uniform(*kind.tool_s))

    async def _digest(self, name: str, tenant: str, parallel: int) -> None:
        run = self._new_run(name)

        async def one() -> None:
            while True:
                await self._call(tenant, Lane.P2, run, "item", self._rng.randint(400, 2400), self._rng.randint(40, 160))
                await asyncio.sleep(self._rng.uniform(1.0, 6.0))

        await asyncio.sleep(30.0)
        await asyncio.gather(*(one() for _ in range(parallel)))

    async def _bursts(self) -> None:
        """Dispatches of 24 calls each; one in the middle is far larger than the live engines can take in time."""
        for number in range(40):
            await asyncio.sleep(22.0)
            run, calls = self._new_run("dispatch"), 240 if number == 7 else 20
            async with asyncio.TaskGroup() as group:
                for index in range(calls):
                    group.create_task(self._call("harbor", Lane.P0, run, f"route-{index + 1}",
                                                 self._rng.randint(250, 700), self._rng.randint(8, 40)))  # fmt: skip

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await asyncio.to_thread(self._service.gateway._recorder.flush)

    async def _call(
        self, tenant: str, lane: Lane, run: str, step: str, prompt: int, output: int, parent: str | None = None
    ) -> None:
        known = self._service.tenants.directory.tenants.get(tenant, Tenant(name=tenant))
        now, body = asyncio.get_running_loop().time(), b'{"shared": ["", 0], "text": "%b"}' % (b"word" * prompt)
        job = a_job(tokens=prompt, output=output, tenant=tenant, run_id=run, step_id=step, lane=lane, model=MODEL,
                    stream=True, at=now, body=body)  # fmt: skip
        try:
            stream = self._service.gateway.submit(replace(job, parent_run=parent), Caller(known))
        except GatewayError:
            return
        end = None
        while end is None:
            _, end = await stream.take()

    def _new_run(self, name: str) -> str:
        self._runs += 1
        return f"{name}-{self._rng.randrange(1 << 16):04x}"


class Snapshot(NamedTuple):
    live: bytes
    series: bytes
    answers: dict[str, bytes]
    """Of the shown run, by path."""
    shown: str


def record(directory: Path) -> Snapshot:
    """What the dashboard gets from the gateway after the traffic."""

    async def main() -> Snapshot:
        workers = [an_engine(name, group) for name, group in WORKERS]
        config = parse({"ledger": f"sqlite:///{directory / 'ledger.db'}", **CONFIG})
        kinds = dict.fromkeys((worker.name for worker in workers), "vllm")
        service = wiring.assemble(config, workers, {}, LoopClock(), kinds)
        service.start()
        await async_until(lambda: service.gateway.is_ready)
        playing = asyncio.create_task(Fleet(service).play())
        await asyncio.sleep(DURATION_S - 2.0)
        try:
            return await snapshot(service)
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            service.gateway.abandon()
            await service.close()

    return run_virtual(main())


def an_engine(name: str, group: str) -> ContinuousWorker:
    is_live = group == "live"
    flags = EngineFlags(max_num_seqs=16 if is_live else 24, kv_tokens=60_000 if is_live else 40_000)
    costs = LIVE_ENGINE if is_live else BATCH_ENGINE
    worker = ContinuousWorker(
        name, group=group, costs=costs, flags=flags, adaptive=True, max_sequences=flags.max_num_seqs
    )
    worker._models = (MODEL,)
    return worker


async def snapshot(service: wiring.Service) -> Snapshot:
    await asyncio.to_thread(service.gateway._recorder.flush)
    dashboard: Any = service.app._admin.dashboard
    data = dashboard._data
    data.live()  # starts to read the ledger
    await data._recorded._reading
    data._live = None
    listed = [one for one in msgspec.json.decode(data.live())["runs"] if one["id"].startswith(SHOWN_RUN)]
    chosen = max(listed, key=lambda one: one["calls"])
    tenant, run = chosen["tenant"], chosen["id"]
    path = f"/admin/runs/{run}"
    answers = {
        path: msgspec.json.encode(await dashboard._runs._show(tenant, run, {})),
        f"{path}/timeline": msgspec.json.encode(await dashboard._timeline(tenant, run)),
    }
    return Snapshot(data.live(), data.series(), answers, run)


TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SESSION = b'{"needs_key": false, "signed_in": true, "csrf": "", "expires_at": null}'


@contextmanager
def served(shown: Snapshot) -> Iterator[str]:
    """The page and the snapshot at a URL. Its stream of snapshots stays open."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            if path == "/admin/overview/stream":
                self._send("text/event-stream", b"event: series\ndata: %b\n\nevent: live\ndata: %b\n\n" % shown[1::-1])
                is_over.wait()
            elif path.startswith("/admin/"):
                self._send("application/json", SESSION if path == "/admin/session" else shown.answers[path])
            else:
                file = PAGE / (path.removeprefix("/dashboard").lstrip("/") or "index.html")
                self._send(TYPES.get(file.suffix, "font/woff2"), file.read_bytes())

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


def shoot(shown: Snapshot, directory: Path) -> None:
    with served(shown) as url, chromium() as browser:
        for theme in ("light", "dark"):
            for name, width, height in (("", 1440, 1500), ("phone-", 390, 1560)):
                viewer = Viewer(browser, url, viewport={"width": width, "height": height}, color_scheme=theme)
                viewer.until_live()
                viewer.page.wait_for_timeout(800)
                viewer.page.screenshot(path=directory / f"dashboard-{name}{theme}.png")
                if not name:
                    viewer.page.set_viewport_size({"width": 1440, "height": 1000})
                    viewer.page.locator(".run-link", has_text=shown.shown).click()
                    viewer.page.locator(".step").nth(3).click()
                    viewer.page.wait_for_timeout(800)
                    viewer.page.screenshot(path=directory / f"dashboard-run-{theme}.png")
                viewer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="directory of the pictures")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as directory:
        shoot(record(Path(directory)), out)


if __name__ == "__main__":
    main()
