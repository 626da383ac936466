"""vLLM behind `engine.messages`: requests in, tokens out, on one event loop with one task per request."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    Add,
    End,
    Rejected,
    Request,
    Shutdown,
    Stats,
    StepDone,
    frame,
)
from inferry.workers.in_process.vllm_limits import VllmLimits, prompt_of
from inferry.workers.in_process.vllm_metering import StepMeter


class _LiveRequest:
    """A request and its usage so far. `added` is set once vLLM holds the request or has refused it."""

    __slots__ = ("added", "cached", "key", "output_tokens", "prompt_tokens", "seconds", "task")

    def __init__(self, key: int, prompt_tokens: int) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.cached = 0
        self.output_tokens = 0
        self.seconds = 0.0
        self.added = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def account(self) -> Account:
        return Account(self.key, self.prompt_tokens, self.output_tokens, self.seconds, self.cached)


class VllmServer:
    """Adds and aborts requests. The tokens and ends of one step are sent as one message. `step_ended_at` is the time on
    the event loop's clock at which the step that is being observed has ended.
    """

    def __init__(
        self,
        engine: Any,
        transport: asyncio.WriteTransport,
        meter: StepMeter,
        limits: VllmLimits,
        step_ended_at: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._meter = meter
        self._limits = limits
        self._step_ended_at = step_ended_at
        self._live: dict[int, _LiveRequest] = {}
        self._aborting: set[int] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._tokens: list[tuple[int, int]] = []
        self._ends: list[End] = []
        self._stats = Stats(0, 0, 0, 0, limits.blocks)
        self._preemptions = 0
        self._step_began_at = asyncio.get_running_loop().time()
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
        """End the process. `reason` is None for a requested shutdown."""
        if not self.finished.done():
            self.finished.set_result(reason)

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Record vLLM's statistics of one step."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        details = scheduler_stats.iteration_details
        if details is not None:
            self._step(details)
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
            busy_seconds=self._meter.busy_seconds,
        )
        self._schedule_flush()

    def _step(self, details: Any) -> None:
        """Meter a step that has ended. It began when the step before it ended, or when vLLM got a request while it had
        none: `elapsed_ms` of vLLM is only how long the engine core waited for the result.
        """
        ended_at = self._step_ended_at()
        self._meter.step(
            details.num_ctx_tokens,
            details.num_ctx_requests,
            details.num_generation_tokens,
            sum(live.prompt_tokens + live.output_tokens for live in self._live.values() if live.output_tokens),
            max(0.0, ended_at - self._step_began_at),
        )
        self._step_began_at = max(self._step_began_at, ended_at)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        rejection = self._limits.rejection(request)
        if rejection is not None:
            self._send(rejection)
            return
        live = _LiveRequest(request.key, len(request.prompt_ids))
        if not self._live:
            self._step_began_at = asyncio.get_running_loop().time()
        self._live[request.key] = live
        live.task = asyncio.get_running_loop().create_task(self._generate(live, request))

    async def _generate(self, live: _LiveRequest, request: Request) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        finish: str | None = None
        try:
            # Not `generate`, which does not report when vLLM has added the request.
            outputs = await self._engine.add_request(
                str(request.key), prompt_of(request), self._limits.sampling(request), priority=request.lane
            )
            live.added.set()
            is_finished = False
            while not is_finished:
                output = await outputs.get()
                is_finished = output.finished
                (one,) = output.outputs
                self._count(live, output, one)
                finish = one.finish_reason or finish
        except EngineDeadError:
            self.end("vLLM's engine core is dead")
            return
        except Exception as error:
            # Only the type: the message may quote the prompt.
            self._live.pop(live.key, None)
            self._send(Rejected(live.key, False, f"vLLM refused the request ({type(error).__name__})"))
            return
        finally:
            live.added.set()
        if finish == "abort" and live.key in self._aborting:
            return  # reported in Aborted.freed
        del self._live[live.key]
        if finish in ("stop", "length"):
            self._ends.append(End(live.account(), finish == "stop"))
            self._schedule_flush()
        else:
            self._send(Rejected(live.key, False, f"vLLM ended the request ({finish})"))

    def _count(self, live: _LiveRequest, output: Any, one: Any) -> None:
        new = len(one.token_ids)
        if not new:
            return
        if not live.output_tokens:
            live.cached = output.num_cached_tokens or 0
            live.seconds += self._meter.charge_prompt(live.prompt_tokens - live.cached)
            new_later = new - 1  # the first is part of the prompt's last step
        else:
            new_later = new
        live.seconds += self._meter.charge_new(new_later, live.prompt_tokens + live.output_tokens)
        live.output_tokens += new
        self._tokens += [(live.key, int(token)) for token in one.token_ids]
        self._schedule_flush()

    async def _abort(self, call: int, keys: Iterable[int]) -> None:
        """Abort requests and report them as freed once vLLM has done so.

        vLLM ignores an abort of a request that it has not added yet, so the abort is sent after the addition. The proof
        is the response to `is_paused`: the engine core handles messages in order.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        found = [live for key in keys if (live := self._live.get(key)) is not None]
        self._aborting.update(live.key for live in found)
        tasks = {live.task for live in found if live.task is not None}
        try:
            for live in found:
                await live.added.wait()
            if tasks:
                await self._engine.abort([str(live.key) for live in found if live.key in self._live])
                await asyncio.wait(tasks)
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

    # -- messages ----------------------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        # Not now: the tasks of the other requests of this step run in the same iteration of the event loop.
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
