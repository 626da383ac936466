"""The modes of the embedded engine behind the gateway: from the configuration to several clients."""

import asyncio
import http.client
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from support.tenant_gateway import Answer, TenantGateway

PATH = "/v1/completions"
MINUTES_MS = 600_000
PROMPTS = [[11] * 5, [12, 13] * 9, [14] * 2]
STATIC_LANE = {"window": "fixed", "coalesce_ms": MINUTES_MS, "max_wait_ms": MINUTES_MS, "max_batch": len(PROMPTS)}


def a_gateway(directory: Path, model: Path, mode: str, lane: dict[str, Any]) -> TenantGateway:
    worker = {"kind": "embedded", "name": "local", "model": str(model), "models": ["tiny"], "mode": mode, "threads": 1}
    return TenantGateway(directory, None, {"auth": {"mode": "off"}, "workers": [worker], "lanes": {"P1": lane}})


def a_body(prompt: list[int], tokens: int = 6) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def ask(gateway: TenantGateway, prompt: list[int]) -> Answer:
    return await asyncio.to_thread(gateway.call, "POST", PATH, a_body(prompt))


async def until_queued(gateway: TenantGateway, jobs: int) -> None:
    async with asyncio.timeout(120):
        while await asyncio.to_thread(gateway.metric, "inferry_queue_depth") != jobs:
            await asyncio.sleep(0.01)


def step_tokens(gateway: TenantGateway, computed: int) -> dict[str, float]:
    """Tokens of all steps by kind, once the view of the worker includes all these prompt and output tokens."""
    for _ in range(6_000):
        lines = gateway.call("GET", "/metrics").body.decode().splitlines()
        found = [line for line in lines if line.startswith("inferry_worker_step_tokens_total{")]
        tokens = {line.split('kind="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in found}
        if tokens.get("prompt", 0) + tokens.get("decode", 0) >= computed:
            return tokens
        time.sleep(0.02)
    raise TimeoutError("the steps are not in the metrics")


@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic", "static"])
def test_clients_share_a_batch_and_get_the_same_answers_in_every_mode(
    tmp_path: Path, tiny_model: Path, mode: str
) -> None:
    with a_gateway(tmp_path, tiny_model, mode, STATIC_LANE) as gateway:

        async def clients() -> list[Answer]:
            first = [asyncio.create_task(ask(gateway, prompt)) for prompt in PROMPTS[:2]]
            await until_queued(gateway, 2)  # the window holds them for a third
            assert gateway.service.gateway.views()[0].load.running == 0
            return await asyncio.gather(*first, ask(gateway, PROMPTS[2]))

        answers = asyncio.run(clients())
        assert [answer.status for answer in answers] == [200] * 3
        assert {answer.headers["x-inferry-batch-size"] for answer in answers} == {"3"}
        # The gateway sent one token of its own to see whether the worker answers.
        expected = sum(map(len, PROMPTS)) + 3 * 5 + 1
        computed = step_tokens(gateway, expected)
        assert computed["prompt"] + computed["decode"] == expected
        if mode in ("static", "dynamic"):
            longest = max(map(len, PROMPTS))
            assert computed["prompt_padding"] == sum(longest - len(prompt) for prompt in PROMPTS)
            assert gateway.metric("inferry_padding_tokens_total") == computed["prompt_padding"]
        else:
            assert computed["prompt_padding"] == computed["decode_padding"] == 0
        alone = [alone_text(tiny_model, prompt) for prompt in PROMPTS]
        assert [answer.json["choices"][0]["text"] for answer in answers] == alone
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        assert [size for (size,) in ledger.execute("SELECT batch_size FROM attempts")] == [3] * 3


def test_prompts_of_a_bucket_share_a_static_pass_and_are_padded_to_its_longest(
    tmp_path: Path, tiny_model: Path
) -> None:
    lane = STATIC_LANE | {"max_batch": 2, "prompt_buckets": [8]}
    prompts = [[11] * 5, [12] * 18, [13] * 2, [14] * 12]
    with a_gateway(tmp_path, tiny_model, "static", lane) as gateway:

        async def clients() -> list[Answer]:
            first = []
            for number, prompt in enumerate(prompts[:2]):
                first.append(asyncio.create_task(ask(gateway, prompt)))
                await until_queued(gateway, number + 1)
            return await asyncio.gather(*first, *(ask(gateway, prompt) for prompt in prompts[2:]))

        answers = asyncio.run(clients())
        assert [(answer.status, answer.headers["x-inferry-batch-size"]) for answer in answers] == [(200, "2")] * 4
        # Output tokens after the first of each call, and one token of the gateway's own.
        computed = step_tokens(gateway, sum(map(len, prompts)) + 4 * 5 + 1)
        assert computed["prompt_padding"] == (5 - 2) + (18 - 12)
        assert computed["decode_padding"] == 0


def test_calls_wait_for_the_end_of_a_static_pass_and_then_share_the_next(tmp_path: Path, tiny_model: Path) -> None:
    lane = {"window": "adaptive", "coalesce_ms": MINUTES_MS, "max_wait_ms": MINUTES_MS}
    with a_gateway(tmp_path, tiny_model, "static", lane) as gateway:

        async def clients() -> list[Answer]:
            running = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)
            body = json.dumps(a_body(PROMPTS[0], 1_500) | {"stream": True})
            running.request("POST", PATH, body)
            running.getresponse().read(1)
            waiting = [asyncio.create_task(ask(gateway, prompt)) for prompt in PROMPTS]
            await until_queued(gateway, 3)
            running.close()  # its client leaves, so its pass ends
            return await asyncio.gather(*waiting)

        answers = asyncio.run(clients())
        assert [(answer.status, answer.headers["x-inferry-batch-size"]) for answer in answers] == [(200, "3")] * 3


def alone_text(model: Path, prompt: list[int]) -> str:
    from inferry.engine.messages import Request
    from inferry.engine.tokenizer import HfTokenizer
    from inferry.streams.detokenizer import Assembler
    from support.engine_fixtures import generate_alone, greedy

    (tokens,) = generate_alone(model, [Request(1, prompt, greedy(6), 1)]).values()
    assembler = Assembler(HfTokenizer(model), ())
    return assembler.push(tuple(tokens))[0] + assembler.finish()
