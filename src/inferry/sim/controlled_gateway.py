"""The gateway with a capacity controller per worker, fed as dispatch feeds it."""

from collections.abc import Callable, Mapping, Sequence

from inferry.domain.jobs import Footprint, InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Tick
from inferry.domain.routes import OutputLength
from inferry.domain.streams import End
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, EngineCounts, KvPacking, Load
from inferry.scheduling.capacity.controller import CapacityController, Stream
from inferry.scheduling.sessions import SessionLimits
from inferry.sim.calls import Call
from inferry.sim.engine import Engine
from inferry.sim.gateway import GatewayFrontend, capped_output
from inferry.sim.length_predictor import LengthPredictor
from inferry.sim.prompt_memory import PrefixAwareEstimator, PromptPrefixes
from inferry.sim.sequence import EngineSequence
from inferry.sim.simulation import Simulation

CAPACITY_INTERVAL_S = 0.05
ENGINE_COUNTS_INTERVAL_S = 0.5
"""Interval at which an engine publishes its counters."""
MAX_SEQUENCES = 256


class ControlledFrontend(GatewayFrontend):
    """Every worker's capacity is computed every `CAPACITY_INTERVAL_S` from what the gateway has observed.

    `limits` bound the capacity of a worker, one for all or one each; by default the engine's KV and the default number
    of sequences. Workers in `fixed` always have their full limits. `counts` says whether engines publish counters, as
    vLLM does in its metrics: the whole prompt is counted there with the first token. `names_prefixes`: see
    `GatewayFrontend.prefix_of`.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        *,
        limits: Capacity | Sequence[Capacity] | None = None,
        fixed: Sequence[int] = (),
        groups: Sequence[str] | None = None,
        output_lengths: Sequence[OutputLength | None] | None = None,
        kv_packings: Sequence[KvPacking] | None = None,
        estimate: Callable[[Call], Footprint] | None = None,
        predictor: LengthPredictor | None = None,
        counts: bool = True,
        names_prefixes: bool = True,
        sessions: SessionLimits | None = None,
    ) -> None:
        super().__init__(
            lanes,
            Capacity(),
            groups=groups,
            output_lengths=output_lengths,
            kv_packings=kv_packings,
            estimate=estimate or PrefixAwareEstimator(predictor or capped_output),
            predictor=predictor,
            prefix_of=PromptPrefixes() if names_prefixes else None,
            controller=self._compute_capacity,
            capacity_interval_s=CAPACITY_INTERVAL_S,
            sessions=sessions,
        )
        self._limits = limits
        self._counts = counts
        self._arrivals = 0
        self._next_counts_at: list[float] = []
        self._prompt_tokens: list[int] = []
        self._fixed: dict[int, Capacity] = dict.fromkeys(fixed, Capacity())
        self.controllers: list[CapacityController] = []
        self.capacity_samples: list[tuple[float, int, float, Capacity]] = []
        self._streams: list[dict[Call, Stream]] = []
        self._waiting: dict[Lane, dict[str, float]] = {lane: {} for lane in lanes}

    def open(self, simulation: Simulation) -> None:
        for worker, engine in enumerate(simulation.engines):
            flags = engine.flags
            sequences = min(MAX_SEQUENCES, flags.max_num_seqs)
            own_limits = self._limits if isinstance(self._limits, Capacity | None) else self._limits[worker]
            limits = own_limits or Capacity(sequences=sequences, kv_tokens=flags.kv_tokens)
            if worker in self._fixed:
                self._fixed[worker] = limits
            self.controllers.append(CapacityController(self._lanes, limits, flags.max_num_batched_tokens))
            self._streams.append({})
            self._next_counts_at.append(0.0)
            self._prompt_tokens.append(0)
        self._capacity = [
            self._fixed.get(worker, controller.capacity(0.0)) for worker, controller in enumerate(self.controllers)
        ]
        super().open(simulation)

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        self._waiting[job.lane][job.job_id] = job.arrived_at + job.ttft_allowance_s
        self._arrivals += 1
        live = self._simulation.live
        self.controllers[live[self._arrivals % len(live)]].arrived(job.lane, job.footprint, now)
        super()._offer(call, job, now)
        if job.job_id not in self._open:
            del self._waiting[job.lane][job.job_id]  # it was refused

    def first_token(self, call: Call, now: float) -> None:
        attempt, worker = self._open[call.job_id][1], call.worker or 0
        lane, prefill_tokens = attempt.job.lane, attempt.prefill_tokens
        stream = self.controllers[worker].first_token(lane, prefill_tokens, attempt.slo_start_at, now)
        self._streams[worker][call] = stream
        if isinstance(call.sequence, EngineSequence):
            self._prompt_tokens[worker] += call.sequence.prompt - call.sequence.cached_tokens
        super().first_token(call, now)

    def ended(self, call: Call, now: float) -> None:
        worker = call.worker or 0
        stream = self._streams[worker].pop(call, None)
        if stream is not None:
            self._update_stream_tokens(worker, call, stream, now)
        self.controllers[worker].ended(call.run.lane, stream, now)
        super().ended(call, now)

    def _apply(self, tick: Tick, now: float) -> None:
        super()._apply(tick, now)
        for plan in tick.plans:
            controller = self.controllers[int(plan.worker)]
            for job in plan.jobs:
                del self._waiting[job.lane][job.job_id]
                controller.sent(job.lane, self._open[job.job_id][1].prefill_tokens, now)

    def _compute_capacity(self, worker: int, engine: Engine, now: float) -> Capacity:
        for call, stream in self._streams[worker].items():
            self._update_stream_tokens(worker, call, stream, now)
        controller = self.controllers[worker]
        for lane, waiting in self._waiting.items():
            controller.waiting(lane, next(iter(waiting.values()), None))
        controller.observe(Load(engine.running, engine.waiting, engine.kv_tokens))
        if self._counts and now >= self._next_counts_at[worker]:
            self._next_counts_at[worker] = now + ENGINE_COUNTS_INTERVAL_S
            controller.observe_counts(
                EngineCounts(engine.steps, self._prompt_tokens[worker], engine.output_tokens), now
            )
        capacity = self._fixed.get(worker) or controller.capacity(now)
        self.capacity_samples.append((now, engine.steps, engine.busy_s, replace(capacity, direct=None)))
        return capacity

    def _close(self, job_id: str, end: End, now: float) -> None:
        self._waiting[self._open[job_id][1].job.lane].pop(job_id, None)
        super()._close(job_id, end, now)

    def _update_stream_tokens(self, worker: int, call: Call, stream: Stream, now: float) -> None:
        if isinstance(call.sequence, EngineSequence):
            stream.tokens = max(stream.tokens, self._simulation.engines[worker].output_tokens_at(call.sequence, now))
