"""vLLM's own process: `AsyncLLM` at the other end of a socket pair, run by the Python of vLLM's virtual environment.

It speaks `engine.messages` like the embedded engine, so that the gateway's side is the same for both. One event loop
owns everything; there is a task for every request and one that reads the socket. It ends when told to, when the other
end is gone, however that died, or when vLLM's engine core is. Nothing of the gateway's own environment is on its path:
of Inferry it sees the modules that need only msgspec, of everything else vLLM's versions.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    Add,
    End,
    Fatal,
    Frames,
    Heartbeat,
    Ready,
    Rejected,
    Request,
    Shutdown,
    Stats,
    StepDone,
    decode_to_engine,
    frame,
)

logger = logging.getLogger(__name__)

BOOTSTRAP = """
import sys, types
package = types.ModuleType("inferry")
package.__path__ = [sys.argv[1]]
sys.modules["inferry"] = package
from inferry.workers.in_process.vllm_process import main
main(int(sys.argv[2]))
"""
"""For `python -c`, with the package's directory and the socket's number: the modules of Inferry can be imported, and
nothing that happens to be installed beside them.
"""

_IDLE_CHECK_S = 0.25
_ABORT_RETRY_S = 0.01


def prompt_of(request: Request) -> dict[str, Any]:
    """A prompt as vLLM takes it: the salt goes into the hash of its first block, and so into all that follow."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt


class VllmSetup(Struct, frozen=True):
    """The first message to the process: `arguments` are those of vLLM's `AsyncEngineArgs`, by name."""

    arguments: dict[str, Any]


class StepMeter:
    """What steps cost, shared out to those whose tokens they computed.

    A step's time falls on its prompt tokens and its new tokens alike, by count. New tokens are charged to their
    requests as they come. vLLM does not say whose prompt tokens a step computed: they are charged when a request's
    first token comes, at the average price of the prompt tokens that were computed and not charged yet. So what is
    charged is never more than the steps took; prompts that were given up before their first token are charged nothing.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_tokens = 0
        self.step_seconds = 0.0
        self._prompt = _TokenCosts()
        self._new = _TokenCosts()

    def step(self, prompt_tokens: int, new_tokens: int, seconds: float) -> None:
        self.steps += 1
        tokens = prompt_tokens + new_tokens
        self.step_tokens, self.step_seconds = tokens, seconds
        if tokens:
            self._prompt.put(prompt_tokens, seconds * prompt_tokens / tokens)
            self._new.put(new_tokens, seconds * new_tokens / tokens)

    def charge_prompt(self, tokens: int) -> float:
        return self._prompt.take(tokens)

    def charge_new(self, tokens: int) -> float:
        return self._new.take(tokens)

    def idle(self) -> None:
        """Nobody is left to be charged."""
        self._prompt, self._new = _TokenCosts(), _TokenCosts()


class _TokenCosts:
    """Tokens that were computed, and the seconds they took, until they are charged to somebody."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def put(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds

    def take(self, tokens: int) -> float:
        tokens = min(tokens, self._tokens)
        if not tokens:
            return 0.0
        seconds = self._seconds * tokens / self._tokens
        self._tokens -= tokens
        self._seconds -= seconds
        return seconds


class _Live:
    """A request that vLLM has, and what it has used."""

    __slots__ = ("cached", "key", "output_tokens", "prompt_tokens", "seconds", "task")

    def __init__(self, key: int, prompt_tokens: int) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.cached = 0
        self.output_tokens = 0
        self.seconds = 0.0
        self.task: asyncio.Task[None] | None = None

    def account(self) -> Account:
        return Account(self.key, self.prompt_tokens, self.output_tokens, self.seconds, self.cached)


