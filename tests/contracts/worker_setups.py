"""Every implementation of Worker under the contract, each running on an event loop of its own."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from contracts.scripted_server import CONTEXT as WORDY_CONTEXT
from contracts.scripted_server import words
from contracts.worker_calls import a_call, a_text_call
from inferry.domain.clock import SystemClock
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Worker
from inferry.domain.routes import Task
from inferry.domain.streams import Done
from inferry.domain.workers import Capacity
from inferry.engine.config import EngineConfig
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.embedded import EmbeddedWorker, embedded_program
from inferry.workers.in_process.python_function import FunctionSettings, PythonFunctionWorker
from inferry.workers.in_process.vllm_inprocess import VllmEngine, VllmInProcessWorker
from inferry.workers.openai_http.profiles import LLAMACPP, TRANSFORMERS
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support import upstream
from support.other_engines import CONTEXT as OTHER_CONTEXT
from support.other_engines import LlamaCppServer, TransformersServer
from support.owner import RunningOwner, closing_link, running_owner
from support.ray_cluster import ray_cluster, until_gone
from support.scripted_worker import ScriptedWorker
from support.vllm_server import BLOCKS_PER_CEILING, CONTEXT, ENVIRONMENT, VllmServer, engine_cores, vllm_venv

T = TypeVar("T")
MakeWorker = Callable[[], AbstractAsyncContextManager[Worker]]


class WorkerSetup:
    """A worker that has started, and what a law must know about it.

    `context` is what its prompts must stay below; None where it looks at none. `encodes` are token ids after which it
    writes characters that take several tokens; empty where it has no such. `stops` says that it knows stop strings.
    `long` is how many tokens a job takes that is to be stopped: some are hundreds ahead of what is heard of them.
    `kill` makes an end of what computes; None where there is nothing that comes back by itself or is brought back.
    `limited`: its view has limits; jobs are passed on where it has none.
    `whole`: an answer is one delta without token ids, and no job can be resumed.
    `tokenizer`: of an engine that takes prompts as text and says no token ids; None where prompts are ids.
    `reports_usage`: the engine says how many tokens there were. `confirms`: and that it has freed a cancelled job.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        worker: Worker,
        make_worker: MakeWorker,
        *,
        context: int | None = None,
        encodes: tuple[int, ...] = (),
        stops: bool = True,
        long: int = 200,
        kill: Callable[[], None] | None = None,
        revive: Callable[[], None] = lambda: None,
        limited: bool = True,
        whole: bool = False,
        tokenizer: HfTokenizer | None = None,
        reports_usage: bool = True,
        confirms: bool = True,
    ) -> None:
        self._runner = runner
        self.worker = worker
        self.make_worker = make_worker
        self.context = context
        self.encodes = encodes
        self.stops = stops
        self.long = long
        self.kill = kill
        self.revive = revive
        self.limited = limited
        self.whole = whole
        self.ids = tokenizer is None and not whole
        self.reports_usage = reports_usage
        self.confirms = confirms
        self._tokenizer = tokenizer

    def call(self, job_id: str, **more: Any) -> InferenceJob:
        return a_call(job_id, **more) if self._tokenizer is None else a_text_call(self._tokenizer, job_id, **more)

    def wrote(self, done: Done, tokens: int) -> bool:
        """Whether the job has that many tokens. Without usage they are counted by events, which may join some."""
        counted = done.usage.output_tokens
        return counted == tokens if self.reports_usage else 1 <= counted <= tokens

    def prompt_tokens(self, prompt: tuple[int, ...]) -> int:
        """What the engine counts for a prompt of these ids."""
        tokenizer = self._tokenizer
        return len(prompt) if tokenizer is None else len(tokenizer.encode(tokenizer.decode(list(prompt))))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._runner.get_loop()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 100) -> T:
        return self._runner.run(asyncio.wait_for(work, seconds))


@contextmanager
def running_worker(make_worker: MakeWorker, **more: Any) -> Iterator[WorkerSetup]:
    with asyncio.Runner() as runner:
        running = make_worker()
        worker = runner.run(running.__aenter__())
        try:
            runner.run(worker.start())
            yield WorkerSetup(runner, worker, make_worker, **more)
        finally:
            runner.run(running.__aexit__(None, None, None))


