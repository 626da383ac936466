"""A vLLM server whose model has no chat template serves completions."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.dispatch.pool import Pool
from inferry.dispatch.values import HealthPolicy
from inferry.domain.attempts import Attempt
from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Failed
from inferry.domain.workers import Phase
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.http_gateway import HttpGateway
from support.tenant_gateway import CHAT, bearer
from support.upstream import NO_CHAT_TEMPLATE, Upstream
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock
from support.waiting import async_until

POLICY = HealthPolicy(initial_backoff_s=1.0, max_backoff_s=16.0, jitter=0.0)


class OtherRefusals(Upstream):
    """Refuses every chat for a reason that has nothing to do with its chat template."""

    async def _call(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("chat/completions"):
            return web.json_response({"error": {"message": "max_tokens is not supported"}}, status=400)
        return await super()._call(request)


@asynccontextmanager
async def a_pool(up: Upstream) -> AsyncIterator[Pool]:
    worker = OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url), LoopClock())
    pool = Pool([worker], LoopClock(), health=POLICY, kinds={"up": "vllm"})
    pool.start()
    yield pool
    await pool.close()


async def ready(pool: Pool) -> None:
    await async_until(lambda: pool.view("up").phase is Phase.READY, 60)


def a_plan(job: InferenceJob) -> BatchPlan:
    now = asyncio.get_running_loop().time()
    return BatchPlan(plan_id=1, worker="up", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=now)


def lose_jobs(pool: Pool) -> None:
    """Open the breaker."""
    for number in range(3):
        attempt, now = Attempt(a_job(f"lost-{number}")), asyncio.get_running_loop().time()
        attempt.sent(a_plan(attempt.job), now)
        attempt.ended(Failed(attempt.job.job_id, WorkerLost("gone")), now)
        pool.ended(attempt, now)


def run(work: Coroutine[Any, Any, None]) -> None:
    run_virtual_net(asyncio.wait_for(work, 300))


def test_a_model_without_a_chat_template_serves_completions_and_chats_get_the_servers_refusal(tmp_path: Path) -> None:
    gateway = HttpGateway(tmp_path)
    gateway.upstream.has_chat_template = False
    with gateway:
        key = bearer(gateway.key("acme"))
        completed = gateway.call("POST", "/v1/completions", {"model": "m", "prompt": "hello"}, key)
        assert completed.status == 200, completed.body
        assert completed.json["choices"][0]["text"] == "Hello world"
        for stream in (False, True):
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
            refused = gateway.call("POST", CHAT, body, key)
            assert (refused.status, refused.json["error"]["message"]) == (400, NO_CHAT_TEMPLATE)


def test_a_missing_chat_template_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            up.has_chat_template = False
            async with a_pool(up) as pool:
                await ready(pool)
                lose_jobs(pool)
                assert pool.view("up").phase is Phase.DOWN
                await ready(pool)

    with caplog.at_level("WARNING"):
        run(scenario())
    logged = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert logged == ["worker up: model m has no chat template; it serves completions only"]


def test_a_probe_that_is_refused_for_another_reason_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with OtherRefusals() as up, a_pool(up) as pool:
            await async_until(lambda: "failed its probe (max_tokens is not supported)" in caplog.text)
            assert pool.view("up").phase is not Phase.READY

    with caplog.at_level("WARNING"):
        run(scenario())
