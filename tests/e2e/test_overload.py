"""More callers than a small queue holds: stock clients recover, and every refusal has a correct retry time."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from inferry.domain.workers import Capacity
from support.scripted_gateway import ScriptedGateway
from support.serving import get, post
from support.waiting import async_until

RETRIES = 20
"""Of clients, whose own default is two: one that the machine lets run too late misses its slot and retries again."""
CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@contextlib.contextmanager
def a_slow_gateway(directory: Path, queue_limit: int = 20, **config: Any) -> Iterator[ScriptedGateway]:
    """Its worker does one call at a time, and each takes some tens of milliseconds."""
    lanes = {lane: {"queue_limit": queue_limit} for lane in ("P0", "P1", "P2")}
    with ScriptedGateway(
        directory, {"lanes": lanes, **config}, capacity=Capacity(sequences=1), pause_s=0.02
    ) as gateway:
        yield gateway


def errors_counted(gateway: ScriptedGateway, code: str) -> int:
    page = get(gateway.url, "/metrics")[2]
    lines = [line for line in page.splitlines() if line.startswith(f'inferry_errors_total{{code="{code}"}}')]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


async def gathered(answers: list[Any]) -> list[Any]:
    return await asyncio.gather(*answers)


@contextlib.contextmanager
def held_back_until(gateway: ScriptedGateway, code: str) -> Iterator[None]:
    """No answer goes on before a call was refused for this reason: however slowly calls come, they are too many."""

    async def close_gate() -> None:
        gateway.worker.gate.clear()

    def until_refused() -> None:
        while not errors_counted(gateway, code) and not over.wait(0.005):
            pass
        gateway.run(open_gate(gateway))

    gateway.run(close_gate())
    over = threading.Event()
    opening = threading.Thread(target=until_refused)
    opening.start()
    try:
        yield
    finally:
        over.set()
        opening.join()


def test_stock_openai_clients_recover_by_themselves(tmp_path: Path) -> None:
    async def ask(api: AsyncOpenAI, number: int) -> int:
        raw = await api.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": f"ticket {number}"}], max_tokens=8
        )
        assert raw.parse().choices[0].message.content
        return raw.retries_taken

    async def scenario() -> list[int]:
        async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=RETRIES) as api:
            await ask(api, -1)
            with held_back_until(gateway, "queue_full"):
                return await gathered([ask(api, number) for number in range(40)])

    with a_slow_gateway(tmp_path) as gateway:
        retries = asyncio.run(scenario())
        assert errors_counted(gateway, "queue_full") >= 1
    assert max(retries) >= 1
    assert len(retries) == 40


def test_stock_anthropic_clients_recover_by_themselves(tmp_path: Path) -> None:
    import anthropic  # a second, which every process that collects tests would take

    async def ask(api: anthropic.AsyncAnthropic, number: int) -> None:
        answer = await api.messages.create(
            model="m", messages=[{"role": "user", "content": f"ticket {number}"}], max_tokens=8
        )
        assert answer.content

    async def scenario() -> None:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="unused", max_retries=RETRIES) as api:
            await ask(api, -1)
            with held_back_until(gateway, "queue_full"):
                await gathered([ask(api, number) for number in range(40)])

    with a_slow_gateway(tmp_path) as gateway:
        asyncio.run(scenario())
        assert errors_counted(gateway, "queue_full") >= 1


def test_a_refusal_names_its_limit_and_retry_after(tmp_path: Path) -> None:
    with a_slow_gateway(tmp_path, queue_limit=1) as gateway:
        gateway.worker.gate.clear()
        with ThreadPoolExecutor(2) as threads:
            inside = []
            for depth in (0, 1):
                inside.append(threads.submit(post, gateway.url, "/v1/chat/completions", CALL | {"seed": depth}))
                until(gateway, in_flight=depth + 1)
            status, headers, body = post(gateway.url, "/v1/chat/completions", CALL)
            gateway.run(open_gate(gateway))
            assert [one.result()[0] for one in inside] == [200, 200]
    assert status == 429
    assert body["error"]["code"] == "queue_full"
    assert "P1" in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1
    assert headers["x-inferry-drop-reason"] == "queue_full"
    assert headers["x-should-retry"] == "true"


def test_prompts_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    with a_slow_gateway(tmp_path, queue_limit=100, server={"max_queued_bytes": 20_000}) as gateway:
        gateway.worker.gate.clear()
        large = CALL | {"messages": [{"role": "user", "content": "word " * 3_000}]}
        with ThreadPoolExecutor(2) as threads:
            inside = []
            for depth in (0, 1):
                inside.append(threads.submit(post, gateway.url, "/v1/chat/completions", large | {"seed": depth}))
                until(gateway, in_flight=depth + 1)
            status, headers, body = post(gateway.url, "/v1/chat/completions", large)
            gateway.run(open_gate(gateway))
            assert [one.result()[0] for one in inside] == [200, 200]
    assert status == 429
    assert body["error"]["code"] == "queue_full"
    assert "bytes" in body["error"]["message"]
    assert "retry-after" in headers


def test_a_call_that_cannot_make_its_deadline_is_refused_before_it_waits(tmp_path: Path) -> None:
    """Behind a queue that drains slowly, and with the clients' own retries on: it is not sent again."""
    with a_slow_gateway(tmp_path, queue_limit=1000) as gateway, contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(60))
        calls = [
            threads.submit(post, gateway.url, "/v1/chat/completions", CALL | {"seed": number}) for number in range(60)
        ]
        api = stack.enter_context(openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused"))
        refused: openai.APIStatusError | None = None
        while refused is None and not all(call.done() for call in calls):
            try:
                api.chat.completions.create(**CALL, seed=10**6, extra_headers={"x-inferry-deadline-ms": "5"})
            except openai.APIStatusError as error:
                if error.code == "deadline_infeasible":
                    refused = error
        assert [call.result()[0] for call in calls] == [200] * 60
        assert refused is not None
        assert refused.status_code == 408
        assert refused.response.headers["x-inferry-drop-reason"] == "deadline_infeasible"
        assert int(refused.response.headers["x-inferry-predicted-wait-ms"]) > 5
        assert refused.response.headers["x-should-retry"] == "false"


def test_no_admitted_call_is_lost(tmp_path: Path) -> None:
    """Every answer has a row in the ledger, every row an answer, and a refusal has neither."""
    with (
        a_slow_gateway(tmp_path) as gateway,
        ThreadPoolExecutor(32) as threads,
        held_back_until(gateway, "queue_full"),
    ):
        calls = [
            threads.submit(post, gateway.url, "/v1/chat/completions", CALL | {"seed": number}) for number in range(64)
        ]
        statuses = [call.result()[0] for call in calls]
    assert set(statuses) == {200, 429}
    from inferry.ledger.stores.opening import open_queries

    with contextlib.closing(open_queries(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
        rows = list(ledger.jobs(limit=1000))
    assert len(rows) == statuses.count(200)
    assert all(row.error_code is None for row in rows)


def until(gateway: ScriptedGateway, *, in_flight: int) -> None:
    gateway.run(async_until(lambda: gateway.service.gateway.in_flight >= in_flight))


async def open_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.set()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_clients_over_their_concurrency_limit_retry_in_turn_and_are_all_served(tmp_path: Path) -> None:
    async def ask(api: AsyncOpenAI, number: int) -> None:
        answer = await api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"ticket {number}"}], max_tokens=8
        )
        assert answer.choices[0].message.content

    async def scenario() -> None:
        headers = {"x-inferry-tenant": "acme"}
        async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused", default_headers=headers) as api:
            await gathered([ask(api, -1), ask(api, -2)])
            with held_back_until(gateway, "tenant_concurrency"):
                await gathered([ask(api, number) for number in range(8)])

    tenants = {"acme": {"max_concurrent": 2}}
    with ScriptedGateway(tmp_path, {"tenants": tenants}, pause_s=0.05) as gateway:
        asyncio.run(scenario())
        assert errors_counted(gateway, "tenant_concurrency") >= 1
