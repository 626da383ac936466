"""A gateway before scripted servers that hand KV over as vLLM does, in virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from inferry.cli.gateway_wiring import make_gateway
from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.routes import WorkerRole
from inferry.domain.streams import Delta, End
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.loop_helpers import ListLedger, read
from support.upstream import DONE, Script, Upstream, begin, chunk, event, role
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock

PROMPT, CACHED, WORDS = 2000, 512, ("one", " two", " three")
PREFILL_S, STEP_S = 0.4, 0.1
HANDLE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1", "remote_port": 5600}
BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "a long story"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 40,
        "min_tokens": 2,
        "stop": [" "],
        "temperature": 0.5,
    }
).encode()


def usage_of(output: int, cached: int) -> dict[str, Any]:
    counts = {"prompt_tokens": PROMPT, "completion_tokens": output, "total_tokens": PROMPT + output}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


async def prefills(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Computes a prompt as vLLM's NixlConnector does: the response tells where its KV is."""
    await asyncio.sleep(PREFILL_S)
    choice = {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "length"}
    answer = {"object": "chat.completion", "choices": [choice], "usage": usage_of(1, CACHED)}
    return web.json_response(answer | {"kv_transfer_params": HANDLE})


async def stores(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Computes a prompt as a connector with a shared store does: there is nothing to tell."""
    answer = {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "length"}], "usage": None}
    return web.json_response(answer | {"kv_transfer_params": None})


async def decodes(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Writes the words, after a prefill of its own where no KV is handed over."""
    response = await begin(request)
    await response.write(role())
    if "kv_transfer_params" not in body:
        await asyncio.sleep(PREFILL_S)
    for number, word in enumerate(WORDS):
        await asyncio.sleep(STEP_S)
        await response.write(chunk(word, "stop" if number == len(WORDS) - 1 else None))
    await response.write(event({"id": "up-1", "object": "x", "choices": [], "usage": usage_of(len(WORDS), PROMPT - 1)}))
    await response.write(DONE)
    return response


def refuses(status: int, code: str, **headers: str) -> Script:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": code}}, status=status, headers=headers)

    return script


async def waits(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await up.release.wait()
    return await prefills(up, request, body)


def without_kv(script: Script) -> Script:
    """Decodes calls without KV, and does `script` with those whose KV it is to fetch."""

    async def either(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (script if "kv_transfer_params" in body else decodes)(up, request, body)

    return either


class Fleet:
    """A gateway before the servers `p` (prefill) and `d` (decode), and more workers where a test names them."""

    def __init__(
        self, *servers: tuple[str, Upstream, WorkerRole, dict[str, Any]], lanes: dict[Lane, LanePolicy] | None = None
    ) -> None:
        self.clock = LoopClock()
        self.workers: dict[str, OpenAIHttpWorker] = {}
        for name, up, worker_role, given in servers:
            fields: dict[str, Any] = {"capacity": Capacity(sequences=8), "min_prefill_tokens": 1000, **given}
            settings = HttpWorkerSettings(url=up.url, role=worker_role, **fields)
            self.workers[name] = OpenAIHttpWorker(name, settings, self.clock)
        self.ledger = ListLedger()
        self.recorder = Recorder(self.ledger)
        self.metrics = Metrics(["m"], list(self.workers))
        self.pool = Pool(self.workers.values(), self.clock, health=HealthPolicy())
        self.gateway = make_gateway(
            lanes=DEFAULT_LANES if lanes is None else lanes,
            pool=self.pool,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=self.clock,
        )

    def job(self, **fields: Any) -> InferenceJob:
        fields = {"tokens": PROMPT, "stream": True, "body": BODY, **fields}
        job = a_job(at=self.clock.now(), **fields)
        return replace(job, token_budget=40, payload=replace(job.payload, include_usage=True))

    async def call(self, job: InferenceJob | None = None) -> tuple[str, End]:
        deltas, end = await read(self.gateway.submit(job or self.job()))
        return text_of(deltas), end

    def rows(self) -> list[LedgerEntry]:
        self.recorder.flush(120)
        return self.ledger.entries

    def attempts(self) -> list[tuple[str | None, Outcome]]:
        return [(row.worker, row.outcome) for row in self.rows()]

    def prefilled(self) -> dict[str, float]:
        rows = self.metrics.render()[0].decode().splitlines()
        found = [row.split("{", 1)[1].rsplit(" ", 1) for row in rows if row.startswith("inferry_prefills_total{")]
        return {labels.removesuffix("}").replace('"', ""): float(value) for labels, value in found}


def text_of(deltas: list[Delta]) -> str:
    events = b"".join(delta.raw for delta in deltas).split(b"\n\n")
    parsed = [json.loads(one[6:]) for one in events if one.startswith(b"data: {")]
    text = "".join(choice["delta"].get("content") or "" for one in parsed for choice in one["choices"])
    return text + "".join(delta.text for delta in deltas)


@asynccontextmanager
async def a_fleet(
    prefill: Upstream, decode: Upstream, *more: tuple[str, Upstream, WorkerRole, dict[str, Any]], **fields: Any
) -> AsyncIterator[Fleet]:
    lanes = fields.pop("lanes", None)
    async with prefill, decode:
        fleet = Fleet(("p", prefill, "prefill", fields), ("d", decode, "decode", {}), *more, lanes=lanes)
        fleet.gateway.start()
        while any(view.phase is not Phase.READY for view in fleet.pool.views()):
            await asyncio.sleep(0.01)
        try:
            yield fleet
        finally:
            await fleet.gateway.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtual_net(asyncio.wait_for(work, 300))
