"""What lanes, coalescing and affinity would have changed for observed calls, by simulation.

Every call is played at the time it arrived, with its tokens. Calls whose prompts began alike share these tokens. The
arms differ in one step each: direct to the engines; lanes in the gateway; with batching windows; with affinity.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.observed import SLICE_BYTES, observed_fields
from inferry.domain.values import replace
from inferry.sim.baselines import Direct
from inferry.sim.calls import Call, Run, Step
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import EngineModel
from inferry.sim.prompts import Piece
from inferry.sim.report import Report, report
from inferry.sim.simulation import Frontend, Simulation
from inferry.sim.sizing import NoFeasibleFleet, smallest_fleet
from inferry.sim.workload import SloTarget

HOURS_A_MONTH = 730
DIRECT, LANES, COALESCING, AFFINITY = "direct", "lanes", "lanes, coalescing", "lanes, coalescing, affinity"


class ArmFigures(Struct, frozen=True, kw_only=True):
    """One arm at the number of GPUs that served the calls. `attainment` is by lane, and over all calls in `all`."""

    name: str
    attainment: dict[str, float]
    gpu_seconds: float
    ttft_p95_s: dict[str, float | None]


class Need(Struct, frozen=True, kw_only=True):
    """GPUs that attain the target in every lane, None where `max_gpus` do not; and their price for 730 hours."""

    gpus: int | None
    per_month: float | None


class ObserveReport(Struct, frozen=True, kw_only=True):
    """What `--json` prints. `observed_attainment`: as measured on the wire, by lane. `before` is the direct arm.
    `model` is the engine that the arms and the numbers of GPUs assume."""

    calls: int
    left_out: int
    seconds: float
    gpus: int
    target: float
    price_per_hour: float | None
    model: str
    observed_attainment: dict[str, float]
    estimated_tokens: float
    arms: tuple[ArmFigures, ...]
    before: Need
    after: Need


class AffinityFrontend(ControlledFrontend):
    """The gateway, whose jobs name the beginnings of their prompts: calls that begin alike go to the same worker."""

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        segments = [str(segment) for segment, _, _ in call.step.prompt[:-1]]
        super()._offer(call, replace(job, prefix=tuple(segments)) if segments else job, now)


def observed_runs(entries: Sequence[LedgerEntry]) -> list[Run]:
    """The calls as runs of one step each, from the first arrival on. Failed and cancelled calls are left out."""
    calls = [entry for entry in entries if entry.outcome is Outcome.DONE and entry.prompt_tokens > 0]
    begin = min((_arrived_at(entry) for entry in calls), default=0.0)
    runs = [
        Run(
            run_id=entry.job_id,
            tenant=entry.tenant,
            lane=Lane[entry.lane],
            at=_arrived_at(entry) - begin,
            steps=(Step("observed", _pieces(entry, number), max(1, entry.output_tokens)),),
        )
        for number, entry in enumerate(calls)
    ]
    return sorted(runs, key=lambda run: run.at)


def _arrived_at(entry: LedgerEntry) -> float:
    return entry.ended_at - entry.total_ms / 1000


def _pieces(entry: LedgerEntry, number: int) -> tuple[Piece, ...]:
    """A piece for every slice of the prompt that was hashed, and one of its own for the rest."""
    fields = observed_fields(entry)
    tokens = entry.prompt_tokens
    if fields is None or not fields.prefix or not fields.prompt_bytes:
        return ((-1 - number, 0, tokens),)
    per_slice = int(tokens * SLICE_BYTES / fields.prompt_bytes)
    shared = [(int(name[:15], 16), 0, per_slice) for name in fields.prefix if per_slice]
    while shared and per_slice * len(shared) >= tokens:
        shared.pop()
    return (*shared, (-1 - number, 0, tokens - per_slice * len(shared)))


class Comparison:
    """Plays observed calls through the arms."""

    def __init__(
        self,
        runs: Sequence[Run],
        model: EngineModel,
        lanes: Mapping[Lane, LanePolicy],
        slo_targets: Mapping[Lane, SloTarget],
        on_play: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._runs = runs
        self._model = model
        self._lanes = lanes
        self._itl_s = {lane: one.itl_s for lane, one in slo_targets.items()}
        self._ttft_s = {lane: one.ttft_s for lane, one in slo_targets.items()}
        self._per_1k_s = {lane: one.ttft_s_per_1k_tokens for lane, one in slo_targets.items()}
        self._on_play = on_play

    def play(self, arm: str, gpus: int) -> tuple[Report, float]:
        """The report of an arm, and its GPU-seconds."""
        self._on_play(f"{arm}, {gpus} GPUs")
        flags = self._model.flags
        if arm == DIRECT:
            flags = replace(flags, policy="fcfs")
        simulation = Simulation(
            self._frontend(arm),
            self._model.costs,
            flags,
            workers=gpus,
            itl_s=self._itl_s,
            ttft_s_per_1k_tokens=self._per_1k_s,
        )
        simulation.play(self._runs)
        return report(simulation, arm, self._ttft_s), sum(simulation.busy_s)

    def figures(self, arm: str, gpus: int) -> ArmFigures:
        found, gpu_seconds = self.play(arm, gpus)
        lanes = found.lanes
        attained = sum(one.attained for one in lanes.values()) / max(1, sum(one.planned for one in lanes.values()))
        return ArmFigures(
            name=arm,
            attainment={**{name: one.attainment for name, one in lanes.items()}, "all": attained},
            gpu_seconds=gpu_seconds,
            ttft_p95_s={name: one.ttft_p95 for name, one in lanes.items()},
        )

    def need(self, arm: str, target: float, max_gpus: int, price_per_hour: float | None) -> Need:
        try:
            gpus = smallest_fleet(lambda count, seed: self.play(arm, count)[0], (0,), target, max_gpus).workers
        except NoFeasibleFleet:
            return Need(gpus=None, per_month=None)
        return Need(gpus=gpus, per_month=None if price_per_hour is None else gpus * price_per_hour * HOURS_A_MONTH)

    def _frontend(self, arm: str) -> Frontend:
        if arm == DIRECT:
            return Direct()
        if arm == LANES:
            lanes = {lane: replace(policy, window="off") for lane, policy in self._lanes.items()}
            return ControlledFrontend(lanes, names_prefixes=False)
        frontend = AffinityFrontend if arm == AFFINITY else ControlledFrontend
        return frontend(self._lanes, names_prefixes=False)


def observed_attainment(entries: Sequence[LedgerEntry]) -> dict[str, float]:
    """The share of calls that met their lane's targets on the wire."""
    found: dict[str, list[bool]] = {}
    for entry in entries:
        if entry.attained is not None:
            found.setdefault(entry.lane, []).append(entry.attained)
    return {lane: sum(values) / len(values) for lane, values in sorted(found.items())}


def estimated_share(entries: Sequence[LedgerEntry]) -> float:
    """The share of calls whose tokens are estimates, because the server reported no usage."""
    fields = [found for entry in entries if (found := observed_fields(entry)) is not None]
    return sum(one.is_estimated for one in fields) / len(fields) if fields else 0.0
