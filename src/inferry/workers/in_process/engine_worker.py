"""An engine in a process of its own as a worker.

One event loop owns all state and is the only caller. `EngineSupervisor` owns the process, `LiveJobs` the jobs that the
process holds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from msgspec import Struct

from inferry.domain.clock import Clock, SystemClock
from inferry.domain.errors import GatewayError, InvalidRequest, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard, TextAssembler
from inferry.domain.routes import GENERATES, BatchKey, OutputLength, Task
from inferry.domain.streams import Failed, FinishReason
from inferry.domain.workers import Capacity, KvPacking, Load, StepWork, WorkerView
from inferry.engine.messages import (
    Aborted,
    AdapterChanged,
    Add,
    EndRun,
    Rejected,
    Request,
    Returned,
    Stats,
    StepDone,
    ToEngine,
)
from inferry.workers.in_process.adapter_table import AdapterTable
from inferry.workers.in_process.engine_jobs import LiveJob, engine_sampling, replay, undelivered_text
from inferry.workers.in_process.engine_link import OpenLink
from inferry.workers.in_process.engine_supervisor import EngineSupervisor
from inferry.workers.in_process.live_jobs import LiveJobs
from inferry.workers.in_process.output_formats import TEXT_ONLY, OutputFormats
from inferry.workers.in_process.pooled_jobs import PooledJobs
from inferry.workers.plan_completion import PlanCompletion

_FEATURES = frozenset({"echo", "streamed_echo", "prefill"})
"""The gateway writes prompts itself: before the output, and up to the text that an answer continues."""


class EngineLimits(Struct, frozen=True, kw_only=True):
    """The engine's capacity. `kv_tokens` is None until the engine has reported it; no `prefill_tokens` are no limit.

    `pads` and `refills`: see `WorkerView`.
    """

    sequences: int
    kv_tokens: int | None
    prefill_tokens: int | None
    chunk_tokens: int
    pads: bool = False
    refills: bool = False


class EngineWorker:
    """`domain.ports.Worker` over an engine that speaks `engine.messages`.

    Engines differ in `open_link` and `limits`. `models` are the names it serves. `salt_for(tenant)` is the salt that
    keeps the tenant's prompts apart in a prefix cache, where the engine has one. `adapters`: LoRA adapters and their
    directories; others may be loaded from below `adapter_dirs`.
    `features`: further features of calls that it supports.
    """

    def __init__(
        self,
        name: str,
        *,
        open_link: OpenLink,
        limits: EngineLimits,
        models: Sequence[str],
        make_assembler: Callable[[tuple[str, ...]], TextAssembler],
        controlled: bool = False,
        group: str = "default",
        pool: str | None = None,
        precision: str | None = None,
        output_length: OutputLength | None = None,
        kv_packing: KvPacking = "sum",
        gpus: int = 1,
        salt_for: Callable[[str], str] | None = None,
        context_tokens: int | None = None,
        clock: Clock | None = None,
        default_output_tokens: int | None = None,
        restart_backoff_s: float = 0.5,
        restart_backoff_max_s: float = 30.0,
        stall_timeout_s: float = 30.0,
        can_resume_seeded: bool = False,
        features: frozenset[str] = frozenset(),
        formats: OutputFormats = TEXT_ONLY,
        adapters: Mapping[str, Path] | None = None,
        adapter_dirs: Sequence[Path] = (),
    ) -> None:
        self._name, self._limits = name, limits
        self._models = tuple(models)
        self._make_assembler = make_assembler
        self._controlled = controlled
        self._group, self._pool, self._precision = group, pool, precision
        self._output_length, self._kv_packing = output_length, kv_packing
        self._gpus = gpus
        self._salt_for = salt_for
        self._context_tokens = context_tokens
        self._default_output_tokens = default_output_tokens
        self._can_resume_seeded = can_resume_seeded
        self._features, self._formats = _FEATURES | features, formats
        self._clock = clock = clock or SystemClock()
        self._created = int(clock.wall())
        self._keys = count(1)
        self._batch_numbers: dict[BatchKey, int] = {}
        self._jobs = LiveJobs(make_assembler, self._send)
        self._pooled = PooledJobs(self._keys, self._jobs.abort, self._labels)
        self._adapters = AdapterTable(name, adapters or {}, adapter_dirs, self._send)
        self._engine = EngineSupervisor(
            name,
            open_link,
            clock,
            on_message=self._on_message,
            on_ready=self._adapters.engine_ready,
            on_lost=self._fail_all,
            has_work=lambda: self._jobs.is_busy or self._pooled.is_busy,
            restart_backoff_s=restart_backoff_s,
            restart_backoff_max_s=restart_backoff_max_s,
            stall_timeout_s=stall_timeout_s,
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int | None:
        """The process id of the engine that runs now."""
        return self._engine.pid

    @property
    def stats(self) -> Stats | None:
        """The engine's statistics after its latest step."""
        return self._engine.stats

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()
        self._fail_all("the worker was closed")

    def view(self) -> WorkerView:
        engine, limits = self._engine, self._limits
        stats = engine.stats
        kv_tokens = limits.kv_tokens if engine.ready is None else engine.ready.kv_tokens
        kv_blocks = None if stats is None else stats.kv_blocks
        return WorkerView(
            worker=self._name,
            models=frozenset((*self._models, *self._adapters.names)),
            adapters=frozenset(self._adapters.names),
            phase=engine.phase,
            capacity=Capacity(limits.sequences, kv_tokens, limits.prefill_tokens),
            observed_at=engine.observed_at,
            group=self._group,
            isolation=self._pool,
            precision=self._precision,
            output_length=self._output_length,
            kv_packing=self._kv_packing,
            pads=limits.pads,
            refills=limits.refills,
            load=Load() if stats is None else Load(stats.running, stats.waiting, stats.kv_tokens),
            kv_capacity=kv_tokens,
            chunk_tokens=limits.chunk_tokens,
            controlled=self._controlled,
            gpus=self._gpus,
            busy_s=0.0 if stats is None else stats.busy_seconds,
            step_work=_step_work(stats),
            prefix_hits=None if kv_blocks is None else kv_blocks.prefix_hits,
            kv_blocks=kv_blocks,
            last_activity_at=engine.last_message_at,
        )

    def cards(self) -> Sequence[ModelCard]:
        ready = self._engine.ready
        return [
            ModelCard(
                name=model,
                context_tokens=self._context_tokens if ready is None else ready.context_tokens,
                vocab_size=None if ready is None else ready.vocab_size,
                default_output_tokens=self._default_output_tokens,
                can_resume=True,
                can_resume_seeded=self._can_resume_seeded,
                can_resume_constrained="structured_outputs" in self._features,
                can_resume_logprobs="logprobs" in self._features,
                features=self._features if ready is None else self._features.union(ready.features),
                created=self._created,
                tasks=GENERATES if ready is None else frozenset(Task(name) for name in ready.tasks),
                parent=parent,
            )
            for model, parent in (
                *((model, None) for model in self._models),
                *((adapter, self._models[0]) for adapter in self._adapters.names),
            )
        ]

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        completion = PlanCompletion(len(plan.jobs))
        batch = self._batch_number(plan) if self._limits.pads else 0
        requests: list[Request] = []
        for job in plan.jobs:
            live = LiveJob(next(self._keys), job, emit, completion)
            refusal = self._refusal(job)
            if refusal is not None:
                live.end(Failed(job.job_id, refusal))
                continue
            if job.payload.pooled is not None:
                requests += self._pooled.add(job, emit, completion, batch, self._adapter_number(job) or 0)
                continue
            live.assembler = self._make_assembler(job.payload.sampling.stop)
            self._formats.set_writers(live, self._clock.wall())
            if live.earlier_ids:
                self._replay(live, live.assembler)
            finish = self._already_finished(live)
            if finish is not None:
                self._jobs.finish_without_engine(live, finish)
                continue
            self._jobs.add(live)
            requests.append(self._request(live, batch))
        try:
            if requests:
                self._engine.restart_stall_timer()
                self._send(Add(requests))
            await completion.finished
        except BaseException:
            # Cancelled, or a message that cannot be encoded: the ends of these jobs are not awaited any more.
            self._jobs.drop_plan(completion)
            self._pooled.drop_plan(completion)
            raise

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Abort these jobs; return them once the engine has confirmed that they are freed, or is lost."""
        keys: list[int] = []
        found: set[str] = set()
        for job_id in job_ids:
            live = self._jobs.find(job_id)
            pooled_keys = self._pooled.keys_of(job_id)
            if live is not None:
                live.cancelled = True
                keys.append(live.key)
                found.add(job_id)
            elif pooled_keys:
                self._pooled.cancelled(job_id)
                keys += pooled_keys
                found.add(job_id)
        if keys:
            await self._jobs.abort(keys)
        return frozenset(found)

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over: the engine keeps no KV for its next call."""
        self._send(EndRun(_run_name(tenant, run_id)))

    def _on_message(self, message: StepDone | Returned | Aborted | Rejected | AdapterChanged) -> None:
        if isinstance(message, AdapterChanged):
            self._adapters.on_message(message)
            return
        assert not isinstance(message, Returned), "an engine runs no Python functions"
        self._pooled.on_message(message)  # before an abort is confirmed
        self._jobs.on_message(message)

    def _labels(self) -> Sequence[str]:
        ready = self._engine.ready
        return () if ready is None else ready.labels

    def _fail_all(self, reason: str) -> None:
        self._adapters.engine_lost()
        self._pooled.fail_all(reason)
        self._jobs.fail_all(reason)

    def _send(self, message: ToEngine) -> bool:
        return self._engine.send(message)

    def _refusal(self, job: InferenceJob) -> GatewayError | None:
        if not self._engine.accepts_jobs:
            return WorkerLost(f"the engine of worker {self._name} is not ready")
        if self._adapter_number(job) is None:
            return NoWorker(f"worker {self._name} has unloaded the adapter")
        if self._jobs.find(job.job_id) is not None:
            return InvalidRequest("the job is already running on this worker")
        if job.payload.pooled is not None:
            if self._pooled.keys_of(job.job_id):
                return InvalidRequest("the job is already running on this worker")
            return None if job.payload.pooled.ids else self._not_tokenized()
        if job.payload.prompt_ids is None and job.resume_point is None:
            return self._not_tokenized()
        return None

    def _not_tokenized(self) -> GatewayError:
        """The prompt was read before this worker's tokenizer was known: a repeated call is tokenized."""
        error = NoWorker(f"worker {self._name} came after the call, whose prompt was not tokenized", retry_after_s=1.0)
        error.can_failover = False  # no attempt would add the ids
        return error

    def _adapter_number(self, job: InferenceJob) -> int | None:
        """The number of the job's adapter, 0 for none; None if it is not loaded."""
        return 0 if job.route.adapter is None else self._adapters.number(job.route.adapter)

    def _batch_number(self, plan: BatchPlan) -> int:
        """A number for the batch key of a plan. Keys of earlier plans are forgotten while no job runs."""
        if not self._jobs.is_busy and not self._pooled.is_busy:
            self._batch_numbers.clear()
        return self._batch_numbers.setdefault(plan.jobs[0].batch_key, next(self._keys))

    def _request(self, live: LiveJob, batch: int) -> Request:
        job = live.job
        sampling = job.payload.sampling
        prompt = [*live.prompt_ids, *live.earlier_ids]
        salt = self._salt_for(job.tenant) if job.salted and self._salt_for is not None else None
        remaining = sampling.max_tokens - len(live.earlier_ids)
        # A call without a run id is a run of its own, which no later call joins.
        run = None if job.run_id == job.job_id else _run_name(job.tenant, job.run_id)
        kv_quotas = [] if job.max_kv_tokens is None else [(job.tenant, job.max_kv_tokens)]
        if job.run_kv_quota is not None:
            root, max_run_tokens = job.run_kv_quota
            kv_quotas.append((_run_name(job.tenant, root), max_run_tokens))
        sampling = engine_sampling(sampling, remaining)
        return Request(
            live.key,
            prompt,
            sampling,
            job.lane,
            salt,
            run=run,
            kv_quotas=tuple(kv_quotas),
            batch=batch,
            output_ids=len(live.earlier_ids),
            adapter=self._adapter_number(job) or 0,
            is_batch=job.is_batch,
        )

    def _replay(self, live: LiveJob, assembler: TextAssembler) -> None:
        """Bring the assembler of a resumed job to its resume point, and emit text that was not delivered before."""
        replayed = replay(assembler, live.earlier_ids)
        stops, resume_point = live.job.payload.sampling.stop, live.job.resume_point
        if stops and resume_point is not None:
            missing = self._make_assembler(stops)
            replay(missing, live.earlier_ids)
            rest = undelivered_text(resume_point, replayed, missing.finish(), stops)
            if rest:
                self._jobs.emit(live, rest, ())

    def _already_finished(self, live: LiveJob) -> FinishReason | None:
        """The finish reason of a resumed job whose earlier attempt was lost between its last token and its end."""
        if not live.earlier_ids:
            return None
        sampling = live.job.payload.sampling
        stops = set(sampling.stop_token_ids)
        ready = self._engine.ready
        if ready is not None and not sampling.ignore_eos:
            stops.update(ready.eos_ids)
        if live.earlier_ids[-1] in stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.earlier_ids) >= sampling.max_tokens else None


def _step_work(stats: Stats | None) -> StepWork | None:
    """What the engine's steps computed; None where the engine does not report it."""
    if stats is None or not (stats.prompt_tokens or stats.decode_rows):
        return None
    return StepWork(stats.prompt_tokens, stats.decode_rows, stats.padding_tokens, stats.padding_rows)


def _run_name(tenant: str, run_id: str) -> str:
    return f"{tenant}\n{run_id}"