class VllmServer:
    """Requests in, tokens out. What comes of one step goes out as one message."""

    def __init__(self, engine: Any, transport: asyncio.WriteTransport, meter: StepMeter, limits: "_Limits") -> None:
        self._engine = engine
        self._transport = transport
        self._meter = meter
        self._limits = limits
        self._live: dict[int, _Live] = {}
        self._aborting: set[int] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._tokens: list[tuple[int, int]] = []
        self._ends: list[End] = []
        self._stats = Stats(0, 0, 0, 0, limits.blocks)
        self._preemptions = 0
        self._flush_scheduled = False
        self.finished: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def handle(self, message: object) -> None:
        match message:
            case Add(requests):
                for request in requests:
                    self._add(request)
            case Abort(call, keys):
                task = asyncio.get_running_loop().create_task(self._abort(call, keys))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            case Shutdown():
                self.end(None)

    def end(self, reason: str | None) -> None:
        """No more of this; None where somebody asked for it."""
        if not self.finished.done():
            self.finished.set_result(reason)

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's own word after each step."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        details = scheduler_stats.iteration_details
        if details is not None:
            self._meter.step(details.num_ctx_tokens, details.num_generation_tokens, details.elapsed_ms / 1000)
        held = round(scheduler_stats.kv_cache_usage * self._limits.blocks)
        self._stats = Stats(
            steps=self._meter.steps,
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_tokens=held * self._limits.block_tokens,
            free_blocks=self._limits.blocks - held,
            preemptions=self._preemptions,
            step_tokens=self._meter.step_tokens,
            step_seconds=self._meter.step_seconds,
        )
        self._schedule_flush()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        rejection = self._limits.rejection(request)
        if rejection is not None:
            self._send(rejection)
            return
        live = _Live(request.key, len(request.prompt_ids))
        self._live[request.key] = live
        live.task = asyncio.get_running_loop().create_task(self._generate(live, request))

    async def _generate(self, live: _Live, request: Request) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        finish: str | None = None
        try:
            outputs = self._engine.generate(
                prompt_of(request),
                self._limits.sampling(request),
                str(request.key),
                priority=request.lane,
            )
            async for output in outputs:
                (one,) = output.outputs
                self._count(live, output, one)
                finish = one.finish_reason or finish
        except EngineDeadError:
            self.end("vLLM's engine core is dead")
            return
        except Exception as error:
            # Its message may quote the prompt.
            self._live.pop(live.key, None)
            self._send(Rejected(live.key, False, f"vLLM refused the request ({type(error).__name__})"))
            return
        if finish == "abort" and live.key in self._aborting:
            return  # told as freed
        del self._live[live.key]
        if finish in ("stop", "length"):
            self._ends.append(End(live.account(), finish == "stop"))
            self._schedule_flush()
        else:
            self._send(Rejected(live.key, False, f"vLLM gave the request up ({finish})"))

    def _count(self, live: _Live, output: Any, one: Any) -> None:
        new = len(one.token_ids)
        if not new:
            return
        if not live.output_tokens:
            live.cached = output.num_cached_tokens or 0
            live.seconds += self._meter.charge_prompt(live.prompt_tokens - live.cached)
            live.seconds += self._meter.charge_new(new - 1)
        else:
            live.seconds += self._meter.charge_new(new)
        live.output_tokens += new
        self._tokens += [(live.key, int(token)) for token in one.token_ids]
        self._schedule_flush()

    async def _abort(self, call: int, keys: Iterable[int]) -> None:
        """Confirmed: a request of ours that vLLM answers after the abort was sent is answered after it was done."""
        from vllm.v1.engine.exceptions import EngineDeadError

        found = [live for key in keys if (live := self._live.get(key)) is not None]
        self._aborting.update(live.key for live in found)
        tasks = {live.task for live in found if live.task is not None}
        try:
            while tasks:
                # Again, because one that is still on its way in is not known to vLLM yet.
                await self._engine.abort([str(live.key) for live in found if live.key in self._live])
                _, tasks = await asyncio.wait(tasks, timeout=_ABORT_RETRY_S)
            if found:
                await self._engine.is_paused()
        except EngineDeadError:
            self.end("vLLM's engine core is dead")
            return
        freed = [live.account() for live in found if self._live.pop(live.key, None) is not None]
        self._aborting.difference_update(live.key for live in found)
        self._flush()
        if not self._live:
            self._stats = msgspec.structs.replace(self._stats, running=0, waiting=0, kv_tokens=0)
        self._send(Aborted(call, freed, self._stats))

    # --- answers -----------------------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        # Soon, and not now: the requests of one step are woken one after the other, in this turn of the loop.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        tokens, self._tokens = self._tokens, []
        ends, self._ends = self._ends, []
        if not self._live:
            self._meter.idle()
        self._send(StepDone(tokens, ends, self._stats))

    def _send(self, message: Struct) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame(message))


