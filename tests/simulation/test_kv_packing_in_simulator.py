"""`kv_packing` before an engine whose KV is the bottleneck, in the simulator: how much fits, and whether it holds."""

from random import Random

import pytest

from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.workers import Capacity, KvPacking
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.calls import Call
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.simulation import Simulation

COSTS = CostModel(
    base_s=0.005,
    prefill_token_s=25e-6,
    sequence_s=20e-6,
    kv_token_s=30e-9,
    attention_pair_s=5e-9,
    request_s=0.001,
    token_s=100e-6,
    reply_s=0.001,
)
KV_TOKENS = 20_000


def play(kv_packing: KvPacking, kv_limit: int | None = KV_TOKENS, error: float = 0.0) -> Simulation:
    """Four calls a second with 20 to 1,500 output tokens. Predictions are off by a factor of up to exp(`error`)."""
    rng = Random(3)

    def estimate(call: Call) -> Footprint:
        output = max(1, round(call.step.output * 2.718 ** rng.uniform(-error, error)))
        return Footprint(Estimate.exactly(call.prompt), Estimate.exactly(0), Estimate.exactly(output))

    frontend = ControlledFrontend(
        DEFAULT_LANES, limits=Capacity(256, kv_limit), kv_packings=[kv_packing], estimate=estimate
    )
    flags = EngineFlags(max_num_seqs=256, max_num_batched_tokens=2048, policy="priority", kv_tokens=KV_TOKENS)
    simulation = Simulation(frontend, COSTS, flags)
    simulation.play(poisson(1, 4, 40, uniform_lengths((100, 600), (20, 1500))))
    assert all(row.outcome == "done" for row in simulation.rows)
    return simulation


def mean_ttft_s(simulation: Simulation) -> float:
    return sum(row.ttft_s or 0.0 for row in simulation.rows) / len(simulation.rows)


def total_s(simulation: Simulation) -> float:
    return max(row.at + row.end_s for row in simulation.rows)


def test_predicted_peaks_keep_the_engine_from_running_out_of_kv() -> None:
    without = play("sum", kv_limit=None).engines[0].preemptions
    assert without > 0
    assert play("sum").engines[0].preemptions == 0
    assert play("timed").engines[0].preemptions == 0


@pytest.mark.parametrize("error", [0.0, 0.7], ids=["exact", "off by up to two"])
def test_timed_packing_serves_the_same_calls_sooner(error: float) -> None:
    by_sum, timed = play("sum", error=error), play("timed", error=error)
    assert mean_ttft_s(timed) < 0.25 * mean_ttft_s(by_sum)
    assert total_s(timed) < 0.95 * total_s(by_sum)
    assert timed.engines[0].preemptions <= 2


def test_without_a_known_kv_size_packing_changes_nothing() -> None:
    by_sum, timed = play("sum", kv_limit=None), play("timed", kv_limit=None)
    assert [row.sent_s for row in by_sum.rows] == [row.sent_s for row in timed.rows]
