"""Which tokenizers a process uses that does not own the workers, and jobs that the owner tokenizes for it."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from inferry.cli.ingress_tokenizers import IngressTokenizers
from inferry.domain.ports import Tokenizer
from inferry.domain.streams import Done, Item
from support.builders import a_job
from support.http_jobs import a_plan
from support.owner import remote_worker, running_owner
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}'


class Named:
    """Tokenizes once it may."""

    longest_token_bytes = 8

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.began = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        self.began.set()
        assert self.may_end.wait(120)
        return [7, 8, 9]

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError


class Configuration:
    """Tokenizers by model, as a file has them now."""

    def __init__(self, **fingerprints: str) -> None:
        self.fingerprints = fingerprints
        self.reads = 0

    def read(self) -> dict[str, Tokenizer]:
        self.reads += 1
        return {model: Named(one) for model, one in self.fingerprints.items()}


def used(in_use: dict[str, Tokenizer]) -> dict[str, str]:
    return {model: one.fingerprint for model, one in in_use.items()}


def prompts(engine: ScriptedWorker) -> list[tuple[int, ...] | None]:
    """Token ids of the jobs that the engine has run, probes aside."""
    return [job.payload.prompt_ids for plan in engine.plans for job in plan.jobs if plan.plan_id]


def test_an_adapter_has_the_tokenizer_that_the_owner_names_and_nothing_is_read() -> None:
    async def scenario() -> None:
        file, in_use = Configuration(base="a"), dict[str, Tokenizer]()
        tokenizers = IngressTokenizers(in_use, file.read)
        tokenizers.use({"base": "a"})
        await async_until(lambda: used(in_use) == {"base": "a"})
        tokenizers.use({"base": "a", "adapter": "a"})
        assert used(in_use) == {"base": "a", "adapter": "a"}
        tokenizers.use({"base": "a"})
        assert used(in_use) == {"base": "a"}
        assert file.reads == 1
        await tokenizers.close()

    asyncio.run(scenario())


def test_a_tokenizer_that_the_owner_has_replaced_is_not_used() -> None:
    async def scenario() -> None:
        file, in_use = Configuration(m="old"), dict[str, Tokenizer]()
        tokenizers = IngressTokenizers(in_use, file.read)
        tokenizers.use({"m": "old"})
        await async_until(lambda: used(in_use) == {"m": "old"})
        file.fingerprints = {"m": "new"}
        tokenizers.use({"m": "new"})
        assert used(in_use) == {}
        await async_until(lambda: used(in_use) == {"m": "new"})
        await tokenizers.close()

    asyncio.run(scenario())


def test_what_the_configuration_lacks_is_left_to_the_owner() -> None:
    async def scenario() -> None:
        file, in_use = Configuration(m="mine"), dict[str, Tokenizer]()
        tokenizers = IngressTokenizers(in_use, file.read)
        tokenizers.use({"m": "mine", "other": "elsewhere"})
        await async_until(lambda: used(in_use) == {"m": "mine"})
        tokenizers.use({"m": "elsewhere"})
        await async_until(lambda: file.reads == 2)
        assert used(in_use) == {}
        await tokenizers.close()

    asyncio.run(scenario())


def test_the_owner_tokenizes_a_job_without_ids(tmp_path: Path) -> None:
    async def scenario() -> None:
        tokenizer, engine = Named("a"), ScriptedWorker()
        tokenizer.may_end.set()
        async with (
            running_owner([engine], tmp_path / "o", tokenizers={"m": tokenizer}),
            remote_worker(tmp_path / "o") as worker,
        ):
            items: list[Item] = []
            await worker.run(a_plan(a_job(body=BODY, output=3)), items.append)
            assert isinstance(items[-1], Done)
            assert prompts(engine) == [(7, 8, 9)]

    asyncio.run(scenario())


def test_a_job_that_is_cancelled_while_it_is_tokenized_does_not_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        tokenizer, engine = Named("a"), ScriptedWorker()
        async with (
            running_owner([engine], tmp_path / "o", tokenizers={"m": tokenizer}) as owner,
            remote_worker(tmp_path / "o") as worker,
        ):
            plan = a_plan(a_job(body=BODY, output=3))
            running = asyncio.create_task(worker.run(plan, lambda _: None))
            await asyncio.to_thread(tokenizer.began.wait, 120)
            assert await worker.cancel([plan.jobs[0].job_id]) == {plan.jobs[0].job_id}
            running.cancel()
            tokenizer.may_end.set()
            await asyncio.gather(running, return_exceptions=True)
            assert prompts(engine) == []
            assert owner.gateway.in_flight == 0

    asyncio.run(scenario())
