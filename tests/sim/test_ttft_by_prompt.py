"""`ttft_ms_per_1k_tokens`: the TTFT target grows with the uncached part of the prompt."""

import pytest

from inferry.cli.simulate_setup import direct_arms, gateway_arm, simulated_workers
from inferry.domain.attempts import Attempt
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.costs import load_model
from inferry.sim.report import attains
from inferry.sim.simulation import Simulation
from inferry.sim.workload import SimulationSetupError, SloTarget, slo_targets_for
from support.builders import a_job

MODEL = load_model()
RUNS = list(poisson(1, 0.2, 60.0, uniform_lengths((20_000, 30_000), (10, 20)), lane=Lane.P0))


def test_a_prompt_that_cannot_meet_the_plain_target_meets_one_that_fits_its_length() -> None:
    arm = direct_arms(MODEL, 1)[1]
    attained = []
    for per_1k_s in (0.0, 0.1):
        simulation = Simulation(arm.frontend(), MODEL.costs, arm.flags, ttft_s_per_1k_tokens={Lane.P0: per_1k_s})
        simulation.play(RUNS)
        attained.append(sum(attains(row, 0.5) for row in simulation.rows))
    assert attained == [0, len(RUNS)]


def test_the_gateway_counts_the_target_from_the_end_of_the_allowance() -> None:
    job = replace(a_job("a", at=1.0), ttft_allowance_s=0.75)
    assert Attempt(job).slo_start_at == 1.75
    lanes = DEFAULT_LANES | {Lane.P0: replace(DEFAULT_LANES[Lane.P0], ttft_ms_per_1k_tokens=100.0)}
    arm = gateway_arm("gateway", lanes, simulated_workers(None, MODEL))
    simulation = Simulation(arm.frontend(), MODEL.costs, arm.flags, ttft_s_per_1k_tokens={Lane.P0: 0.1})
    simulation.play(RUNS)
    assert all(attains(row, 0.5) for row in simulation.rows)


def test_the_targets_of_a_lane_and_of_an_option_have_it() -> None:
    lanes = {Lane.P0: replace(DEFAULT_LANES[Lane.P0], ttft_ms_per_1k_tokens=40.0)}
    assert slo_targets_for(lanes)[Lane.P0] == SloTarget(0.5, 0.03, 0.04)
    assert slo_targets_for(lanes, ["P0=600,30"])[Lane.P0] == SloTarget(0.6, 0.03)
    assert slo_targets_for(lanes, ["P0=600,30,20"])[Lane.P0] == SloTarget(0.6, 0.03, 0.02)


@pytest.mark.parametrize("text", ["P0=500", "P0=500,30,-1", "P0=500,30,1,1", "P0=500,30,x"])
def test_a_malformed_option_is_refused(text: str) -> None:
    with pytest.raises(SimulationSetupError, match="--slo"):
        slo_targets_for(DEFAULT_LANES, [text])
