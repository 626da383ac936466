"""The gateway with a room controller for every worker, fed as dispatch feeds it."""

from collections.abc import Callable, Mapping, Sequence

from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Tick
from inferry.domain.streams import End
from inferry.domain.workers import EngineCounts, Load, Room
from inferry.scheduling.controller import RoomController, Stream
from inferry.sim.calls import Call
from inferry.sim.engine import Engine
from inferry.sim.engine import Sequence as EngineSequence
from inferry.sim.gateway import GatewayDoor, as_the_gateway_sees_it
from inferry.sim.world import World

LOOK_S = 0.05
COUNT_S = 0.5
"""How often an engine says what it has done."""
MAX_SEQUENCES = 256


class KnowsPrefixes:
    """What a gateway that remembers the beginnings of prompts expects to be cached: what a tenant has sent before."""

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def __call__(self, call: Call) -> Footprint:
        plain = as_the_gateway_sees_it(call)
        chain = hash(call.run.tenant)
        tokens = cached = 0
        known = True
        for piece in call.step.prompt:
            chain = hash((chain, piece))
            tokens += piece[2]
            known = known and chain in self._sent
            if known:
                cached = tokens
            else:
                self._sent.add(chain)
        return Footprint(plain.prompt, Estimate.exactly(min(cached, call.prompt - 1)), plain.output)


class ControlledDoor(GatewayDoor):
    """Every worker's room is computed anew every `LOOK_S` from what the gateway has seen of it.

    `limits` are what a worker can hold at most, all alike or one for each; without them the engine's KV and the default
    number of sequences. Workers in `fixed` always have all of it. `counts` says whether engines tell what they have
    done, as vLLM does in its metrics: a prompt counts there, all of it, when its first token comes.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        *,
        limits: Room | Sequence[Room] | None = None,
        fixed: Sequence[int] = (),
        groups: Sequence[str] | None = None,
        estimate: Callable[[Call], Footprint] | None = None,
        counts: bool = True,
    ) -> None:
        super().__init__(
            lanes, Room(), groups=groups, estimate=estimate or KnowsPrefixes(), controller=self._look, beat_s=LOOK_S
        )
        self._limits = limits
        self._counts = counts
        self._count_at: list[float] = []
        self._prompt_tokens: list[int] = []
        self._fixed: dict[int, Room] = dict.fromkeys(fixed, Room())
        self.controllers: list[RoomController] = []
        self.looks: list[tuple[float, int, float, Room]] = []
        self._streams: list[dict[Call, Stream]] = []
        self._waiting: dict[Lane, dict[str, float]] = {lane: {} for lane in lanes}

    def open(self, world: World) -> None:
        for worker, engine in enumerate(world.engines):
            flags = engine.flags
            sequences = min(MAX_SEQUENCES, flags.max_num_seqs)
            own = self._limits if isinstance(self._limits, Room | None) else self._limits[worker]
            limits = own or Room(sequences=sequences, kv_tokens=flags.kv_tokens)
            if worker in self._fixed:
                self._fixed[worker] = limits
            self.controllers.append(RoomController(self._lanes, limits, flags.max_num_batched_tokens))
            self._streams.append({})
            self._count_at.append(0.0)
            self._prompt_tokens.append(0)
        self._room = [
            self._fixed.get(worker, controller.room(0.0)) for worker, controller in enumerate(self.controllers)
        ]
        super().open(world)

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        self._waiting[job.lane][job.job_id] = job.arrived_at
        super()._offer(call, job, now)
        if job.job_id not in self._open:
            del self._waiting[job.lane][job.job_id]  # it was refused

    def first(self, call: Call, now: float) -> None:
        job, worker = self._open[call.job_id][1].job, call.worker or 0
        prefill_tokens = job.footprint.prefill_tokens
        stream = self.controllers[worker].first_token(job.lane, prefill_tokens, job.arrived_at, now)
        self._streams[worker][call] = stream
        if isinstance(call.sequence, EngineSequence):
            self._prompt_tokens[worker] += call.sequence.prompt - call.sequence.cached_tokens
        super().first(call, now)

    def ended(self, call: Call, now: float) -> None:
        worker = call.worker or 0
        stream = self._streams[worker].pop(call, None)
        if stream is not None:
            self._count(worker, call, stream, now)
        self.controllers[worker].ended(call.run.lane, stream, now)
        super().ended(call, now)

    def _act(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            controller = self.controllers[int(plan.worker)]
            for job in plan.jobs:
                del self._waiting[job.lane][job.job_id]
                controller.sent(job.lane, job.footprint.prefill_tokens, now)
        super()._act(tick, now)

    def _look(self, worker: int, engine: Engine, now: float) -> Room:
        for call, stream in self._streams[worker].items():
            self._count(worker, call, stream, now)
        controller = self.controllers[worker]
        for lane, waiting in self._waiting.items():
            controller.waiting(lane, next(iter(waiting.values()), None))
        controller.observe(Load(engine.running, engine.waiting, engine.kv_tokens))
        if self._counts and now >= self._count_at[worker]:
            self._count_at[worker] = now + COUNT_S
            controller.count(EngineCounts(engine.steps, self._prompt_tokens[worker], engine.output_tokens), now)
        room = self._fixed.get(worker) or controller.room(now)
        self.looks.append((now, engine.steps, engine.busy_s, room))
        return room

    def _close(self, job_id: str, end: End, now: float) -> None:
        self._waiting[self._open[job_id][1].job.lane].pop(job_id, None)
        super()._close(job_id, end, now)

    def _count(self, worker: int, call: Call, stream: Stream, now: float) -> None:
        if isinstance(call.sequence, EngineSequence):
            stream.tokens = max(stream.tokens, self._world.engines[worker].written(call.sequence, now))
