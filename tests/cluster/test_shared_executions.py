"""Calls that two gateways receive, one of which owns the workers, share an execution at the owner."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from inferry.domain.jobs import ResumeMode
from inferry.domain.ledger import LedgerEntry
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.ledger.stores.opening import open_queries
from support.builders import a_job
from support.gateway_members import WORDS, Member, members, ready
from support.loop_helpers import read
from support.waiting import LIMIT_S, async_until

PATH = "/v1/chat/completions"
CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
TEXT = "".join(WORDS[:10])
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1}
KEY = {"idempotency-key": "only-once"}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


def text_of(answered: tuple[int, Any]) -> str:
    status, body = answered
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def rows_of(directory: Path, *names: str) -> list[LedgerEntry]:
    """The rows of these gateways, one for each name, once all are written."""

    def read() -> list[LedgerEntry]:
        found = []
        for name in sorted(set(names)):
            with open_queries(f"sqlite:///{directory / name}.db") as queries:
                found += queries.jobs(limit=100)
        return found

    await async_until(lambda: len(read()) == len(names))
    return read()


async def until_shared(owner: Member, kind: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while f'inferry_shared_jobs_total{{kind="{kind}"}} 1.0' not in (await owner.get("/metrics"))[1]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("sampling", "headers", "kind"), [(GREEDY, {}, "identical"), (SAMPLED, KEY, "joined")])
@pytest.mark.parametrize("owner_first", [True, False])
def test_calls_of_two_gateways_share_one_execution_and_one_of_them_pays(
    tmp_path: Path, sampling: dict[str, Any], headers: dict[str, str], kind: str, owner_first: bool
) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            a.gate.clear()
            calls = []
            for gateway in (a, b) if owner_first else (b, a):
                calls.append(asyncio.create_task(gateway.post(PATH, CALL | sampling, headers)))
                await async_until(lambda: a.workers[0].running == 1)
            await until_shared(a, kind)
            a.gate.set()
            assert [text_of(await call) for call in calls] == [TEXT] * 2
            assert len(a.workers[0].plans) == 1
            first, second = sorted(await rows_of(tmp_path, "a", "b"), key=lambda row: row.shared_with or "")
            assert (first.output_tokens, first.shared_with) == (10, None)
            assert (second.prompt_tokens, second.output_tokens, second.gpu_seconds) == (0, 0, 0.0)
            assert second.shared_with == first.job_id

    run(scenario())


@pytest.mark.parametrize("owner_first", [True, False])
def test_an_idempotency_key_repeated_through_another_gateway_runs_nothing_again(
    tmp_path: Path, owner_first: bool
) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            headers = KEY | {"x-inferry-replay": "allow"}
            for gateway in (a, b) if owner_first else (b, a):
                assert text_of(await gateway.post(PATH, CALL | SAMPLED, headers)) == TEXT
            assert len(a.workers[0].plans) == 1
            rows = await rows_of(tmp_path, "a", "b")
            assert sum(row.output_tokens for row in rows) == 10

    run(scenario())


class OpenFor(asyncio.Event):
    """Lets this many words pass before it is set."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self._left = words

    async def wait(self) -> Literal[True]:
        if self._left:
            self._left -= 1
            return True
        return await super().wait()


def test_equal_streams_that_resume_at_the_next_owner_lose_and_repeat_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with members(tmp_path) as (a, b):
            await a.roles.become_owner(1)
            await b.roles.become_ingress(a.address(1))
            await ready(a, b)
            c = Member(tmp_path, "c")
            await c.start()
            c.gate.clear()
            a.workers[0].gate = OpenFor(5)
            streams = []
            for one in (a, b):
                now, sampling = one.service.gateway.now(), Sampling(temperature=0.0, max_tokens=len(WORDS))
                job = a_job(at=now, output=len(WORDS), prompt_ids=(1, 2, 3), sampling=sampling)
                job = replace(job, stream=True, resume=ResumeMode.CONTINUE)
                streams.append(one.service.gateway.submit(job))
            await async_until(lambda: [one.attempt.output_tokens for one in streams] == [5, 5])
            assert len(a.workers[0].plans) == 1
            await c.roles.become_owner(2)
            for number, one in enumerate((a, b), start=1):
                await one.roles.become_ingress(c.address(2))
                await async_until(lambda number=number: c.workers[0].running == number, 30.0)  # type: ignore[misc]
            c.gate.set()
            for stream in streams:
                deltas, end = await read(stream)
                assert isinstance(end, Done), end
                assert "".join(delta.text for delta in deltas) == "".join(WORDS)
            await c.close()

    run(scenario())
