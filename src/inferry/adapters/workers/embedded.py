"""The embedded engine as a worker: its process, the socket to it, and every job that runs there.

One event loop owns all state here and is the only caller. `_supervise` is the one task: it starts the process, waits
until it is lost, fails what ran on it, and starts it again; `close` ends it. A job is in `_live` from the moment it is
sent until its end is emitted, which happens exactly once, in `_end`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from inferry.adapters.workers.engine_link import EngineLink
from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import (
    ClientClosed,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    UpstreamRefused,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob, Sampling
from inferry.domain.plans import BatchPlan, Load, Phase, Room, WorkerView
from inferry.domain.ports import Emit, ModelCard, TextAssembler
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.engine.config import EngineConfig
from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    Add,
    Fatal,
    Ready,
    Refused,
    Request,
    Stats,
    StepDone,
    ToEngine,
    decode_from_engine,
)

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class EngineFailed(RuntimeError):
    """The engine process ended before it was ready; the message says what it said last."""


class EmbeddedWorker:
    """`domain.ports.Worker` over an engine process of its own.

    `models` are the names it answers to. `prefill_tokens` bounds the prompt tokens the gateway sends before their
    first tokens are back; by default four chunks: the engine orders prompts by lane itself, so that a live prompt waits
    for the chunk being computed and not for those behind it, which keep the engine from waiting for the gateway.
    """

    def __init__(
        self,
        name: str,
        *,
        model_dir: Path,
        models: Sequence[str],
        make_assembler: Callable[[tuple[str, ...]], TextAssembler],
        controlled: bool = False,
        group: str = "default",
        engine: EngineConfig | None = None,
        clock: Clock | None = None,
        prefill_tokens: int | None = None,
        default_output_tokens: int | None = None,
        restart_backoff_s: float = 0.5,
        restart_backoff_max_s: float = 30.0,
        silence_s: float = 60.0,
    ) -> None:
        self._name = name
        self._model_dir = model_dir
        self._models = tuple(models)
        self._make_assembler = make_assembler
        self._controlled = controlled
        self._group = group
        self._config = engine or EngineConfig()
        self._clock = clock or SystemClock()
        self._prefill_tokens = prefill_tokens or 4 * self._config.chunk_tokens
        self._default_output_tokens = default_output_tokens
        self._backoff_s = (restart_backoff_s, restart_backoff_max_s)
        self._silence_s = silence_s
        self._heard_at = 0.0
        self._created = int(self._clock.wall())
        self._phase = Phase.STARTING
        self._ready: Ready | None = None
        self._stats: Stats | None = None
        self._observed_at = self._clock.now()
        self._link: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._closing = False
        self._keys = 0
        self._calls = 0
        self._live: dict[int, _LiveJob] = {}
        self._by_job: dict[str, _LiveJob] = {}
        self._aborts: dict[int, asyncio.Future[None]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        """The engine process that is up now."""
        return None if self._link is None else self._link.process.pid

    @property
    def stats(self) -> Stats | None:
        """What the engine said after its latest step."""
        return self._stats

    async def start(self) -> None:
        if self._supervisor is None or self._supervisor.done():  # a start that failed may be tried again
            self._started = asyncio.get_running_loop().create_future()
            self._supervisor = asyncio.create_task(self._supervise(), name=f"{self._name}-supervisor")
        assert self._started is not None
        await asyncio.shield(self._started)

    def view(self) -> WorkerView:
        stats, config = self._stats, self._config
        kv_tokens = config.blocks * config.block_tokens
        return WorkerView(
            worker=self._name,
            models=frozenset(self._models),
            phase=self._phase,
            room=Room(config.max_sequences, kv_tokens, self._prefill_tokens),
            observed_at=self._observed_at,
            group=self._group,
            load=Load() if stats is None else Load(stats.running, stats.waiting, stats.kv_tokens),
            kv_capacity=kv_tokens,
            chunk_tokens=config.chunk_tokens,
            controlled=self._controlled,
        )

    def cards(self) -> Sequence[ModelCard]:
        context = self._config.context_tokens if self._ready is None else self._ready.context_tokens
        vocab_size = None if self._ready is None else self._ready.vocab_size
        return [
            ModelCard(
                name=model,
                context_tokens=context,
                vocab_size=vocab_size,
                default_output_tokens=self._default_output_tokens,
                created=self._created,
            )
            for model in self._models
        ]

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        crowd = _Crowd(len(plan.jobs))
        requests: list[Request] = []
        for job in plan.jobs:
            live = _LiveJob(self._next_key(), job, emit, crowd)
            refusal = self._reason_to_refuse(job)
            if refusal is not None:
                live.end(Failed(job.job_id, refusal))
                continue
            sampling = job.payload.sampling
            live.assembler = self._make_assembler(sampling.stop)
            self._live[live.key] = self._by_job[job.job_id] = live
            requests.append(Request(live.key, list(job.payload.prompt_ids or ()), _for_engine(sampling), job.lane))
        try:
            if requests:
                self._heard_at = self._clock.now()
                self._send(Add(requests))
            await crowd.gone
        except BaseException:
            # Cancelled, or something that cannot be sent: either way nobody waits for these any more.
            self._forget(crowd)
            raise

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        found = [live for job_id in job_ids if (live := self._by_job.get(job_id)) is not None]
        if not found:
            return frozenset()
        for live in found:
            live.cancelled = True
        # Confirmed, or the engine is gone: either way nothing of these jobs is left.
        await self._abort([live.key for live in found])
        return frozenset(live.job.job_id for live in found)

    async def close(self) -> None:
        self._closing = True
        self._phase = Phase.DOWN
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        self._lose("the worker was closed")
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineFailed("the worker was closed"))
            self._started.exception()  # whoever waits in start() is told; nobody has to

    # --- the process -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        first_backoff, longest = self._backoff_s
        backoff = first_backoff
        while True:
            reason = "the engine process ended"
            try:
                async with EngineLink.open(self._model_dir, self._config, self._receive) as link:
                    self._phase = Phase.STARTING
                    self._link = link
                    self._heard_at = self._clock.now()
                    while not link.gone.done():
                        await asyncio.wait({link.gone}, timeout=_LOOK_EVERY_S)
                        if self._has_fallen_silent():
                            reason = f"the engine said nothing for {self._silence_s:g} s"
                            logger.error("worker %s: %s, ending it", self._name, reason)
                            link.process.kill()
                            break
                    reason = link.last_words or reason
            except OSError as error:
                reason = f"the engine process cannot be started: {error}"
            finally:
                was_ready, self._ready = self._ready is not None, None
                self._link = None
                self._stats = None
            self._phase = Phase.DOWN
            self._observed_at = self._clock.now()
            self._lose(reason)
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(EngineFailed(reason))
                return
            backoff = first_backoff if was_ready else min(2 * backoff, longest)
            logger.warning("worker %s lost its engine, starting it again in %.1f s", self._name, backoff)
            await asyncio.sleep(backoff)
            self._phase = Phase.STARTING
            self._observed_at = self._clock.now()

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _has_fallen_silent(self) -> bool:
        """Whether jobs wait for an engine that neither works nor ends, such as one that was stopped."""
        return bool(self._live or self._aborts) and self._clock.now() - self._heard_at > self._silence_s

    def _receive(self, body: bytes) -> None:
        self._heard_at = self._clock.now()
        match decode_from_engine(body):
            case StepDone(tokens, ends, stats):
                for key, token in tokens:
                    live = self._live.get(key)
                    if live is not None:
                        self._push(live, token)
                for end in ends:
                    live = self._live.get(end.account.key)
                    # A stop string has ended it already: that end waits for the abort that was sent.
                    if live is not None and live.stopped_at is None:
                        self._finish(live, end.account, FinishReason.STOP if end.stopped else FinishReason.LENGTH)
                    elif live is not None:
                        self._finish(live, end.account, FinishReason.STOP)
                self._observe(stats)
            case Aborted(call, freed, stats):
                for account in freed:
                    live = self._live.get(account.key)
                    if live is not None:
                        self._freed(live, account)
                self._observe(stats)
                waiter = self._aborts.pop(call, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            case Refused(key, too_long, message):
                live = self._live.get(key)
                if live is not None:
                    error = ContextLengthExceeded(message) if too_long else UpstreamRefused(message)
                    self._end(live, Failed(live.job.job_id, error))
            case Ready() as ready:
                self._ready = ready
                self._phase = Phase.READY
                self._observed_at = self._clock.now()
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Fatal(message):
                logger.error("worker %s: the engine cannot go on: %s", self._name, message)
                if self._link is not None:
                    self._link.last_words = message

    def _observe(self, stats: Stats) -> None:
        self._stats = stats
        self._observed_at = self._clock.now()

    def _lose(self, reason: str) -> None:
        """The engine is gone, and with it whatever ran there."""
        for live in list(self._live.values()):
            usage = Usage(live.prompt_tokens if live.index else 0, 0, live.output_tokens)
            if live.stopped_at is not None:
                self._end(live, Done(live.job.job_id, FinishReason.STOP, usage))
            else:
                error = ClientClosed("cancelled") if live.cancelled else WorkerLost(reason)
                self._end(live, Failed(live.job.job_id, error, usage))
        for waiter in self._aborts.values():
            if not waiter.done():
                waiter.set_result(None)
        self._aborts.clear()

    # --- the jobs ----------------------------------------------------------------------------------------------------

    def _reason_to_refuse(self, job: InferenceJob) -> GatewayError | None:
        if self._phase is not Phase.READY:
            return WorkerLost(f"the engine is {self._phase.value}")
        if job.job_id in self._by_job:
            return InvalidRequest("the job is running here already")
        if job.payload.prompt_ids is None:
            return UpstreamRefused("the embedded engine takes token ids, and the job has none")
        return None

    def _push(self, live: "_LiveJob", token: int) -> None:
        if live.stopped_at is not None:
            return
        assert live.assembler is not None
        text, stopped = live.assembler.push((token,))
        live.output_tokens += 1
        if stopped:
            live.stopped_at = live.output_tokens
            self._abort([live.key])
        self._emit(live, text, (token,))

    def _finish(self, live: "_LiveJob", account: Account, finish: FinishReason) -> None:
        assert live.assembler is not None
        if live.stopped_at is None:
            rest = live.assembler.finish()
            if rest:
                self._emit(live, rest, ())
        self._end(live, Done(live.job.job_id, finish, _usage(live, account)))

    def _freed(self, live: "_LiveJob", account: Account) -> None:
        if live.stopped_at is not None:
            self._finish(live, account, FinishReason.STOP)
        else:
            self._end(live, Failed(live.job.job_id, ClientClosed("cancelled"), _usage(live, account)))

    def _emit(self, live: "_LiveJob", text: str, token_ids: tuple[int, ...]) -> None:
        job = live.job
        delta = Delta(job.job_id, job.run_id, job.step_id, live.index, text, token_ids, len(token_ids))
        live.index += 1
        try:
            live.emit(delta)
        except Exception as error:
            # Whose reader is broken must not take the other jobs of the step along.
            live.crowd.fail(error)
            self._forget(live.crowd)

    def _end(self, live: "_LiveJob", end: Done | Failed) -> None:
        if self._drop(live):
            live.end(end)

    def _drop(self, live: "_LiveJob") -> bool:
        if self._live.pop(live.key, None) is None:
            return False
        if self._by_job.get(live.job.job_id) is live:
            del self._by_job[live.job.job_id]
        return True

    def _forget(self, crowd: "_Crowd") -> None:
        """Nobody listens to this plan any more: free its jobs without a word."""
        mine = [live for live in self._live.values() if live.crowd is crowd]
        for live in mine:
            self._drop(live)
        if mine:
            self._abort([live.key for live in mine])

    def _abort(self, keys: list[int]) -> "asyncio.Future[None]":
        self._calls += 1
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._link is None:
            waiter.set_result(None)
        else:
            self._aborts[self._calls] = waiter
            self._send(Abort(self._calls, keys))
        return waiter

    def _next_key(self) -> int:
        self._keys += 1
        return self._keys


class _Crowd:
    """The jobs of one plan; `gone` is done when all have ended."""

    def __init__(self, jobs: int) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = jobs

    def one_ended(self) -> None:
        self._left -= 1
        if self._left == 0 and not self.gone.done():
            self.gone.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.gone.done():
            self.gone.set_exception(error)


class _LiveJob:
    """A job that the engine holds."""

    __slots__ = (
        "assembler",
        "cancelled",
        "crowd",
        "emit",
        "index",
        "job",
        "key",
        "output_tokens",
        "prompt_tokens",
        "stopped_at",
    )

    def __init__(self, key: int, job: InferenceJob, emit: Emit, crowd: _Crowd) -> None:
        self.key = key
        self.job = job
        self.emit = emit
        self.crowd = crowd
        self.assembler: TextAssembler | None = None
        self.prompt_tokens = len(job.payload.prompt_ids or ())
        self.index = 0
        self.output_tokens = 0
        self.stopped_at: int | None = None
        self.cancelled = False

    def end(self, end: Done | Failed) -> None:
        try:
            self.emit(end)
        except Exception as error:
            self.crowd.fail(error)
        self.crowd.one_ended()


def _for_engine(sampling: Sampling) -> Sampling:
    """Stop strings are text and the engine knows none: they are found here."""
    if not sampling.stop:
        return sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def _usage(live: _LiveJob, account: Account) -> Usage:
    """Tokens as delivered, time as measured: what was computed past a stop string is paid for but not counted."""
    return Usage(account.prompt_tokens, 0, live.output_tokens, account.gpu_seconds)
