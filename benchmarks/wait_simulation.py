"""The simulator's gateway with a wait model: every job gets a prediction on arrival, as in the dispatch loop."""

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.wait_arrivals import Arrivals
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.plans import Tick
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.prediction.wait_model import FLOOR_S, NOTHING_AHEAD, WaitModel
from inferry.prediction.wait_prediction import WaitPrediction
from inferry.sim.calls import Call, Run
from inferry.sim.costs import load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.simulation import Simulation


class Outcome(Struct, frozen=True, gc=False):
    """A job's prediction and its wait. `is_over` is False for a job that was still queued after `waited_s`."""

    prediction: WaitPrediction
    waited_s: float
    is_over: bool = True

    @property
    def is_evaluated(self) -> bool:
        return self.prediction.p90_s > FLOOR_S

    @property
    def is_covered(self) -> bool:
        return self.waited_s <= max(FLOOR_S, self.prediction.p90_s)


class PredictingFrontend(GatewayFrontend):
    """The gateway with a wait model, fed as the dispatch loop feeds it."""

    def __init__(self, lanes: dict[Lane, LanePolicy], capacity: Capacity) -> None:
        super().__init__(lanes, capacity)
        self.depth = QueueDepth()
        self.waits = WaitModel(self.depth)
        self.outcomes: list[Outcome] = []
        self._predictions: dict[str, WaitPrediction] = {}

    def predict(self, job: InferenceJob, now: float) -> WaitPrediction:
        lane, footprint, waits = job.lane, job.footprint, self.waits
        ahead = self.scheduler.ahead(lane, job.tenant) if waits.has_queue_ahead(lane) else NOTHING_AHEAD
        return waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        prediction = self.predict(job, now)
        refused = self.refused
        super()._offer(call, job, now)
        if self.refused == refused:
            self.depth.add(job.lane, prediction.prompt_tokens, prediction.output_tokens)
            self.waits.queued(prediction, now)
            self._predictions[job.job_id] = prediction

    def _apply(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            for job in plan.jobs:
                prediction = self._predictions.pop(job.job_id)
                self.depth.remove(prediction.lane, prediction.prompt_tokens, prediction.output_tokens)
                self.waits.sent(prediction, now)
                if job.attempt == 1:
                    self.outcomes.append(Outcome(prediction, now - prediction.at))
        super()._apply(tick, now)

    def cancel(self, call: Call, now: float) -> None:
        prediction = self._predictions.pop(call.job_id, None)
        if prediction is not None:
            self.depth.remove(prediction.lane, prediction.prompt_tokens, prediction.output_tokens)
            self.waits.left(prediction, now)
        super().cancel(call, now)

    def all_outcomes(self, now: float) -> list[Outcome]:
        """With the jobs still queued that have exceeded their P90. Other queued jobs are undecided and left out."""
        waiting = [Outcome(prediction, now - prediction.at, False) for prediction in self._predictions.values()]
        return self.outcomes + [one for one in waiting if not one.is_covered]


def play(runs: Sequence[Run], limits: dict[Lane, int] | None = None, until: float | None = None) -> PredictingFrontend:
    model = load_model()
    lanes = dict(DEFAULT_LANES)
    if limits is not None:
        lanes = {lane: replace(policy, queue_limit=limits[lane]) for lane, policy in lanes.items()}
    frontend = PredictingFrontend(lanes, Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, 3072))
    Simulation(frontend, model.costs, model.flags).play(runs, until)
    return frontend


def evaluated_outcomes(
    make: Arrivals,
    intensity: float,
    seed: int,
    limits: dict[Lane, int] | None,
    seconds: float,
    evaluated_s: tuple[float, float],
) -> list[Outcome]:
    frontend = play(make(seed, intensity, seconds), limits, seconds)
    return [one for one in frontend.all_outcomes(seconds) if evaluated_s[0] <= one.prediction.at < evaluated_s[1]]


def full_load(make: Arrivals, overload_intensity: float, seconds: float = 20.0) -> float:
    """The intensity at which the arrival rate equals the engine's service rate under a permanent backlog."""
    runs = make(1, overload_intensity, seconds)
    calls = sum(len(run.steps) for run in runs)
    model = load_model()
    simulation = Simulation(
        GatewayFrontend(dict(DEFAULT_LANES), Capacity(model.flags.max_num_seqs, model.flags.kv_tokens, 3072)),
        model.costs,
        model.flags,
    )
    simulation.play(runs)
    ended = max(row.at + row.end_s for row in simulation.rows)
    return overload_intensity * (calls / ended) / (calls / seconds)