@contextmanager
def scripted(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        worker = ScriptedWorker(words=[f" w{number}" for number in range(400)], can_resume=True)
        yield worker
        await worker.close()

    with running_worker(make_worker, stops=False) as setup:
        yield setup


@contextmanager
def over_http(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        async with upstream.Upstream(words) as up:
            worker = OpenAIHttpWorker("http", HttpWorkerSettings(url=up.url), SystemClock())
            yield worker
            await worker.close()

    with running_worker(make_worker, context=WORDY_CONTEXT) as setup:
        yield setup


@contextmanager
def remote(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    """An ingress process before an owner with a scripted worker."""

    def make_workers() -> ScriptedWorker:
        return ScriptedWorker(
            words=[f" w{number}" for number in range(400)], can_resume=True, capacity=Capacity(sequences=64)
        )

    with _passed_on(make_workers, scratch, stops=False) as setup:
        yield setup


@contextmanager
def remote_over_http(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    """An ingress process before an owner whose engine sends events."""
    up = upstream.Upstream(words)

    def make_workers() -> OpenAIHttpWorker:
        return OpenAIHttpWorker("http", HttpWorkerSettings(url=up.url), SystemClock())

    with _passed_on(make_workers, scratch, up, context=WORDY_CONTEXT) as setup:
        yield setup


@contextmanager
def _passed_on(
    make_owned: Callable[[], Worker], scratch: Path, engine: Any = None, **more: Any
) -> Iterator[WorkerSetup]:
    owners: list[RunningOwner] = []
    paths = (scratch / f"{number}.sock" for number in itertools.count())

    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        path = next(paths)
        async with AsyncExitStack() as stack:
            if engine is not None and not owners:
                await stack.enter_async_context(engine)
            owner = await stack.enter_async_context(running_owner([make_owned()], path))
            owners.append(owner)
            yield await stack.enter_async_context(closing_link(path))

    with running_worker(make_worker, limited=False, **more) as setup:
        setup.kill = lambda: asyncio.run_coroutine_threadsafe(owners[0].stop(), setup.loop).result()
        setup.revive = lambda: asyncio.run_coroutine_threadsafe(owners[0].listen(), setup.loop).result()
        yield setup


@contextmanager
def embedded(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    tokenizer = HfTokenizer(model_dir)

    @asynccontextmanager
    async def make_worker() -> AsyncIterator[EmbeddedWorker]:
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

    with running_worker(make_worker, context=CONTEXT, encodes=_speaks(model_dir)) as setup:
        setup.kill = lambda: os.kill(_engine_pid(setup), signal.SIGKILL)
        yield setup


FUNCTION = '''
import time

def write(prompts):
    """As many words as the prompt has tokens; slow where it has many."""
    if any(len(prompt) > 50 for prompt in prompts):
        time.sleep(1)
    return [" ".join("word" for _ in prompt) for prompt in prompts]
'''


@contextmanager
def python_function(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    (scratch / "contract_function.py").write_text(FUNCTION)
    settings = FunctionSettings(
        function="contract_function:write", directory=scratch, model="m", task=Task.GENERATE, max_batch=8
    )

    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        worker = PythonFunctionWorker("python", settings, restart_backoff_s=0.05)
        yield worker
        await worker.close()

    with running_worker(make_worker, whole=True) as setup:
        setup.kill = lambda: os.kill(_engine_pid(setup), signal.SIGKILL)
        yield setup


@contextmanager
def on_ray(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    """An engine in an actor, without Ray Serve: the contract is that of the link."""
    import ray

    from inferry.workers.ray.engine_host import EngineHost
    from inferry.workers.ray.link import NAMESPACE, RayLink

    tokenizer = HfTokenizer(model_dir)
    engine = EngineConfig(kv_tokens=16_384, context_tokens=CONTEXT)
    hosts: list[Any] = []
    names = (f"contract-{number}" for number in count())

    def start_host(name: str) -> None:
        until_gone(name)
        host = ray.remote(EngineHost).options(name=name, namespace=NAMESPACE, num_cpus=0)
        # Between two tests no loop runs that could send a heartbeat.
        hosts.append(host.remote(partial(embedded_program, model_dir, engine), silence_s=600.0))
        hosts[-1].run.options(num_returns=0).remote()

    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        name = next(names)
        start_host(name)
        worker = EmbeddedWorker(
            name,
            model_dir=model_dir,
            models=["m"],
            make_assembler=lambda stop: Assembler(tokenizer, stop),
            engine=engine,
            restart_backoff_s=0.05,
            restart_backoff_max_s=0.2,
            open_link=partial(RayLink.open, name),
        )
        yield worker
        await worker.close()

    with ray_cluster(), running_worker(make_worker, context=CONTEXT, encodes=_speaks(model_dir)) as setup:
        setup.kill, setup.revive = lambda: ray.kill(hosts[0]), lambda: start_host("contract-0")
        yield setup


@contextmanager
def vllm_over_http(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    with VllmServer(model_dir, scratch / "vllm.log") as server:

        @asynccontextmanager
        async def make_worker() -> AsyncIterator[Worker]:
            settings = HttpWorkerSettings(url=server.url, wants_priorities=True)
            worker = OpenAIHttpWorker("vllm", settings, SystemClock())
            yield worker
            await worker.close()

        with running_worker(make_worker, context=CONTEXT, encodes=_speaks(model_dir), long=900) as setup:
            setup.kill, setup.revive = server.stop, server.start
            yield setup


@contextmanager
def transformers_over_http(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    server = TransformersServer(scratch)
    settings = HttpWorkerSettings(url=server.url, profile=TRANSFORMERS, models=("m",))
    # It writes a stop string before it stops, and knows no end of its context.
    with _text_engine(server, settings, stops=False, confirms=False) as setup:
        yield setup


@contextmanager
def llamacpp_over_http(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    server = LlamaCppServer(scratch, "--interrupt_requests", "false")
    settings = HttpWorkerSettings(url=server.url, profile=LLAMACPP, context_tokens=OTHER_CONTEXT)
    with _text_engine(server, settings, context=OTHER_CONTEXT, confirms=False, reports_usage=False) as setup:
        yield setup


@contextmanager
def _text_engine(
    server: TransformersServer | LlamaCppServer, settings: HttpWorkerSettings, **more: Any
) -> Iterator[WorkerSetup]:
    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
        worker = OpenAIHttpWorker("engine", settings, SystemClock())
        yield worker
        await worker.close()

    tokenizer, encodes = HfTokenizer(server.model_dir), _speaks(server.model_dir)
    with server, running_worker(make_worker, encodes=encodes, tokenizer=tokenizer, long=600, **more) as setup:
        setup.kill, setup.revive = server.stop, server.start
        yield setup


@contextmanager
def vllm_in_process(model_dir: Path, scratch: Path) -> Iterator[WorkerSetup]:
    tokenizer = HfTokenizer(model_dir)
    os.environ.update(ENVIRONMENT)
    engine = VllmEngine(
        python=vllm_venv() / "bin" / "python",
        max_sequences=32,
        context_tokens=CONTEXT,
        arguments={"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": BLOCKS_PER_CEILING},
    )

    @asynccontextmanager
    async def make_worker() -> AsyncIterator[Worker]:
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

    with running_worker(make_worker, context=CONTEXT, encodes=_speaks(model_dir), long=900) as setup:

        def kill() -> None:
            for pid in engine_cores(_engine_pid(setup)):
                os.kill(pid, signal.SIGKILL)

        setup.kill = kill
        yield setup


def _engine_pid(setup: WorkerSetup) -> int:
    assert isinstance(setup.worker, EmbeddedWorker | VllmInProcessWorker | PythonFunctionWorker)
    assert setup.worker.pid is not None
    return setup.worker.pid


def _speaks(model_dir: Path) -> tuple[int, ...]:
    from support.contract_model import chain_ids

    return tuple(chain_ids(model_dir))
