"""Recorded calls as runs of a simulation, and predictions from them."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from inferry.cli.config.loader import parse
from inferry.cli.settings_try import predict
from inferry.cli.simulate_setup import gateway_arm, simulated_workers
from inferry.domain.lanes import Lane
from inferry.domain.traffic import RecordedCall
from inferry.sim.calls import CallRow, Run, Step
from inferry.sim.costs import CostModel, EngineFlags, EngineModel
from inferry.sim.gpu_shares import gpu_seconds
from inferry.sim.prompts import length
from inferry.sim.recorded_traffic import MIN_CALLS, fitted_model, recorded_runs
from inferry.sim.simulation import Simulation
from inferry.sim.workload import SimulationSetupError

BASE_S, TOKEN_S = 0.02, 0.001
STABLE = {"P1": {"ttft_ms": 500, "itl_ms": 100}}


def a_call(at: float = 0.0, run: str = "r", **fields: Any) -> RecordedCall:
    """A call on an idle engine with known costs."""
    values: dict[str, Any] = {
        "tenant": "t",
        "model": "m",
        "lane": "P1",
        "template_id": None,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 10,
        "queue_ms": 5.0,
        "engine_batch": 1.0,
        "attained": True,
        "cost_nanos": None,
        "gpu_seconds": 0.1,
        **fields,
    }
    uncached = values["prompt_tokens"] - values["cached_tokens"]
    first_ms = values["queue_ms"] + 1000 * (BASE_S + TOKEN_S * uncached)
    total_ms = first_ms + 1000 * BASE_S * (values["output_tokens"] - 1)
    return RecordedCall(arrived_at=at, run_id=run, first_token_ms=first_ms, total_ms=total_ms, **values)


def traffic(calls: int = 300, per_s: float = 1.0) -> list[RecordedCall]:
    rng, at, made = random.Random(1), 1000.0, []
    for number in range(calls):
        at += rng.expovariate(per_s)
        made.append(a_call(at, f"r{number}", prompt_tokens=rng.randint(20, 200), output_tokens=rng.randint(2, 20)))
    return made


def test_a_call_after_the_end_of_another_of_its_run_follows_it_after_the_same_pause() -> None:
    first, second = a_call(100.0), a_call(103.0)
    (run,) = recorded_runs([first, second])
    assert (run.at, len(run.steps)) == (0.0, 2)
    assert run.steps[0].tool_s == pytest.approx(3.0 - first.total_ms / 1000)


def test_calls_of_a_run_that_overlap_are_runs_of_their_own_at_their_times() -> None:
    runs = recorded_runs([a_call(100.0), a_call(100.1), a_call(500.0)])
    assert [(round(run.at, 1), len(run.steps)) for run in runs] == [(0.0, 1), (0.1, 1), (400.0, 1)]


def test_prompts_have_their_length_and_share_what_was_cached() -> None:
    runs = recorded_runs([a_call(0.0, "a", template_id="x"), a_call(1.0, "b", template_id="x", cached_tokens=64)])
    assert [length(run.steps[0].prompt) for run in runs] == [100, 100]
    assert runs[1].steps[0].prompt[0][2] == 64


def test_costs_that_made_the_calls_are_found_again() -> None:
    model = fitted_model(traffic(), EngineFlags())
    assert model is not None
    assert model.costs.decode_s(1, 0) == pytest.approx(BASE_S, rel=0.05)
    assert model.costs.prefill_token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert fitted_model(traffic(MIN_CALLS - 1), EngineFlags()) is None


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_longer_hold_is_predicted_to_lower_attainment_and_throughput(share: float | None) -> None:
    current = parse({"lanes": STABLE})
    held = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 800, "max_wait_ms": 800}}
    found = predict(current, parse({"lanes": held}), traffic(), share=share)
    before, after = found.current["P1"], found.new["P1"]
    assert before.attainment > 0.99
    assert after.attainment < 0.7
    assert after.ttft_p95 is not None
    assert before.ttft_p95 is not None
    assert 0.5 < after.ttft_p95 - before.ttft_p95 < 0.95
    assert after.throughput < before.throughput
    assert before.calls + after.calls == (600 if share is None else 300)


def test_equal_versions_are_predicted_equal() -> None:
    config = parse({"lanes": STABLE})
    found = predict(config, config, traffic())
    assert found.current == found.new


def test_too_few_calls_need_a_model() -> None:
    config = parse({"lanes": STABLE})
    with pytest.raises(SimulationSetupError, match="--model"):
        predict(config, config, traffic(10))


def test_a_trial_predicts_what_batching_saves_of_the_gpu() -> None:
    """Held calls run beside each other and share the fixed part of steps; the others run alone."""
    held = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 2000, "max_wait_ms": 2000}}
    costs = CostModel(base_s=BASE_S, prefill_token_s=1e-6, sequence_s=0.0, kv_token_s=0.0)
    model = EngineModel(name="steps only", costs=costs)
    found = predict(parse({"lanes": STABLE}), parse({"lanes": held}), traffic(per_s=2.0), model, share=0.5)
    assert found.new["P1"].cost < 0.9 * found.current["P1"].cost


def made_by(costs: CostModel, arrival_s: float) -> list[RecordedCall]:
    """Calls as the ledger has them after an engine with these costs, most of them alone. A call that arrives delays
    those that run by `arrival_s`, which no cost of the engine explains."""
    model, rng, at = EngineModel(name="known", costs=costs), random.Random(1), 0.0
    runs = []
    for number in range(400):
        at += rng.expovariate(6.0)
        step = Step("0", ((number + 1, 0, rng.randint(20, 60)),), 8)
        runs.append(Run(run_id=f"r{number}", tenant="t", lane=Lane.P1, at=at, steps=(step,)))
    config = parse({"lanes": STABLE})
    arm = gateway_arm("recorded", config.lane_policies(), simulated_workers(config, model))
    simulation = Simulation(arm.frontend(), costs, arm.flags, itl_s={Lane.P1: 0.1}, ttft_s_per_1k_tokens={Lane.P1: 0.0})
    simulation.play(runs)
    return as_recorded(simulation.rows, gpu_seconds(simulation.rows, costs, simulation.busy_s), arrival_s)


def as_recorded(rows: list[CallRow], gpu: Sequence[float] | None = None, arrival_s: float = 0.0) -> list[RecordedCall]:
    """Simulated calls as the ledger has them."""
    spans = [(row.at + (row.sent_s or 0.0), row.at + row.end_s) for row in rows]
    calls = []
    for row, (sent, end), gpu_s in zip(rows, spans, gpu or [0.0] * len(rows), strict=True):
        beside = sum(max(0.0, min(end, other_end) - max(sent, other)) for other, other_end in spans)
        delay_s = arrival_s * sum(sent < other < end for other, _ in spans)
        call = a_call(1000 + row.at, row.run, prompt_tokens=row.prompt, output_tokens=row.produced, gpu_seconds=gpu_s)
        call = msgspec.structs.replace(call, lane=row.lane.name, tenant=row.tenant)
        calls.append(
            msgspec.structs.replace(
                call,
                queue_ms=1000 * (row.sent_s or 0.0),
                first_token_ms=1000 * (row.ttft_s or 0.0),
                total_ms=1000 * (row.end_s + delay_s),
                engine_batch=beside / (end - sent),
            )
        )
    return sorted(calls, key=lambda call: call.arrived_at)


def a_burst(costs: CostModel) -> list[RecordedCall]:
    """300 calls of P2 at once and 18 of P0 beside and after them, on an engine with these costs. Prompts are short."""
    rng = random.Random(1)
    runs = [
        Run(
            run_id=f"b{number}",
            tenant="t",
            lane=Lane.P2,
            at=5.0 + number / 500,
            steps=(Step("0", ((number, 0, rng.randint(5, 18)),), 40),),
        )
        for number in range(300)
    ]
    runs += [
        Run(
            run_id=f"l{number}",
            tenant="u",
            lane=Lane.P0,
            at=5.0 + 0.7 * number,
            steps=(Step("0", ((-1 - number, 0, rng.randint(5, 18)),), 20),),
        )
        for number in range(18)
    ]
    config = parse({})
    arm = gateway_arm("", config.lane_policies(), simulated_workers(config, EngineModel(name="known", costs=costs)))
    assert [(one.max_num_seqs, one.kv_tokens) for one in arm.flags] == [(64, 65_536)], "the configured worker's"
    simulation = Simulation(arm.frontend(), costs, arm.flags)
    simulation.play(sorted(runs, key=lambda run: run.at))
    return as_recorded(simulation.rows)


@pytest.mark.parametrize(("base_s", "prefill_token_s"), [(0.006, 0.0001), (0.02, 0.0005)])
def test_the_wait_of_a_burst_is_not_charged_to_short_prompts(base_s: float, prefill_token_s: float) -> None:
    calls = a_burst(CostModel(base_s=base_s, sequence_s=0.0008, prefill_token_s=prefill_token_s, kv_token_s=0.0))
    model = fitted_model(calls, EngineFlags())
    assert model is not None
    assert model.costs.prefill_token_s < 3 * prefill_token_s
    found = predict(parse({}), parse({}), calls)
    for lane, measured in found.measured.items():
        ratio = (found.current[lane].ttft_p50 or 0.0) / (measured.ttft_p50 or 1.0)
        assert 0.5 < ratio < 2, lane


def test_what_was_measured_stands_beside_the_simulation() -> None:
    calls = [
        *traffic(),
        *(msgspec.structs.replace(a_call(1000.0 + n, f"p{n}", lane="P0"), attained=n < 5) for n in range(10)),
    ]
    found = predict(parse({"lanes": STABLE}), parse({"lanes": STABLE}), calls)
    assert (found.measured["P0"].calls, found.measured["P0"].attainment) == (10, 0.5)
    assert found.measured["P0"].ttft_p50 == pytest.approx(0.125)
    assert found.measured["P0"].cost == pytest.approx(10.0), "GPU-seconds of 1,000 tokens"
    assert found.far_lanes() == ["P0"], "its simulated attainment is 100 %"


def test_a_lane_with_few_calls_does_not_stop_an_apply() -> None:
    held = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 800, "max_wait_ms": 800}}
    versions = parse({"lanes": STABLE}), parse({"lanes": held})
    assert predict(*versions, traffic()).falling_lanes(0.02) == ["P1"]
    few = [msgspec.structs.replace(call, lane="P1" if n < 29 else "P2") for n, call in enumerate(traffic())]
    found = predict(*versions, few)
    assert found.current["P1"].attainment - found.new["P1"].attainment > 0.02
    assert found.falling_lanes(0.02) == []


@pytest.mark.parametrize("arrival_s", [0.0, 0.005, 0.01])
@pytest.mark.parametrize(("base_s", "sequence_s"), [(0.0038, 0.0014), (0.0003, 0.005)])
def test_the_saving_of_calls_that_are_computed_together_is_predicted(
    base_s: float, sequence_s: float, arrival_s: float
) -> None:
    """By the fit as by the model that made the traffic, which saves a third with the first costs and nothing with the
    second ones."""
    costs = CostModel(base_s=base_s, prefill_token_s=5e-5, sequence_s=sequence_s, kv_token_s=0.0)
    held = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 1200, "max_wait_ms": 1200}}
    calls, both = made_by(costs, arrival_s), (parse({"lanes": STABLE}), parse({"lanes": held}))
    saved = {}
    for name, model in (("true", EngineModel(name="known", costs=costs)), ("fitted", None)):
        found = predict(*both, calls, model, share=0.5)
        saved[name] = 1 - found.new["P1"].cost / found.current["P1"].cost
    assert saved["fitted"] == pytest.approx(saved["true"], abs=0.12)
    assert (saved["true"] > 0.25) is (base_s > sequence_s)


def test_gpu_time_of_the_current_version_is_what_the_ledger_recorded() -> None:
    calls = traffic()
    recorded = 1000 * sum(call.gpu_seconds or 0.0 for call in calls) / sum(call.output_tokens for call in calls)
    both = parse({"lanes": STABLE}), parse({"lanes": STABLE})
    assert predict(*both, calls).current["P1"].cost == pytest.approx(recorded)
    without = [msgspec.structs.replace(call, gpu_seconds=None) for call in calls]
    assert predict(*both, without).current["P1"].cost > 0


def test_gpu_seconds_are_shared_by_calls_that_run_at_the_same_time() -> None:
    costs = CostModel(base_s=1.0, prefill_token_s=0.1, sequence_s=0.0, kv_token_s=0.0)
    # On worker 0, one call from 0 to 4 s and one from 2 to 4 s, with 10 and 20 prompt tokens. On worker 1, one alone.
    rows = [a_row(0.0, 4.0, prompt=10), a_row(2.0, 2.0, prompt=20), a_row(0.0, 3.0, prompt=10, worker=1)]
    first, second, alone = gpu_seconds(rows, costs, [7.0, 3.0])
    # 7 s less 3 s of prompts are fixed. The first call has 2 s alone and half of 2 s, the second half of 2 s.
    assert [first, second, alone] == pytest.approx([1 + 4 * 3 / 4, 2 + 4 * 1 / 4, 3.0])


def a_row(at: float, end_s: float, *, prompt: int, worker: int = 0) -> CallRow:
    return CallRow(
        run="r",
        step="s",
        tenant="t",
        lane=Lane.P1,
        prompt=prompt,
        output=1,
        at=at,
        ttft_s=0.5,
        end_s=end_s,
        late_s=0.0,
        outcome="done",
        produced=1,
        sent_s=0.0,
        worker=worker,
    )


def test_a_version_with_session_pauses_is_played_with_them() -> None:
    """Ten runs whose KV does not fit the cache together, each with four calls that extend the same prompt."""
    calls = [
        a_call(100.0 + step + run / 100, f"r{run}", prompt_tokens=500, cached_tokens=400, gpu_seconds=None)
        for step in range(4)
        for run in range(10)
    ]
    costs = CostModel(base_s=BASE_S, prefill_token_s=TOKEN_S, sequence_s=0.0, kv_token_s=0.0)
    model = EngineModel(name="small", costs=costs, flags=EngineFlags(kv_tokens=2_000))
    config = {"lanes": STABLE, "workers": [{"kind": "vllm", "name": "w", "url": "http://h"}]}
    found = predict(parse(config), parse({**config, "sessions": {"pause": True}}), calls, model)
    current, new = found.current["P1"].ttft_p50, found.new["P1"].ttft_p50
    assert current is not None
    assert new is not None
    assert new < 0.8 * current
