"""The gateway in the simulator: the real scheduler, driven as dispatch drives it."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, QueueFull, QueueTimeout, WorkerLost
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import PROGRESS_INTERVAL_TOKENS, Ended, FirstToken, JobLocation, Produced, Tick
from inferry.domain.routes import BatchKey, OutputLength, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, End, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, KvPacking, Load, Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.scheduling.sessions import SessionLimits
from inferry.sim.calls import Call
from inferry.sim.engine import Engine
from inferry.sim.sequence import EngineSequence
from inferry.sim.simulation import Simulation

MODEL = "m"
EXPECTED_OUTPUT_TOKENS = 256
_LENGTHS: tuple[OutputLength | None, ...] = (None, "short", "long")
_ROUTES = {length: RouteKey(MODEL, length=length) for length in _LENGTHS}
_BATCH_KEYS = {route: BatchKey(route, streaming=True) for route in _ROUTES.values()}
_PAYLOAD = Payload(api="completions", body=b"", sampling=Sampling())
_FIRST_TOKEN = FirstToken()
_CLIENT_CLOSED = ClientClosed("the client closed the connection")

Estimator = Callable[[Call], Footprint]
CapacityFunction = Callable[[int, Engine, float], Capacity]
"""Worker number, engine as its metrics show it, and time to the capacity that the gateway may use."""


def gateway_estimate(call: Call) -> Footprint:
    """Exact prompt tokens (token ids were sent), no cached tokens, output up to the requested tokens."""
    output = call.step.output
    return Footprint(
        Estimate.exactly(call.prompt + call.produced),
        Estimate.exactly(0),
        Estimate(1, min(output, EXPECTED_OUTPUT_TOKENS), output),
    )


class GatewayFrontend:
    """Offer, tick, send; first tokens and ends are reported to the scheduler. One tick per instant, as in dispatch.

    `capacity` is one for all workers or one each. `groups`, `output_lengths` and `kv_packings` have an entry for each.
    With a `controller` the capacity of every worker is computed every `capacity_interval_s`; otherwise it is constant.
    With `sessions`, runs pause while their KV does not fit.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        capacity: Capacity | Sequence[Capacity],
        *,
        groups: Sequence[str] | None = None,
        output_lengths: Sequence[OutputLength | None] | None = None,
        kv_packings: Sequence[KvPacking] | None = None,
        estimate: Estimator = gateway_estimate,
        controller: CapacityFunction | None = None,
        capacity_interval_s: float = 0.25,
        hop_s: float = 0.0,
        sessions: SessionLimits | None = None,
        record: Callable[[LedgerEntry], None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(lanes, sessions=sessions)
        self._lanes = lanes
        self._capacity = capacity
        self._groups = groups
        self._output_lengths = output_lengths
        self._kv_packings = kv_packings
        self._estimate = estimate
        self._controller = controller
        self._capacity_interval_s = capacity_interval_s
        self._hop_s = hop_s
        self._record = record
        self._open: dict[str, tuple[Call, Attempt]] = {}
        self._tick_due = False
        self._wake_at: float | None = None
        self._updating = False
        self.refused = 0

    def open(self, simulation: Simulation) -> None:
        self._simulation = simulation
        for worker in range(len(simulation.engines)):
            self._observe(
                worker, self._capacity if isinstance(self._capacity, Capacity) else self._capacity[worker], 0.0
            )

    # Calls from agents.

    def dispatch(self, call: Call, now: float) -> None:
        lane, footprint = call.run.lane, self._estimate(call)
        route = _ROUTES[self._lanes[lane].output_length(footprint.output.expected)]
        job = InferenceJob(
            job_id=call.job_id,
            tenant=call.run.tenant,
            run_id=call.run.run_id,
            step_id=f"{call.index}-{call.step.name}",
            lane=lane,
            route=route,
            batch_key=_BATCH_KEYS[route],
            footprint=footprint,
            token_budget=call.step.output,
            prompt_hash="",
            arrived_at=now,
            ttft_allowance_s=self._lanes[lane].ttft_ms_per_1k_tokens * footprint.prefill_tokens / 1e6,
            max_wait_s=inf,  # the rules of its lane bound it
            payload=_PAYLOAD,
            stream=True,
            resume=ResumeMode.CONTINUE if self._lanes[lane].borrow_groups else ResumeMode.RESTART,
        )
        self._offer(call, job, now)

    def cancel(self, call: Call, now: float) -> None:
        if self.scheduler.cancel(call.job_id) is JobLocation.QUEUED:
            self._close(call.job_id, Failed(call.job_id, _CLIENT_CLOSED), now)
            self._request_tick(now)
        elif call.job_id in self._open:
            self._simulation.abort(call, now)

    # Events of engines.

    def first_token(self, call: Call, now: float) -> None:
        self._open[call.job_id][1].first_token(now)
        self.scheduler.progress(call.job_id, _FIRST_TOKEN, now)
        self._request_tick(now)

    def ended(self, call: Call, now: float) -> None:
        _, attempt = self._open[call.job_id]
        sequence = call.sequence
        if not isinstance(sequence, EngineSequence):
            self._close(call.job_id, Failed(call.job_id, WorkerLost("reset before the first byte")), now)
        elif call.evicted:
            self._requeue(call, attempt, sequence, now)
        elif call.cancelled:
            usage = Usage(call.prompt, sequence.cached_tokens, sequence.produced)
            self._close(call.job_id, Failed(call.job_id, _CLIENT_CLOSED, usage), now)
        else:
            usage = Usage(call.prompt, sequence.cached_tokens, sequence.produced)
            self._close(call.job_id, Done(call.job_id, FinishReason.LENGTH, usage), now)
        self._request_tick(now)

    # The loop.

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        attempt = Attempt(job)
        self._open[job.job_id] = (call, attempt)
        try:
            self.scheduler.offer(job, now)
        except QueueFull as refusal:
            self.refused += 1
            del self._open[job.job_id]
            retry = now + (refusal.retry_after_s or 1.0)
            self._simulation.events.at(
                retry, lambda when, call: None if call.cancelled else self.dispatch(call, when), call
            )
            return
        self._request_tick(now)
        if self._controller is not None and not self._updating:
            self._updating = True
            self._simulation.events.at(now, self._update_capacity)

    def _request_tick(self, now: float) -> None:
        if not self._tick_due:
            self._tick_due = True
            self._simulation.events.at(now, self._tick)

    def _tick(self, now: float, _: object) -> None:
        self._tick_due = False
        if self._kv_packings is not None and "timed" in self._kv_packings:
            self._report_produced(now)
        self._apply(self.scheduler.tick(now), now)

    def _report_produced(self, now: float) -> None:
        """Report the output of running calls, as often as dispatch does. Only timed packing needs it here."""
        for call, attempt in self._open.values():
            if call.first_at is not None and isinstance(call.sequence, EngineSequence) and call.worker is not None:
                output_tokens = self._simulation.engines[call.worker].output_tokens_at(call.sequence, now)
                if output_tokens >= attempt.reported_tokens + PROGRESS_INTERVAL_TOKENS:
                    step = Produced(output_tokens - attempt.reported_tokens)
                    attempt.reported_tokens = output_tokens
                    self.scheduler.progress(call.job_id, step, now)

    def _apply(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            worker = int(plan.worker)
            for job in plan.jobs:
                call, attempt = self._open[job.job_id]
                attempt.sent(plan, now)
                if self._hop_s:
                    self._simulation.events.at(now + self._hop_s, self._send, (call, worker))
                else:
                    self._simulation.send(call, worker, now)
        for job in tick.evictions:
            call, _ = self._open[job.job_id]
            call.evicted = True
            self._simulation.abort(call, now)
        for job in tick.expired:
            call, _ = self._open[job.job_id]
            self._close(job.job_id, Failed(job.job_id, QueueTimeout("the deadline passed in the queue")), now)
            self._simulation.reject(call, now, "expired")
        if tick.wake_at is not None and tick.wake_at != self._wake_at:
            self._wake_at = tick.wake_at
            self._simulation.events.at(tick.wake_at, self._wake, tick.wake_at)

    def _send(self, now: float, argument: tuple[Call, int]) -> None:
        self._simulation.send(argument[0], argument[1], now)

    def _wake(self, now: float, wake_at: float) -> None:
        if self._wake_at == wake_at:
            self._wake_at = None
            self._request_tick(now)

    def _requeue(self, call: Call, attempt: Attempt, sequence: EngineSequence, now: float) -> None:
        """A preempted attempt ends. The job is offered again with its output so far and its original arrival time."""
        usage = Usage(call.prompt, sequence.cached_tokens, sequence.produced)
        job = attempt.job
        self._close(call.job_id, Failed(call.job_id, WorkerLost("preempted"), usage), now)
        call.evicted = False
        call.sequence = None
        if call.cancelled:
            return
        call.produced += sequence.produced
        call.state = "new"
        self._offer(call, replace(job, attempt=job.attempt + 1, footprint=self._estimate(call)), now)

    def _close(self, job_id: str, end: End, now: float) -> None:
        _, attempt = self._open.pop(job_id)
        attempt.ended(end, now)
        usage = end.usage
        self.scheduler.progress(job_id, Ended(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens), now)
        if self._record is not None:
            self._record(attempt.entry(now))

    # Observed state.

    def _observe(self, worker: int, capacity: Capacity, now: float) -> None:
        engine = self._simulation.engines[worker]
        view = WorkerView(
            worker=str(worker),
            models=frozenset({MODEL}),
            phase=Phase.READY,
            capacity=capacity,
            observed_at=now,
            group="default" if self._groups is None else self._groups[worker],
            output_length=None if self._output_lengths is None else self._output_lengths[worker],
            kv_packing="sum" if self._kv_packings is None else self._kv_packings[worker],
            load=Load(engine.running, engine.waiting, engine.kv_tokens),
            kv_capacity=engine.flags.kv_tokens,
        )
        self.scheduler.observe(view, now)

    def _update_capacity(self, now: float, _: object) -> None:
        assert self._controller is not None
        for worker, engine in enumerate(self._simulation.engines):
            self._observe(worker, self._controller(worker, engine, now), now)
        self._request_tick(now)
        self._updating = bool(self._open)
        if self._updating:
            self._simulation.events.at(now + self._capacity_interval_s, self._update_capacity)
