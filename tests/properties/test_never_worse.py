"""The gateway beside the engine alone, on small random workloads in virtual time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.never_worse import Rows, compare, in_lanes, play
from inferry.cli.simulate_setup import direct_arms, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import load_model
from inferry.sim.report import quantile
from inferry.sim.simulation import Simulation

MODEL = load_model()
ARMS = (gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, MODEL)), direct_arms(MODEL, 1)[1])
NOISE_S = 0.5
"""With few calls a percentile is one call, and the gateway learns the costs of the engine first."""


def played(runs: list[Run]) -> list[list[CallRow]]:
    rows = []
    for arm in ARMS:
        simulation = Simulation(arm.frontend(), MODEL.costs, arm.flags)
        simulation.play(runs)
        rows.append(simulation.rows)
    return rows


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(0.5, 12.0), st.sampled_from([1_000, 4_000, 16_000]), st.sampled_from([20, 200])
)
def test_no_lane_waits_twice_as_long_as_in_the_engine_alone(
    seed: int, rate: float, prompt_tokens: int, output_tokens: int
) -> None:
    lengths = uniform_lengths((100, prompt_tokens), (1, output_tokens))
    runs = in_lanes(list(poisson(seed, rate, 15.0, lengths)), seed)
    ours, theirs = played(runs)
    for lane in DEFAULT_LANES:
        gateway = quantile([row.ttft_s for row in ours if row.lane is lane and row.ttft_s is not None], 0.95)
        direct = quantile([row.ttft_s for row in theirs if row.lane is lane and row.ttft_s is not None], 0.95)
        assert gateway is None or direct is None or gateway <= 2.0 * direct + NOISE_S


def medium_prompts(seed: int) -> list[Run]:
    """More than the engine can serve: without a bound on holds, batch jobs wait more than twice as long."""
    return in_lanes(list(poisson(seed, 7.0, 40.0, uniform_lengths((2_000, 8_000), (1, 100)))), seed)


def test_a_lane_waits_longer_than_in_the_engine_alone_only_where_others_gain_and_never_twice_as_long() -> None:
    """The rule of `benchmarks.never_worse` over three seeds, so that a percentile is more than one call."""
    ours: Rows = {}
    theirs: Rows = {}
    for seed in (1, 2, 3):
        runs = medium_prompts(seed)
        ours |= play(ARMS[0], MODEL, runs, seed)[0]
        theirs |= play(ARMS[1], MODEL, runs, seed)[0]
    lanes = compare(ours, theirs)
    assert set(lanes) == {"P0", "P1", "P2"}
    assert [name for name, lane in lanes.items() if not lane["kept"]] == []
    assert max(lane["ratio"] for lane in lanes.values()) > 1.1, "a lane waits for what others gain"
