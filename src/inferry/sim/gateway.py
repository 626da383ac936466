"""The gateway in the simulator: the real scheduler, driven as dispatch drives it."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, GatewayError, Preempted, QueueFull, QueueTimeout, WorkerLost
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode, ResumePoint
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import PROGRESS_INTERVAL_TOKENS, Ended, FirstToken, JobLocation, Produced, Tick
from inferry.domain.recovery import next_attempt
from inferry.domain.routes import BatchKey, OutputLength, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, End, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, KvPacking, Load, Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.scheduling.sessions import SessionLimits
from inferry.sim.calls import MODEL, Call
from inferry.sim.engine import Engine
from inferry.sim.length_predictor import LengthPredictor, requested_tokens, template_of
from inferry.sim.sequence import EngineSequence
from inferry.sim.simulation import Simulation

EXPECTED_OUTPUT_TOKENS = 256
_LENGTHS: tuple[OutputLength | None, ...] = (None, "short", "long")
_ROUTES = {length: RouteKey(MODEL, length=length) for length in _LENGTHS}
_BATCH_KEYS = {route: BatchKey(route, streaming=True) for route in _ROUTES.values()}
_PAYLOAD = Payload(api="completions", body=b"", sampling=Sampling())
_FIRST_TOKEN = FirstToken()
_CLIENT_CLOSED = ClientClosed("the client closed the connection")

Estimator = Callable[[Call], Footprint]
OutputEstimator = Callable[[Call], Estimate]
PrefixFunction = Callable[[Call], tuple[str, ...]]
"""The beginnings of a call's prompt that its job names, shortest first."""
CapacityFunction = Callable[[int, Engine, float], Capacity]
"""Worker number, engine as its metrics show it, and time to the capacity that the gateway may use."""


def capped_output(call: Call) -> Estimate:
    """The call's own output, of which at most `EXPECTED_OUTPUT_TOKENS` are expected."""
    output = call.step.output
    return Estimate(1, min(output, EXPECTED_OUTPUT_TOKENS), output)


def gateway_estimate(call: Call, output_of: OutputEstimator = capped_output) -> Footprint:
    """Exact prompt tokens (token ids were sent), no cached tokens."""
    return Footprint(Estimate.exactly(call.prompt + call.produced), Estimate.exactly(0), output_of(call))


class GatewayFrontend:
    """Offer, tick, send; first tokens and ends are reported to the scheduler. One tick per instant, as in dispatch.

    `capacity` is one for all workers or one each. `groups`, `output_lengths` and `kv_packings` have an entry for each.
    With a `controller` the capacity of every worker is computed every `capacity_interval_s`; otherwise it is constant.
    With `sessions`, runs pause while their KV does not fit. Without `prefix_of`, jobs name no beginnings of their
    prompts, and the scheduler does not know what engines have cached. A `predictor` gets the ends of calls to learn
    from; without one, clients request exactly the tokens that a call writes.
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
        predictor: LengthPredictor | None = None,
        prefix_of: PrefixFunction | None = None,
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
        self.predictor = predictor
        self._prefix_of = prefix_of
        self._controller = controller
        self._capacity_interval_s = capacity_interval_s
        self._hop_s = hop_s
        self._record = record
        self._open: dict[str, tuple[Call, Attempt]] = {}
        self._tick_due = False
        self._wake_at: float | None = None
        self._updating = False
        self.refused = 0
        # Jobs of these lanes can be preempted after their first token.
        self._resuming = {lane for lane, policy in lanes.items() if policy.borrow_groups or lane in policy.may_preempt}
        is_timed = kv_packings is not None and "timed" in kv_packings
        self._reports_output = is_timed or any(lane in policy.may_preempt for lane, policy in lanes.items())

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
            token_budget=call.step.output if self.predictor is None else requested_tokens(call),
            prompt_hash="",
            prefix=() if self._prefix_of is None else self._prefix_of(call),
            arrived_at=now,
            ttft_allowance_s=self._lanes[lane].ttft_ms_per_1k_tokens * footprint.prefill_tokens / 1e6,
            max_wait_s=inf,  # the rules of its lane bound it
            payload=_PAYLOAD,
            stream=True,
            template_id=None if self.predictor is None else template_of(call),
            resume=ResumeMode.CONTINUE if lane in self._resuming else ResumeMode.RESTART,
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
        sequence, usage = call.sequence, Usage()
        if isinstance(sequence, EngineSequence):
            usage = Usage(call.prompt, sequence.cached_tokens, sequence.produced)
        if call.cancelled:
            self._close(call.job_id, Failed(call.job_id, _CLIENT_CLOSED, usage), now)
        elif call.evicted or call.worker_lost:
            self._retry(call, Preempted("preempted") if call.evicted else WorkerLost("the engine is gone"), usage, now)
        elif sequence is None:
            self._close(call.job_id, Failed(call.job_id, WorkerLost("reset before the first byte")), now)
        else:
            finish = FinishReason.LENGTH if self.predictor is None else FinishReason.STOP
            self._close(call.job_id, Done(call.job_id, finish, usage), now)
        self._request_tick(now)

    def engine_lost(self, worker: int, now: float) -> None:
        self._observe(worker, Capacity(), now, Phase.DOWN)
        self._request_tick(now)

    # The loop.

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        attempt = Attempt(job)
        itl_ms = self._lanes[job.lane].itl_ms
        if job.resume_point is not None and itl_ms is not None:
            attempt.slo_start_at += len(job.resume_point.output_ids) * itl_ms / 1000
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
        if self._reports_output:
            self._report_produced(now)
        self._apply(self.scheduler.tick(now), now)

    def _report_produced(self, now: float) -> None:
        """Report the output of running calls, as often as dispatch does, where decisions depend on it."""
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
                attempt.decision = self.scheduler.decision(job.job_id, now)
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

    def _retry(self, call: Call, error: GatewayError, usage: Usage, now: float) -> None:
        """End the attempt, and offer the job again as dispatch does, with its output so far."""
        _, attempt = self._open[call.job_id]
        point = None
        if attempt.first_token_at is not None:
            attempt.output_tokens = usage.output_tokens
            point = ResumePoint((0,) * call.prompt, (0,) * (call.produced + usage.output_tokens))
        end = Failed(call.job_id, error, usage, point)
        self._close(call.job_id, end, now)
        retry = next_attempt(attempt, end)
        if retry is None:
            return
        call.evicted = call.worker_lost = False
        if isinstance(retry, Done):
            return
        produced = 0 if retry.job.resume_point is None else len(retry.job.resume_point.output_ids)
        if produced >= call.step.output:
            return  # complete, although its client requested more
        call.sequence, call.produced = None, produced
        call.state = "new"
        self._offer(call, retry.job, now)

    def _close(self, job_id: str, end: End, now: float) -> None:
        _, attempt = self._open.pop(job_id)
        attempt.ended(end, now)
        if self.predictor is not None:
            self.predictor.ended(attempt, now)
        usage = end.usage
        self.scheduler.progress(job_id, Ended(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens), now)
        if self._record is not None:
            self._record(attempt.entry(now))

    # Observed state.

    def _observe(self, worker: int, capacity: Capacity, now: float, phase: Phase = Phase.READY) -> None:
        engine = self._simulation.engines[worker]
        view = WorkerView(
            worker=str(worker),
            models=frozenset({MODEL}),
            phase=phase,
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
        for worker in self._simulation.live:
            self._observe(worker, self._controller(worker, self._simulation.engines[worker], now), now)
        self._request_tick(now)
        self._updating = bool(self._open)
        if self._updating:
            self._simulation.events.at(now + self._capacity_interval_s, self._update_capacity)
