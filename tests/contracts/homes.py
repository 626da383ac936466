"""Every implementation of Worker that the laws are held against, each up and running on an event loop of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from contracts.wordy import CONTEXT as WORDY_CONTEXT
from contracts.wordy import words
from inferry.adapters.workers.embedded import EmbeddedWorker
from inferry.adapters.workers.openai_http import OpenAIHttpWorker
from inferry.adapters.workers.values import HttpWorkerSettings
from inferry.adapters.workers.vllm_inprocess import VllmEngine, VllmInProcessWorker
from inferry.domain.clock import SystemClock
from inferry.domain.ports import Worker
from inferry.engine.config import EngineConfig
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.assembler import Assembler
from support import upstream
from support.scripted_worker import ScriptedWorker
from support.vllm_server import BLOCKS, CONTEXT, ENVIRONMENT, VllmServer, engine_cores, vllm_venv

T = TypeVar("T")
Fresh = Callable[[], AbstractAsyncContextManager[Worker]]


class Home:
    """A worker that has started, and what a law must know about it.

    `context` is what its prompts must stay below; None where it looks at none. `speaks` are token ids after which it
    writes characters that take several tokens; empty where it has no such. `stops` says that it knows stop strings.
    `long` is how many tokens a job takes that is to be stopped: some are hundreds ahead of what is heard of them.
    `kill` makes an end of what computes; None where there is nothing that comes back by itself or is brought back.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        worker: Worker,
        fresh: Fresh,
        *,
        context: int | None = None,
        speaks: tuple[int, ...] = (),
        stops: bool = True,
        long: int = 200,
        kill: Callable[[], None] | None = None,
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self.worker = worker
        self.fresh = fresh
        self.context = context
        self.speaks = speaks
        self.stops = stops
        self.long = long
        self.kill = kill
        self.revive = revive

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 100) -> T:
        return self._runner.run(asyncio.wait_for(work, seconds))


@contextmanager
def at_home(fresh: Fresh, **more: Any) -> Iterator[Home]:
    with asyncio.Runner() as runner:
        living = fresh()
        worker = runner.run(living.__aenter__())
        try:
            runner.run(worker.start())
            yield Home(runner, worker, fresh, **more)
        finally:
            runner.run(living.__aexit__(None, None, None))


@contextmanager
def scripted(model_dir: Path, scratch: Path) -> Iterator[Home]:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[Worker]:
        worker = ScriptedWorker(words=[f" w{number}" for number in range(400)], continues=True)
        yield worker
        await worker.close()

    with at_home(fresh, stops=False) as home:
        yield home


@contextmanager
def over_http(model_dir: Path, scratch: Path) -> Iterator[Home]:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[Worker]:
        async with upstream.Upstream(words) as up:
            worker = OpenAIHttpWorker("http", HttpWorkerSettings(url=up.url), SystemClock())
            yield worker
            await worker.close()

    with at_home(fresh, context=WORDY_CONTEXT) as home:
        yield home


@contextmanager
def embedded(model_dir: Path, scratch: Path) -> Iterator[Home]:
    tokenizer = HfTokenizer(model_dir)

    @asynccontextmanager
    async def fresh() -> AsyncIterator[EmbeddedWorker]:
        worker = EmbeddedWorker(
            "embedded",
            model_dir=model_dir,
            models=["m"],
            make_assembler=lambda stop: Assembler(tokenizer, stop),
            engine=EngineConfig(kv_tokens=16_384, context_tokens=CONTEXT),
            restart_backoff_s=0.05,
        )
        yield worker
        await worker.close()

    with at_home(fresh, context=CONTEXT, speaks=_speaks(model_dir)) as home:
        home.kill = lambda: os.kill(_engine_pid(home), signal.SIGKILL)
        yield home


@contextmanager
def vllm_over_http(model_dir: Path, scratch: Path) -> Iterator[Home]:
    with VllmServer(model_dir, scratch / "vllm.log") as server:

        @asynccontextmanager
        async def fresh() -> AsyncIterator[Worker]:
            settings = HttpWorkerSettings(url=server.url, asks_for_priorities=True)
            worker = OpenAIHttpWorker("vllm", settings, SystemClock())
            yield worker
            await worker.close()

        with at_home(fresh, context=CONTEXT, speaks=_speaks(model_dir), long=900) as home:
            home.kill, home.revive = server.stop, server.start
            yield home


@contextmanager
def vllm_in_process(model_dir: Path, scratch: Path) -> Iterator[Home]:
    tokenizer = HfTokenizer(model_dir)
    os.environ.update(ENVIRONMENT)
    engine = VllmEngine(
        python=vllm_venv() / "bin" / "python",
        max_sequences=32,
        context_tokens=CONTEXT,
        arguments={"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": BLOCKS},
    )

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Worker]:
        worker = VllmInProcessWorker(
            "vllm-inprocess",
            model_dir=model_dir,
            models=["m"],
            engine=engine,
            make_assembler=lambda stop: Assembler(tokenizer, stop),
            restart_backoff_s=0.05,
        )
        yield worker
        await worker.close()

    with at_home(fresh, context=CONTEXT, speaks=_speaks(model_dir), long=900) as home:

        def kill() -> None:
            for pid in engine_cores(_engine_pid(home)):
                os.kill(pid, signal.SIGKILL)

        home.kill = kill
        yield home


def _engine_pid(home: Home) -> int:
    assert isinstance(home.worker, EmbeddedWorker | VllmInProcessWorker)
    assert home.worker.pid is not None
    return home.worker.pid


def _speaks(model_dir: Path) -> tuple[int, ...]:
    from support.contract_model import chain_ids

    return tuple(chain_ids(model_dir))
