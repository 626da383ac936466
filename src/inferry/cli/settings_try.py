"""Settings tried on recorded traffic in the simulator: what each version would do to attainment, latency and cost."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from inferry.cli.config.schema import Config
from inferry.cli.simulate_setup import Arm, drop_oversized, gateway_arm, simulated_workers
from inferry.domain.lanes import Lane
from inferry.domain.prices import Price
from inferry.domain.run_split import RunSplit
from inferry.domain.traffic import RecordedCall
from inferry.scheduling.lane_switch import LaneTrial
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineFlags, EngineModel
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.gpu_shares import gpu_seconds
from inferry.sim.recorded_traffic import (
    LaneMeasurement,
    LanePrediction,
    fitted_model,
    measured_lanes,
    recorded_runs,
)
from inferry.sim.report import attains, quantile
from inferry.sim.simulation import Frontend, Simulation
from inferry.sim.workload import SimulationSetupError, SloTarget, slo_targets_for

SALT = "prediction"
"""Which runs a simulated trial takes is the same every time."""
MIN_LANE_CALLS = 30
"""Calls from which a lane's prediction can stop an apply."""
FAR_TTFT = 2.0
"""Ratio of simulated and recorded median TTFT from which the simulation is called far from the measurement."""
FAR_ATTAINMENT = 0.05


class Prediction(Struct, frozen=True, kw_only=True):
    """Both versions on the same traffic, by lane, beside what the ledger `measured`.

    `left_out`: runs that exceed the KV capacity of an engine.
    """

    calls: int
    left_out: int
    model: str
    measured: dict[str, LaneMeasurement]
    current: dict[str, LanePrediction]
    new: dict[str, LanePrediction]

    def far_lanes(self) -> list[str]:
        """Lanes whose current version is simulated far from the measurement."""
        return [
            lane for lane, one in self.current.items() if lane in self.measured and _is_far(one, self.measured[lane])
        ]

    def falling_lanes(self, max_drop: float) -> list[str]:
        """Lanes with enough calls whose attainment would fall by more than this."""
        return [
            lane
            for lane, before in self.current.items()
            if (after := self.new.get(lane)) is not None
            and min(before.calls, after.calls) >= MIN_LANE_CALLS
            and before.attainment - after.attainment > max_drop
        ]


def _is_far(simulated: LanePrediction, measured: LaneMeasurement) -> bool:
    if measured.attainment is not None and abs(simulated.attainment - measured.attainment) > FAR_ATTAINMENT:
        return True
    if not simulated.ttft_p50 or not measured.ttft_p50:
        return False
    return not 1 / FAR_TTFT <= simulated.ttft_p50 / measured.ttft_p50 <= FAR_TTFT


def predict(
    current: Config,
    new: Config,
    calls: Sequence[RecordedCall],
    model: EngineModel | None = None,
    share: float | None = None,
) -> Prediction:
    """Play the calls with both versions: each with all runs, or in a trial that gives a `share` of them the new one.

    Attainment of both is measured against the targets of the current version. Without a model the engine's costs are
    fitted to the calls. GPU time is scaled so that the current version has what the ledger recorded. Raises
    SimulationSetupError.
    """
    model = model or fitted_model(calls, EngineFlags())
    if model is None:
        raise SimulationSetupError(
            f"the ledger has {len(calls)} calls of that time, too few to fit an engine model: "
            "name one with --model, or apply without a simulation (--no-try)"
        )
    targets = slo_targets_for(current.lane_policies())
    arms = [
        gateway_arm(name, config.lane_policies(), simulated_workers(config, model), config.sessions.limits())
        for name, config in (("current", current), ("new", new))
    ]
    runs = recorded_runs(calls)
    fitting = drop_oversized(runs, arms)
    if not fitting:
        raise SimulationSetupError("no recorded call fits the KV capacity of the engines")
    prices, named = current.price_list(), {call.model for call in calls}
    price = next((prices[one] for one in named if one in prices), prices.get("*"))
    alone = _play(fitting, arms[0], arms[0].frontend(), model, targets)
    tally = partial(_tally, model=model, targets=targets, price=price, gpu_scale=_gpu_scale(alone, calls))
    if share is None or share == 1:
        before, after = tally(alone), tally(_play(fitting, arms[1], arms[1].frontend(), model, targets))
    else:
        frontend, split = arms[0].frontend(), RunSplit(SALT, share)
        assert isinstance(frontend, GatewayFrontend)
        frontend.scheduler.use_lanes(current.lane_policies(), 1, LaneTrial(new.lane_policies(), 2, split))
        simulation = _play(fitting, arms[0], frontend, model, targets)
        before = tally(simulation, is_counted=lambda row: not split.takes(row.tenant, row.run))
        after = tally(simulation, is_counted=lambda row: split.takes(row.tenant, row.run))
    left_out = len(runs) - len(fitting)
    measured = measured_lanes(calls, in_money=price is not None)
    return Prediction(
        calls=len(calls), left_out=left_out, model=model.name, measured=measured, current=before, new=after
    )


