"""Budgets over real sockets: they hold during calls, and responses that they cap end cleanly."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.tenants import Limits, Tenant
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.serving import Serving
from support.upstream import DONE, Upstream, begin, chunk, role, usage
from support.waiting import async_until

CEILING = 1000


async def talks_on(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that does not care for limits."""
    response = await begin(request)
    await response.write(role())
    for _ in range(2000):
        await response.write(chunk(" word"))
        await asyncio.sleep(0.001)
    return response


async def keeps_its_limit(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await response.write(role())
    limit = int(body.get("max_completion_tokens") or body["max_tokens"])
    for number in range(limit):
        await response.write(chunk(" word", "length" if number == limit - 1 else None))
    await response.write(usage(9, limit))
    await response.write(DONE)
    await response.write_eof()
    return response


class HttpGateway(Serving):
    """A gateway in front of a scripted server, both on the gateway's loop."""

    def __init__(self, directory: Path, script: Any, config: dict[str, Any]) -> None:
        self.upstream = Upstream(script)
        super().__init__(directory, self._workers, config)

    def _workers(self) -> Any:
        settings = HttpWorkerSettings(url=self.upstream.url, profile=PROFILES["vllm"], models=("m",))
        return [OpenAIHttpWorker("up", settings, SystemClock(), DEFAULT_LANES)], {}

    async def _main(self) -> None:
        async with self.upstream:
            await super()._main()


def call(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **more}


async def streamed(url: str, body: dict[str, Any], run: str) -> tuple[int, list[dict[str, Any]], bool]:
    """Status, the events, and whether the stream was ended as it should."""
    async with aiohttp.ClientSession() as http:
        headers = {"x-inferry-tenant": "acme", "x-inferry-run-id": run}
        async with http.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, headers=headers) as answer:
            lines = (await answer.text()).split("\n\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return answer.status, events, "data: [DONE]" in lines


def test_a_stream_of_an_exhausted_run_ends_cleanly_with_a_reason(tmp_path: Path) -> None:
    config = {"tenants": {"acme": {"run_token_ceiling": CEILING}}}
    with HttpGateway(tmp_path, talks_on, config) as gateway:

        async def both() -> list[tuple[int, list[dict[str, Any]], bool]]:
            return await asyncio.gather(*(streamed(gateway.url, call(1000), "r") for _ in range(2)))

        answers = asyncio.run(both())
        spent = gateway.service.gate.run_report("acme", "r")
    words = 0
    for status, events, is_whole in answers:
        assert status == 200
        assert is_whole
        *before, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["inferry"]["code"] == "run_budget_exhausted"
        assert all(one["choices"][0]["finish_reason"] is None for one in before)
        words += sum(one["choices"][0]["delta"].get("content") == " word" for one in before)
    assert spent is not None
    assert spent.leased_tokens == 0
    assert words < spent.spent_tokens <= CEILING
    assert words > CEILING / 3
    assert gateway.upstream.disconnects == 2


def test_an_answer_cut_by_its_budget_reports_it(tmp_path: Path) -> None:
    config = {"tenants": {"acme": {"run_token_ceiling": CEILING}}}
    with HttpGateway(tmp_path, keeps_its_limit, config) as gateway:

        async def ask() -> tuple[int, Any, str | None]:
            async with aiohttp.ClientSession() as http:
                headers = {"x-inferry-tenant": "acme", "x-inferry-run-id": "whole"}
                async with http.post(f"{gateway.url}/v1/chat/completions", json=call(1000), headers=headers) as answer:
                    return answer.status, await answer.json(), answer.headers.get("x-inferry-stop-reason")

        status, body, reason = asyncio.run(ask())
        streaming = asyncio.run(streamed(gateway.url, call(1000), "streamed"))
    assert (status, reason) == (200, "run_budget_exhausted")
    assert body["inferry"]["code"] == "run_budget_exhausted"
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"]
    assert 0 < gateway.upstream.bodies[0]["max_tokens"] == body["usage"]["completion_tokens"] < CEILING
    _, events, is_whole = streaming
    assert is_whole
    ends = [one for one in events for choice in one["choices"] if choice["finish_reason"] is not None]
    assert len(ends) == 1
    assert events[-1]["inferry"]["code"] == "run_budget_exhausted"


def test_sixty_four_sub_agents_on_the_embedded_engine_never_overspend(tmp_path: Path) -> None:
    ceiling = 1500
    config = {"tenants": {"acme": {"run_token_ceiling": ceiling}}}
    with Serving(tmp_path, None, config) as gateway:
        gate = gateway.service.gate
        dice = random.Random(5)
        plans = [(dice.randint(5, 120), dice.random() < 0.2) for _ in range(64)]

        async def agent(http: aiohttp.ClientSession, number: int, most: int, leaves: bool) -> int:
            headers = {"x-inferry-tenant": "acme", "x-inferry-run-id": f"sub-{number}"}
            headers["x-inferry-parent-run-id"] = "root"
            body = call(most, stream=True, ignore_eos=True) | {"model": "inferry-triage", "temperature": 1}
            async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
                if leaves and answer.status == 200:
                    await answer.content.readany()
                    return 200  # leaving the block closes the connection
                await answer.read()
                return answer.status

        async def fleet() -> list[int]:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                return await asyncio.gather(*(agent(http, n, *plan) for n, plan in enumerate(plans)))

        statuses = asyncio.run(fleet())

        async def until_over() -> Any:
            await async_until(lambda: not gateway.service.gateway.in_flight)
            return gate.run_report("acme", "root")

        spent = gateway.run(until_over())
    assert set(statuses) <= {200, 402}
    assert spent.leased_tokens == 0
    assert 0.8 * ceiling < spent.spent_tokens <= ceiling


def test_a_ceiling_that_comes_while_it_runs_counts_what_was_spent_before(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, keeps_its_limit, {}) as gateway:
        tenants = gateway.service.tenants

        async def ask(most: int) -> int:
            async with aiohttp.ClientSession() as http:
                headers = {"x-inferry-tenant": "late"}
                async with http.post(f"{gateway.url}/v1/chat/completions", json=call(most), headers=headers) as answer:
                    await answer.read()
                    return answer.status

        assert asyncio.run(ask(590)) == 200

        async def set_ceiling() -> None:
            limits = Limits(day_token_ceiling=600)
            await tenants.change(lambda book, _: book.put_tenant(Tenant(name="late", limits=limits)))

        async def until_refused() -> None:
            # The ledger is a moment behind.
            async with asyncio.timeout(120):
                while await asyncio.to_thread(lambda: asyncio.run(ask(1))) != 402:
                    await set_ceiling()
                    await asyncio.sleep(0.1)

        gateway.run(set_ceiling())
        gateway.run(until_refused())
        spent = gateway.service.gate.report("late")
    day = next(line for line in spent if line.kind == "day")
    assert day.spent_tokens >= 590
    assert day.leased_tokens == 0
