"""Workers with simulated engines, in the time of the event loop.

`ContinuousWorker` batches continuously, as vLLM does: chunked prefill, a KV cache with preemption, prefix caching.
`PassWorker` computes one padded pass after the other, as a server with static batching does.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence

from inferry.domain.errors import ClientClosed, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, KvPacking, Load, Phase, WorkerView
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.sequence import EngineSequence, FirstTokenEvent
from support.virtual_time import LoopClock

FAST = CostModel(base_s=0.006, prefill_token_s=25e-6, sequence_s=40e-6, kv_token_s=4e-9)
"""About an 8B model on a large GPU: 40,000 prompt tokens per second, 6 ms per step."""


class _Running:
    """A job on an engine: how much of its output has been emitted, and the future of its end."""

    def __init__(self, job: InferenceJob, emit: Emit, sequence: EngineSequence | None = None) -> None:
        self.job = job
        self.emit = emit
        self.sequence = sequence
        self.tokens = 0
        self.deltas = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def produce(self, tokens: int) -> None:
        """Emit the output up to this many tokens."""
        new = tokens - self.tokens
        if new > 0 and not self.ended.done():
            job, ids = self.job, tuple(range(self.tokens, tokens))
            self.tokens = tokens
            self.emit(Delta(job.job_id, job.run_id, job.step_id, self.deltas, " word" * new, ids, new))
            self.deltas += 1

    def end(self, end: End) -> None:
        if not self.ended.done():
            self.emit(end)
            self.ended.set_result(None)


class SimulatedWorker:
    """What the two kinds have in common. `kill` makes the engine lose every call until `revive`."""

    def __init__(
        self,
        name: str,
        *,
        group: str = "default",
        models: Sequence[str] = ("m",),
        max_sequences: int | None = 256,
        kv_tokens: int | None = None,
        prefill_tokens: int | None = None,
    ) -> None:
        self._name = name
        self._group = group
        self._models = tuple(models)
        self._capacity = Capacity(sequences=max_sequences, kv_tokens=kv_tokens, prefill_tokens=prefill_tokens)
        self._clock = LoopClock()
        self.phase = Phase.STARTING
        self._is_dead = False
        self._jobs: dict[str, _Running] = {}

    @property
    def name(self) -> str:
        return self._name

    def cards(self) -> Sequence[ModelCard]:
        return [ModelCard(name=model, context_tokens=131_072) for model in self._models]

    def view(self) -> WorkerView:
        raise NotImplementedError

    async def start(self) -> None:
        self.phase = Phase.READY

    async def close(self) -> None:
        await self.cancel(list(self._jobs))
        self.phase = Phase.DOWN

    def kill(self) -> None:
        """The engine dies: running calls are lost, and so is every call sent to it."""
        self._is_dead = True
        for one in list(self._jobs.values()):
            one.end(Failed(one.job.job_id, WorkerLost("the engine is gone"), Usage(output_tokens=one.tokens)))

    def revive(self) -> None:
        self._is_dead = False

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if self._is_dead:
            for job in plan.jobs:
                emit(Failed(job.job_id, WorkerLost("the engine is gone")))
            return
        running = [self._begin(job, emit) for job in plan.jobs]
        self._started(running)
        await asyncio.wait([one.ended for one in running])
        for one in running:
            self._jobs.pop(one.job.job_id, None)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        found = [one for job_id in job_ids if (one := self._jobs.get(job_id)) is not None]
        for one in found:
            self._abort(one)
            one.end(Failed(one.job.job_id, ClientClosed("cancelled"), Usage(output_tokens=one.tokens)))
        return frozenset(one.job.job_id for one in found)

    def _begin(self, job: InferenceJob, emit: Emit) -> _Running:
        one = self._jobs[job.job_id] = _Running(job, emit, self._sequence(job))
        return one

    def _sequence(self, job: InferenceJob) -> EngineSequence | None:
        return None

    def _started(self, running: list[_Running]) -> None:
        raise NotImplementedError

    def _abort(self, one: _Running) -> None:
        raise NotImplementedError


class ContinuousWorker(SimulatedWorker):
    """An engine that batches continuously. `flags` are those it was started with, `costs` how fast it is.

    `adaptive`: the gateway's capacity controller decides how much of it is used. Without `knows_flags` the gateway
    does not know its tokens per step.
    """

    def __init__(
        self,
        name: str = "engine",
        *,
        costs: CostModel = FAST,
        flags: EngineFlags | None = None,
        adaptive: bool = False,
        knows_flags: bool = True,
        kv_packing: KvPacking = "sum",
        group: str = "default",
        max_sequences: int | None = 256,
        kv_tokens: int | None = None,
        prefill_tokens: int | None = None,
    ) -> None:
        super().__init__(
            name, group=group, max_sequences=max_sequences, kv_tokens=kv_tokens, prefill_tokens=prefill_tokens
        )
        self.flags = flags or EngineFlags(max_num_seqs=256)
        self.engine = Engine(costs, self.flags, fast_forward=False)
        self._adaptive = adaptive
        self._knows_flags = knows_flags
        self._kv_packing: KvPacking = kv_packing
        self._timer: asyncio.TimerHandle | None = None

    def view(self) -> WorkerView:
        engine = self.engine
        return WorkerView(
            worker=self._name,
            models=frozenset(self._models),
            phase=self.phase,
            group=self._group,
            capacity=self._capacity,
            controlled=self._adaptive,
            kv_packing=self._kv_packing,
            load=Load(engine.running, engine.waiting, engine.kv_tokens),
            kv_capacity=self.flags.kv_tokens,
            chunk_tokens=self.flags.max_num_batched_tokens if self._knows_flags else None,
            observed_at=self._clock.now(),
        )

    def _sequence(self, job: InferenceJob) -> EngineSequence:
        output = job.payload.sampling.max_tokens or 1
        prompt, block = job.footprint.prompt.expected, self.flags.block_tokens
        shared, tokens = json.loads(job.payload.body or b"{}").get("shared", ("", 0))
        blocks = tuple(
            hash((shared, number)) if (number + 1) * block <= tokens else hash((job.job_id, number))
            for number in range(prompt // block)
        )
        return EngineSequence(job.job_id, prompt, output, blocks=blocks if self.flags.prefix_caching else ())

    def _started(self, running: list[_Running]) -> None:
        for one in running:
            assert one.sequence is not None
            self.engine.submit(one.sequence, self._clock.now())
        self._schedule()

    def _abort(self, one: _Running) -> None:
        assert one.sequence is not None
        self.engine.abort(one.sequence, self._clock.now())
        self._schedule()

    def kill(self) -> None:
        super().kill()
        self.engine.clear(self._clock.now())

    def _schedule(self) -> None:
        if self._timer is None and self.engine.next_at is not None:
            self._timer = asyncio.get_running_loop().call_at(self.engine.next_at, self._step)

    def _step(self) -> None:
        self._timer = None
        now = self.engine.next_at
        if now is None:
            return
        events = self.engine.advance(now)
        finished = {event.sequence for event in events if not isinstance(event, FirstTokenEvent)}
        for one in list(self._jobs.values()):
            sequence = one.sequence
            if sequence is None or sequence.aborted:
                continue
            if sequence in finished:
                one.produce(sequence.output)
                usage = Usage(sequence.prompt, sequence.cached_tokens, sequence.output)
                one.end(Done(one.job.job_id, FinishReason.LENGTH, usage))
            elif sequence.first_at is not None or sequence.decoding_since is not None:
                one.produce(min(sequence.output, self.engine.output_tokens_at(sequence, now)))
        self._schedule()


class PassWorker(SimulatedWorker):
    """An engine that computes one padded pass at a time; later passes wait inside it.

    A pass takes `pass_s`, and `prompt_token_s` for every prompt token with padding, and `step_s` for every output token
    of its longest answer. Every answer is complete at the end of its pass.
    """

    def __init__(
        self,
        name: str = "engine",
        *,
        pass_s: float = 0.2,
        prompt_token_s: float = 10e-6,
        step_s: float = 0.002,
        max_sequences: int | None = 256,
    ) -> None:
        super().__init__(name, max_sequences=max_sequences)
        self._pass_s, self._prompt_token_s, self._step_s = pass_s, prompt_token_s, step_s
        self._waiting: list[list[_Running]] = []
        self._current: list[_Running] = []

    def view(self) -> WorkerView:
        return WorkerView(
            worker=self._name,
            models=frozenset(self._models),
            phase=self.phase,
            capacity=self._capacity,
            pads=True,
            load=Load(len(self._current), sum(len(one) for one in self._waiting)),
            observed_at=self._clock.now(),
        )

    def _started(self, running: list[_Running]) -> None:
        self._waiting.append(running)
        if not self._current:
            self._next_pass()

    def _abort(self, one: _Running) -> None: ...

    def _next_pass(self) -> None:
        self._current = self._waiting.pop(0) if self._waiting else []
        if not self._current:
            return
        jobs = [one.job for one in self._current]
        longest = max(job.footprint.prompt.expected for job in jobs)
        output = max(job.payload.sampling.max_tokens or 1 for job in jobs)
        took_s = self._pass_s + self._prompt_token_s * longest * len(jobs) + self._step_s * output
        asyncio.get_running_loop().call_later(took_s, self._end_pass)

    def _end_pass(self) -> None:
        for one in self._current:
            output = one.job.payload.sampling.max_tokens or 1
            one.produce(output)
            one.end(Done(one.job.job_id, FinishReason.LENGTH, Usage(one.job.footprint.prompt.expected, 0, output)))
        self._next_pass()