def _play(
    runs: Sequence[Run], arm: Arm, frontend: Frontend, model: EngineModel, targets: Mapping[Lane, SloTarget]
) -> Simulation:
    simulation = Simulation(
        frontend,
        model.costs,
        arm.flags,
        itl_s={lane: one.itl_s for lane, one in targets.items()},
        ttft_s_per_1k_tokens={lane: one.ttft_s_per_1k_tokens for lane, one in targets.items()},
    )
    simulation.play(runs)
    return simulation


def _tally(
    simulation: Simulation,
    *,
    model: EngineModel,
    targets: Mapping[Lane, SloTarget],
    price: Price | None,
    gpu_scale: float,
    is_counted: Callable[[CallRow], bool] = lambda row: True,
) -> dict[str, LanePrediction]:
    """The lanes' figures."""
    seconds = gpu_seconds(simulation.rows, model.costs, simulation.busy_s)
    rows = [(row, gpu_s) for row, gpu_s in zip(simulation.rows, seconds, strict=True) if is_counted(row)]
    found: dict[str, LanePrediction] = {}
    for lane in Lane:
        mine = [row for row, _ in rows if row.lane is lane]
        if mine:
            gpu_s = gpu_scale * sum(gpu_s for row, gpu_s in rows if row.lane is lane)
            found[lane.name] = _lane(mine, targets[lane].ttft_s, price, gpu_s)
    return found


def _gpu_scale(current: Simulation, calls: Sequence[RecordedCall]) -> float:
    """Recorded GPU time of an output token over the simulated one; 1 where the ledger has none."""
    known = [call for call in calls if call.gpu_seconds is not None]
    recorded, tokens = sum(call.gpu_seconds or 0.0 for call in known), sum(call.output_tokens for call in known)
    simulated, produced = sum(current.busy_s), sum(row.produced for row in current.rows)
    if not recorded or not tokens or not simulated or not produced:
        return 1.0
    return (recorded / tokens) / (simulated / produced)


def _lane(rows: Sequence[CallRow], ttft_s: float, price: Price | None, gpu_s: float) -> LanePrediction:
    tokens, firsts = max(1, sum(row.produced for row in rows)), [row.ttft_s for row in rows if row.ttft_s is not None]
    if price is None:
        cost = gpu_s
    elif price.is_per_token:
        cost = sum(price.nanos(row.prompt, row.cached, row.produced) for row in rows) / 1e9
    else:
        cost = price.nanos(0, 0, 0, gpu_s) / 1e9
    return LanePrediction(
        calls=len(rows),
        attainment=sum(attains(row, ttft_s) for row in rows) / len(rows),
        ttft_p50=quantile(firsts, 0.5),
        ttft_p95=quantile(firsts, 0.95),
        throughput=tokens / max(1e-9, sum(row.end_s for row in rows)),
        cost=1000 * cost / tokens,
    )
