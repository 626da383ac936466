"""An engine in a process of its own as a worker: the process, the socket to it, and every job that runs there.

One event loop owns all state here and is the only caller. `_supervise` is the one task: it starts the process, waits
until it is lost, fails what ran on it, and starts it again; `close` ends it. A job is in `_live` from the moment it is
sent until its end is emitted, which happens exactly once, in `_end`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import (
    ClientClosed,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    UpstreamRefused,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard, TextAssembler
from inferry.domain.streams import Delta, Done, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, Load, Phase, WorkerView
from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    Add,
    Fatal,
    Heartbeat,
    Ready,
    Rejected,
    Request,
    Stats,
    StepDone,
    ToEngine,
    decode_from_engine,
)
from inferry.workers.in_process.engine_jobs import (
    LiveJob,
    PlanCompletion,
    engine_sampling,
    replay,
    to_usage,
    undelivered_text,
)
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
MISSED_CHECKS = 5
"""An engine process that was not heard in so many looks, one after the other, is frozen: it says several times between
two of them that it runs. Looks are counted and not seconds, because they stop where this process does not run itself.
"""
UNRESPONSIVE_CHECKS = 3
"""Missed heartbeats after which the engine is down and gets no work until it is heard again."""


class EngineFailed(RuntimeError):
    """The engine process ended before it was ready; the message says what it said last."""


class EngineLimits(Struct, frozen=True, kw_only=True):
    """What an engine is known to hold; `kv_tokens` is None until it has said so itself."""

    sequences: int
    kv_tokens: int | None
    prefill_tokens: int
    chunk_tokens: int


class EngineWorker:
    """`domain.ports.Worker` over an engine process of its own that speaks `engine.messages`.

    `models` are the names it answers to; `salt_for` a tenant is what keeps its prompts apart from others' in a prefix
    cache, where the engine has one. What differs between engines is the program and its limits. An engine is ended
    when its process is not heard (`MISSED_CHECKS`), idle or not, or when it holds jobs and for `stall_timeout_s` it is
    heard to run and nothing comes of it.
    """

    def __init__(
        self,
        name: str,
        *,
        program: EngineProgram,
        limits: EngineLimits,
        models: Sequence[str],
        make_assembler: Callable[[tuple[str, ...]], TextAssembler],
        controlled: bool = False,
        group: str = "default",
        pool: str | None = None,
        salt_for: Callable[[str], str] | None = None,
        context_tokens: int | None = None,
        clock: Clock | None = None,
        default_output_tokens: int | None = None,
        restart_backoff_s: float = 0.5,
        restart_backoff_max_s: float = 30.0,
        stall_timeout_s: float = 30.0,
        can_resume_seeded: bool = False,
    ) -> None:
        self._name = name
        self._program = program
        self._limits = limits
        self._models = tuple(models)
        self._make_assembler = make_assembler
        self._controlled = controlled
        self._group = group
        self._pool = pool
        self._salt_for = salt_for
        self._clock = clock or SystemClock()
        self._context_tokens = context_tokens
        self._default_output_tokens = default_output_tokens
        self._backoff_s = (restart_backoff_s, restart_backoff_max_s)
        self._stall_timeout_s = stall_timeout_s
        self._can_resume_seeded = can_resume_seeded
        self._progress_at = 0.0
        self._has_message = False
        self._last_message_at: float | None = None
        self._missed_checks: int | None = None  # None until it has said for the first time that it runs
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
        self._live: dict[int, LiveJob] = {}
        self._by_job: dict[str, LiveJob] = {}
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
        stats, limits = self._stats, self._limits
        kv_tokens = limits.kv_tokens if self._ready is None else self._ready.kv_tokens
        return WorkerView(
            worker=self._name,
            models=frozenset(self._models),
            phase=Phase.DOWN if self._is_unresponsive and self._phase is Phase.READY else self._phase,
            capacity=Capacity(limits.sequences, kv_tokens, limits.prefill_tokens),
            observed_at=self._observed_at,
            group=self._group,
            isolation=self._pool,
            load=Load() if stats is None else Load(stats.running, stats.waiting, stats.kv_tokens),
            kv_capacity=kv_tokens,
            chunk_tokens=limits.chunk_tokens,
            controlled=self._controlled,
            last_activity_at=self._last_message_at,
        )

    @property
    def _is_unresponsive(self) -> bool:
        return (self._missed_checks or 0) >= UNRESPONSIVE_CHECKS

    def cards(self) -> Sequence[ModelCard]:
        context = self._context_tokens if self._ready is None else self._ready.context_tokens
        vocab_size = None if self._ready is None else self._ready.vocab_size
        return [
            ModelCard(
                name=model,
                context_tokens=context,
                vocab_size=vocab_size,
                default_output_tokens=self._default_output_tokens,
                can_resume=True,
                can_resume_seeded=self._can_resume_seeded,
                created=self._created,
            )
            for model in self._models
        ]

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        completion = PlanCompletion(len(plan.jobs))
        requests: list[Request] = []
        for job in plan.jobs:
            live = LiveJob(self._next_key(), job, emit, completion)
            refusal = self._refusal(job)
            if refusal is not None:
                live.end(Failed(job.job_id, refusal))
                continue
            sampling = job.payload.sampling
            live.assembler = self._make_assembler(sampling.stop)
            if live.earlier_ids:
                self._replay(live, live.assembler)
            left = sampling.max_tokens - len(live.earlier_ids)
            finish = self._already_finished(live)
            if finish is not None:
                self._finish_without_engine(live, finish)
                continue
            self._live[live.key] = self._by_job[job.job_id] = live
            prompt = [*live.prompt_ids, *live.earlier_ids]
            salt = self._salt_for(job.tenant) if job.salted and self._salt_for is not None else None
            requests.append(Request(live.key, prompt, engine_sampling(sampling, left), job.lane, salt))
        try:
            if requests:
                self._progress_at = self._clock.now()
                self._send(Add(requests))
            await completion.finished
        except BaseException:
            # Cancelled, or something that cannot be sent: either way nobody waits for these any more.
            self._drop_plan(completion)
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
        self._fail_all("the worker was closed")
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineFailed("the worker was closed"))
            self._started.exception()  # whoever waits in start() is told; nobody has to

    # --- the process -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        first_backoff, max_backoff = self._backoff_s
        backoff = first_backoff
        while True:
            reason = "the engine process ended"
            try:
                async with EngineLink.open(self._program, self._receive) as link:
                    self._phase = Phase.STARTING
                    self._link = link
                    self._progress_at = self._clock.now()
                    self._missed_checks = self._last_message_at = None
                    while not link.finished.done():
                        await asyncio.wait({link.finished}, timeout=CHECK_INTERVAL_S)
                        stall_reason = self._check_progress()
                        if stall_reason is not None:
                            reason = stall_reason
                            logger.error("worker %s: %s, ending it", self._name, reason)
                            link.kill()
                            break
                    reason = link.exit_message or reason
            except OSError as error:
                reason = f"the engine process cannot be started: {error}"
            finally:
                was_ready, self._ready = self._ready is not None, None
                self._link = None
                self._stats = None
            self._phase = Phase.DOWN
            self._observed_at = self._clock.now()
            self._fail_all(reason)
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(EngineFailed(reason))
                return
            backoff = first_backoff if was_ready else min(2 * backoff, max_backoff)
            logger.warning("worker %s lost its engine, starting it again in %.1f s", self._name, backoff)
            await asyncio.sleep(backoff)
            self._phase = Phase.STARTING
            self._observed_at = self._clock.now()

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _check_progress(self) -> str | None:
        """Why jobs wait in vain for an engine that does not end by itself; None where they do not."""
        if self._missed_checks is not None:
            self._missed_checks = 0 if self._has_message else self._missed_checks + 1
        self._has_message = False
        if (self._missed_checks or 0) >= MISSED_CHECKS:
            return f"the engine process was not heard for {MISSED_CHECKS * CHECK_INTERVAL_S:g} s"
        if not (self._live or self._aborts):
            return None
        if self._clock.now() - self._progress_at > self._stall_timeout_s:
            return f"nothing came of the engine for {self._stall_timeout_s:g} s"
        return None

    def _receive(self, body: bytes) -> None:
        self._has_message = True
        self._last_message_at = self._clock.now()
        decoded = decode_from_engine(body)
        if not isinstance(decoded, Heartbeat):
            self._progress_at = self._last_message_at
        match decoded:
            case Heartbeat():
                self._missed_checks = 0
            case StepDone(tokens, ends, stats):
                for key, token in tokens:
                    live = self._live.get(key)
                    if live is not None:
                        self._push(live, token)
                for end in ends:
                    live = self._live.get(end.account.key)
                    # A stop string has ended it already: that end waits for the abort that was sent.
                    if live is not None and live.stop_index is None:
                        self._finish(live, end.account, FinishReason.STOP if end.stopped else FinishReason.LENGTH)
                    elif live is not None:
                        self._finish(live, end.account, FinishReason.STOP)
                self._observe(stats)
            case Aborted(call, freed, stats):
                for account in freed:
                    live = self._live.get(account.key)
                    if live is not None:
                        self._on_freed(live, account)
                self._observe(stats)
                waiter = self._aborts.pop(call, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            case Rejected(key, too_long, message):
                live = self._live.get(key)
                if live is not None and too_long and live.earlier_ids:
                    # Not the prompt is too long: what came of it has reached the end of the context.
                    self._drop(live)
                    self._finish_without_engine(live, FinishReason.LENGTH)
                elif live is not None:
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
                    self._link.exit_message = message

    def _observe(self, stats: Stats) -> None:
        self._stats = stats
        self._observed_at = self._clock.now()

    def _fail_all(self, reason: str) -> None:
        """The engine is gone, and with it whatever ran there."""
        for live in list(self._live.values()):
            computed = len(live.prompt_ids) + len(live.earlier_ids) if live.index else 0
            usage = Usage(computed, 0, len(live.output_ids))
            if live.stop_index is not None:
                self._end(live, Done(live.job.job_id, FinishReason.STOP, usage))
            else:
                error = ClientClosed("cancelled") if live.cancelled else WorkerLost(reason)
                self._end(live, Failed(live.job.job_id, error, usage, live.resume_point(self._make_assembler)))
        for waiter in self._aborts.values():
            if not waiter.done():
                waiter.set_result(None)
        self._aborts.clear()

    # --- the jobs ----------------------------------------------------------------------------------------------------

    def _refusal(self, job: InferenceJob) -> GatewayError | None:
        if self._phase is not Phase.READY:
            return WorkerLost(f"the engine is {self._phase.value}")
        if job.job_id in self._by_job:
            return InvalidRequest("the job is running here already")
        if job.payload.prompt_ids is None and job.resume_point is None:
            return UpstreamRefused("the engine takes token ids, and the job has none")
        return None

    def _replay(self, live: LiveJob, assembler: TextAssembler) -> None:
        replayed = replay(assembler, live.earlier_ids)
        stops, resume_point = live.job.payload.sampling.stop, live.job.resume_point
        if stops and resume_point is not None:
            missing = self._make_assembler(stops)
            replay(missing, live.earlier_ids)
            rest = undelivered_text(resume_point, replayed, missing.finish(), stops)
            if rest:
                self._emit(live, rest, ())

    def _already_finished(self, live: LiveJob) -> FinishReason | None:
        """How a job ended that broke off between its last token and its end."""
        if not live.earlier_ids:
            return None
        sampling = live.job.payload.sampling
        stops = set(sampling.stop_token_ids)
        if self._ready is not None and not sampling.ignore_eos:
            stops.update(self._ready.eos_ids)
        if live.earlier_ids[-1] in stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.earlier_ids) >= sampling.max_tokens else None

    def _push(self, live: LiveJob, token: int) -> None:
        if live.stop_index is not None:
            return
        assert live.assembler is not None
        text, stopped = live.assembler.push((token,))
        live.output_ids.append(token)
        if stopped:
            live.stop_index = len(live.output_ids)
            self._abort([live.key])
        self._emit(live, text, (token,))

    def _finish(self, live: LiveJob, account: Account, finish: FinishReason) -> None:
        assert live.assembler is not None
        if live.stop_index is None:
            rest = live.assembler.finish()
            if rest:
                self._emit(live, rest, ())
        self._end(live, Done(live.job.job_id, finish, to_usage(live, account)))

    def _finish_without_engine(self, live: LiveJob, finish: FinishReason) -> None:
        """The job broke off after the last token it could have: only text that was held back is left of it."""
        assert live.assembler is not None
        rest = live.assembler.finish()
        if rest:
            self._emit(live, rest, ())
        live.end(Done(live.job.job_id, finish, Usage()))

    def _on_freed(self, live: LiveJob, account: Account) -> None:
        if live.stop_index is not None:
            self._finish(live, account, FinishReason.STOP)
        else:
            error = ClientClosed("cancelled")
            self._end(
                live, Failed(live.job.job_id, error, to_usage(live, account), live.resume_point(self._make_assembler))
            )

    def _emit(self, live: LiveJob, text: str, token_ids: tuple[int, ...]) -> None:
        job = live.job
        delta = Delta(job.job_id, job.run_id, job.step_id, live.index, text, token_ids, len(token_ids))
        live.index += 1
        try:
            live.emit(delta)
        except Exception as error:
            # Whose reader is broken must not take the other jobs of the step along.
            live.completion.fail(error)
            self._drop_plan(live.completion)

    def _end(self, live: LiveJob, end: Done | Failed) -> None:
        if self._drop(live):
            live.end(end)

    def _drop(self, live: LiveJob) -> bool:
        if self._live.pop(live.key, None) is None:
            return False
        if self._by_job.get(live.job.job_id) is live:
            del self._by_job[live.job.job_id]
        return True

    def _drop_plan(self, completion: PlanCompletion) -> None:
        """Nobody listens to this plan any more: free its jobs without a word."""
        own_jobs = [live for live in self._live.values() if live.completion is completion]
        for live in own_jobs:
            self._drop(live)
        if own_jobs:
            self._abort([live.key for live in own_jobs])

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