class _Limits:
    """What vLLM holds, as it said after it started, and what that means for a request."""

    def __init__(self, config: Any) -> None:
        self.context_tokens: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.blocks: int = config.cache_config.num_gpu_blocks or 0
        self.block_tokens: int = config.cache_config.block_size
        generation = config.model_config.try_get_generation_config()
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = getattr(config.model_config.hf_config, "eos_token_id", None)
        self.eos_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else sorted(eos)

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def max_request_tokens(self) -> int:
        """Tokens that one request can have. One block is vLLM's own."""
        return min(self.context_tokens, self.kv_tokens - self.block_tokens)

    def rejection(self, request: Request) -> Rejected | None:
        tokens = len(request.prompt_ids)
        if not tokens:
            return Rejected(request.key, False, "the prompt is empty")
        if request.sampling.max_tokens < 1:
            return Rejected(request.key, False, "max_tokens must be at least 1")
        if tokens >= self.max_request_tokens:
            message = (
                f"the prompt has {tokens} tokens, and a context of {self.max_request_tokens} leaves no room for output"
            )
            return Rejected(request.key, True, message)
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            return Rejected(request.key, False, f"the prompt has token ids outside the vocabulary of {self.vocab_size}")
        return None

    def sampling(self, request: Request) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        requested = request.sampling
        return SamplingParams(
            temperature=requested.temperature,
            top_p=requested.top_p,
            top_k=requested.top_k or 0,
            seed=requested.seed,
            max_tokens=min(requested.max_tokens, self.max_request_tokens - len(request.prompt_ids)),
            # The other ends of turn that the model's own generation config names: a plain eos is vLLM's to know.
            stop_token_ids=sorted({*requested.stop_token_ids, *(() if requested.ignore_eos else self.eos_ids)}),
            ignore_eos=requested.ignore_eos,
            detokenize=False,  # text is made in the gateway
            output_kind=RequestOutputKind.DELTA,
        )


class _Peer(asyncio.Protocol):
    """The socket: what comes in before the server is there waits for it."""

    def __init__(self) -> None:
        self.setup: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.disconnected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.server: VllmServer | None = None
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            if not self.setup.done():
                self.setup.set_result(msgspec.msgpack.decode(body, type=VllmSetup))
            elif self.server is not None:
                self.server.handle(decode_to_engine(body))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.disconnected.done():
            self.disconnected.set_result(None)


def _build(arguments: dict[str, Any], meter: StepMeter, observers: list[VllmServer]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        """vLLM makes it; what it hears goes to the one server."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            for server in observers:
                server.observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    fixed = {"disable_log_stats": True, "enable_logging_iteration_details": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **fixed}), stat_loggers=[StepLogger])


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    transport, peer = await loop.create_unix_connection(_Peer, sock=sock)
    await asyncio.wait([peer.setup, peer.disconnected], return_when=asyncio.FIRST_COMPLETED)
    if not peer.setup.done():
        return
    meter, observers = StepMeter(), list[VllmServer]()
    try:
        engine = _build(peer.setup.result().arguments, meter, observers)
    except Exception as error:
        logger.exception("vLLM cannot be started")
        transport.write(frame(Fatal(f"{type(error).__name__}: {error}")))
        transport.close()
        await asyncio.wait({peer.disconnected}, timeout=1)
        return
    try:
        limits = _Limits(engine.vllm_config)
        peer.server = server = VllmServer(engine, transport, meter, limits)
        observers.append(server)
        ready = Ready(
            limits.max_request_tokens, limits.kv_tokens, limits.block_tokens, limits.vocab_size, limits.eos_ids, 0
        )
        transport.write(frame(ready))
        while not (peer.disconnected.done() or server.finished.done()):
            await asyncio.wait(
                [peer.disconnected, server.finished], timeout=_IDLE_CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if engine.errored:
                server.end("vLLM's engine core is dead")
            elif not transport.is_closing():
                transport.write(frame(Heartbeat()))
        reason = server.finished.result() if server.finished.done() else None
        if reason is not None and not transport.is_closing():
            transport.write(frame(Fatal(reason)))
            transport.close()
            await asyncio.wait({peer.disconnected}, timeout=1)
    finally:
        observers.clear()
        engine.shutdown()


def main(number: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    sys.argv = [sys.argv[0]]
    with socket.socket(fileno=number) as sock, contextlib.suppress(ConnectionError):
        asyncio.run(_serve(sock))
    # vLLM has been shut down; what it would still do while an interpreter ends fails in ways nobody can act on.
    os._exit(0)
