"""What `long_output_tokens` does for short calls behind long ones, in the simulator.

Two workers with 16 sequences each. Long calls alone need more than the sequences of one worker.
"""

from random import Random

from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.routes import OutputLength
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.calls import Call, CallRow, Run
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
FLAGS = EngineFlags(max_num_seqs=16, max_num_batched_tokens=2048, policy="priority")
LONG = 256
SEPARATE: tuple[OutputLength | None, ...] = ("short", "long")


def calls(long_per_s: float) -> list[Run]:
    prompt = (200, 400)
    return [
        *poisson(1, 20, 40, uniform_lengths(prompt, (10, 30)), name="short"),
        *poisson(1, long_per_s, 40, uniform_lengths(prompt, (800, 1200)), name="long"),
    ]


def play(
    runs: list[Run], output_lengths: tuple[OutputLength | None, ...] | None, error: float = 0.0
) -> dict[str, list[CallRow]]:
    """The calls by kind. Predictions are off by a factor of up to exp(`error`)."""
    rng = Random(1)

    def estimate(call: Call) -> Footprint:
        output = max(1, round(call.step.output * 2.718 ** rng.uniform(-error, error)))
        return Footprint(Estimate.exactly(call.prompt), Estimate.exactly(0), Estimate.exactly(output))

    long_output_tokens = None if output_lengths is None else LONG
    lanes = {lane: replace(policy, long_output_tokens=long_output_tokens) for lane, policy in DEFAULT_LANES.items()}
    frontend = ControlledFrontend(lanes, limits=Capacity(16), output_lengths=output_lengths, estimate=estimate)
    simulation = Simulation(frontend, COSTS, FLAGS, workers=2)
    simulation.play(runs)
    assert all(row.outcome == "done" for row in simulation.rows)
    return {kind: [row for row in simulation.rows if row.run.startswith(kind)] for kind in ("short", "long")}


def workers(rows: list[CallRow]) -> set[int | None]:
    return {row.worker for row in rows}


def ttft_p95(rows: list[CallRow]) -> float:
    return sorted(row.ttft_s or 0.0 for row in rows)[int(0.95 * len(rows))]


def turnaround_p95(rows: list[CallRow]) -> float:
    return sorted(row.end_s for row in rows)[int(0.95 * len(rows))]


def test_behind_long_calls_short_ones_get_their_first_token_a_hundred_times_sooner() -> None:
    runs = calls(long_per_s=6)
    together, apart = play(runs, None), play(runs, SEPARATE)
    assert (workers(together["short"]), workers(together["long"])) == ({0, 1}, {0, 1})
    assert (workers(apart["short"]), workers(apart["long"])) == ({0}, {1})
    assert ttft_p95(apart["short"]) * 100 < ttft_p95(together["short"])
    assert turnaround_p95(apart["short"]) * 10 < turnaround_p95(together["short"])


def test_long_calls_pay_for_it() -> None:
    """Why it is off by default: half of the fleet is closed to them, also while it is idle."""
    runs = calls(long_per_s=4)
    together, apart = play(runs, None), play(runs, SEPARATE)
    assert ttft_p95(together["short"]) < 0.5
    assert turnaround_p95(apart["long"]) > 1.5 * turnaround_p95(together["long"])


def test_one_worker_kept_free_of_long_calls_is_enough_for_short_ones() -> None:
    runs = calls(long_per_s=6)
    mixed = play(runs, ("short", None))
    assert workers(mixed["long"]) == {1}
    assert ttft_p95(mixed["short"]) < 0.1


def test_predictions_that_are_off_by_a_factor_of_two_still_separate() -> None:
    apart = play(calls(long_per_s=6), SEPARATE, error=0.7)
    assert (workers(apart["short"]), workers(apart["long"])) == ({0}, {1})
