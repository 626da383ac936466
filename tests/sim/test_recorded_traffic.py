"""Recorded calls as runs of a simulation, and predictions from them."""

import random
from typing import Any

import msgspec
import pytest

from inferry.cli.config.loader import parse
from inferry.cli.settings_try import predict
from inferry.domain.lanes import Lane
from inferry.domain.traffic import RecordedCall
from inferry.sim.calls import CallRow
from inferry.sim.costs import CostModel, EngineFlags, EngineModel
from inferry.sim.gpu_shares import gpu_seconds
from inferry.sim.prompts import length
from inferry.sim.recorded_traffic import MIN_CALLS, fitted_model, recorded_runs
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
