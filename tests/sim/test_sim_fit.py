"""Fitting costs to observations recovers the costs that made them."""

from collections.abc import Sequence

import pytest

from inferry.domain.values import replace
from inferry.loadgen.probes import Probe, ProbeLimits, schedule
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.fit import fit
from inferry.sim.flag_inference import infer_chunk, infer_sequences
from inferry.sim.nnls import nnls
from inferry.sim.observations import (
    CallTiming,
    Conditions,
    Flag,
    Observation,
    ObservationFormatError,
    from_lines,
    to_lines,
)
from inferry.sim.regression import CannotFit
from inferry.sim.replay import measured, predicted
from support.probe_observations import given, simulate_observations

GPU = CostModel(
    base_s=0.005,
    prefill_step_s=0.003,
    prefill_token_s=20e-6,
    sequence_s=40e-6,
    kv_token_s=30e-9,
    attention_pair_s=6e-9,
    request_s=0.0012,
    request_token_s=5e-7,
    token_s=60e-6,
    reply_s=0.002,
)
FLAGS = EngineFlags(max_num_seqs=256, max_num_batched_tokens=2048)
CPU = CostModel(
    base_s=0.002,
    prefill_token_s=60e-6,
    sequence_s=150e-6,
    kv_token_s=1e-7,
    attention_pair_s=2e-8,
    request_s=0.0015,
    token_s=20e-6,
)
CPU_FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=256, kv_tokens=65_536, prefix_caching=False)
CPU_REACH = ProbeLimits(prompt_tokens=4096, sequences=64, kv_tokens=65_536, chunk_tokens=256)
ASSUMED = {name: replace(flag, source="assumed") for name, flag in given(FLAGS).items()}


def probes(limits: ProbeLimits = ProbeLimits()) -> list[Probe]:  # noqa: B008 - it is frozen
    return list(schedule(limits))


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_the_costs_of_a_gpu_are_recovered() -> None:
    found = fit(simulate_observations(probes(), GPU, FLAGS), given(FLAGS))
    for name in GPU.__struct_fields__:
        assert getattr(found.costs, name) == pytest.approx(getattr(GPU, name), rel=0.05), name
    assert found.flags == FLAGS
    assert all(found.residuals[name]["median"] < 0.01 for name in ("first", "itl", "total"))


def test_the_costs_of_a_small_engine_without_a_prefix_cache_are_recovered() -> None:
    found = fit(simulate_observations(probes(CPU_REACH), CPU, CPU_FLAGS), given(CPU_FLAGS))
    for name in ("base_s", "prefill_token_s", "sequence_s", "kv_token_s", "attention_pair_s", "request_s", "token_s"):
        assert getattr(found.costs, name) == pytest.approx(getattr(CPU, name), rel=0.06), name
    assert found.costs.prefill_step_s == pytest.approx(0, abs=0.1 * CPU.base_s)
    assert found.costs.reply_s < 0.1 * CPU.request_s
    assert not found.flags.prefix_caching


def test_a_server_that_is_slower_than_its_engine_is_told_from_a_slow_engine() -> None:
    costs = replace(GPU, sequence_s=13e-6, token_s=200e-6)
    found = fit(simulate_observations(probes(), costs, FLAGS), given(FLAGS)).costs
    assert found.token_s == pytest.approx(costs.token_s, rel=0.03)
    assert found.base_s + 64 * found.sequence_s == pytest.approx(costs.base_s + 64 * costs.sequence_s, rel=0.03)


def test_prompts_that_hide_behind_a_step_are_found_to_be_free() -> None:
    costs = replace(GPU, prefill_step_s=-0.002)
    found = fit(simulate_observations(probes(), costs, FLAGS), given(FLAGS)).costs
    assert found.prefill_step_s == pytest.approx(costs.prefill_step_s, abs=0.0005)


@pytest.mark.parametrize("seed", range(2))
def test_noise_and_hiccups_do_not_lead_the_fit_astray(seed: int) -> None:
    found = fit(simulate_observations([*probes(), *probes()], GPU, FLAGS, noise=0.05, seed=seed), given(FLAGS))
    for name in ("base_s", "prefill_token_s", "attention_pair_s", "token_s", "request_s"):
        assert getattr(found.costs, name) == pytest.approx(getattr(GPU, name), rel=0.2), name
    assert all(found.residuals[name]["median"] < 0.06 for name in ("first", "itl", "total"))


def test_held_out_probes_are_no_part_of_the_fit() -> None:
    seen = simulate_observations(probes(), GPU, FLAGS)
    half_as_fast = [one if not one.held_out else _slower(one, 2.0) for one in seen]
    before, after = fit(seen, given(FLAGS)), fit(half_as_fast, given(FLAGS))
    assert before.costs == after.costs
    assert after.residuals["total"]["bias"] == pytest.approx(-0.5, abs=0.02)
    assert after.evaluated == sum(one.held_out for one in seen)


def test_the_first_probes_alone_can_be_fitted() -> None:
    """A slow engine ends its time early in the list."""
    found = fit(simulate_observations(probes()[:10], GPU, FLAGS), given(FLAGS)).costs
    for name in ("base_s", "prefill_token_s", "kv_token_s", "token_s"):
        assert getattr(found, name) == pytest.approx(getattr(GPU, name), rel=0.15), name


@pytest.mark.parametrize("kept", ["prefill", "decode"])
def test_too_few_kinds_of_probes_are_refused(kept: str) -> None:
    seen = [one for one in simulate_observations(probes()[:8], GPU, FLAGS) if one.kind == kept]
    with pytest.raises(CannotFit, match="no probes"):
        fit(seen, given(FLAGS))


def test_answers_of_a_token_each_are_refused() -> None:
    short = [replace(one, output_tokens=1) for one in probes()[:8] if one.kind in ("prefill", "decode")]
    with pytest.raises(CannotFit, match="long enough"):
        fit(simulate_observations(short, GPU, FLAGS), given(FLAGS))


@pytest.mark.parametrize("squeezed", [0.0, 0.01])
def test_a_client_that_was_held_up_and_heard_all_at_once_says_nothing(squeezed: float) -> None:
    seen = simulate_observations(probes(CPU_REACH), CPU, CPU_FLAGS)
    lumps = [_squeezed(one, squeezed) for one in seen if one.kind in ("prefill", "inject")][::4]
    found = fit([*seen, *lumps], given(CPU_FLAGS)).costs
    assert found.base_s == pytest.approx(CPU.base_s, rel=0.1)
    assert found.prefill_token_s == pytest.approx(CPU.prefill_token_s, rel=0.1)


def test_the_model_sees_what_the_client_saw() -> None:
    for one in simulate_observations(probes(), GPU, FLAGS):
        seen, had = measured(one), predicted(one, GPU, FLAGS)
        assert {name: had[name] for name in seen} == pytest.approx(seen, rel=0.03), one.kind


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 1024, 2048, 4096, 8192])
def test_the_chunk_is_inferred_from_how_often_a_prompt_stretched_a_step(chunk: int) -> None:
    flags = replace(FLAGS, max_num_batched_tokens=chunk)
    assert infer_chunk(simulate_observations(probes(), GPU, flags)) == chunk


def test_the_sequence_limit_is_inferred_from_waiting_calls() -> None:
    crowds = [Probe(kind="decode", sequences=crowd) for crowd in (64, 128, 256)]
    assert infer_sequences(simulate_observations(crowds, GPU, replace(FLAGS, max_num_seqs=100))) == 100
    assert infer_sequences(simulate_observations(crowds, GPU, FLAGS)) is None


def test_inferred_flags_are_used_and_called_so() -> None:
    flags = replace(FLAGS, max_num_batched_tokens=1024)
    found = fit(simulate_observations(probes(), GPU, flags), ASSUMED)
    assert found.known_flags["max_num_batched_tokens"] == Flag(1024, "inferred")
    assert found.flags.max_num_batched_tokens == 1024
    assert found.known_flags["kv_tokens"].source == "assumed"


# -- least squares -----------------------------------------------------------------------------------------------------


def test_least_squares_finds_the_answer_where_it_is_not_negative() -> None:
    rows = [[1.0, 2.0, 0.0], [0.0, 1.0, 1e6], [3.0, 0.0, 2e6], [1.0, 1.0, 1e6]]
    wanted = [2.0, 0.5, 3e-6]
    values = [sum(a * b for a, b in zip(row, wanted, strict=True)) for row in rows]
    assert nnls(rows, values, [1.0] * 4) == pytest.approx(wanted, rel=1e-5)


def test_least_squares_stops_at_zero() -> None:
    """The unbounded answer is (2, -1); of those that are not negative (1, 0) is the nearest to the two values."""
    found = nnls([[1.0, 0.0], [1.0, 2.0]], [2.0, 0.0], [1.0, 1.0])
    assert found == pytest.approx([1.0, 0.0])


def test_a_row_without_weight_says_nothing() -> None:
    assert nnls([[1.0], [1.0]], [2.0, 9.0], [1.0, 0.0]) == pytest.approx([2.0])


# -- the file ----------------------------------------------------------------------------------------------------------


def a_condition() -> Conditions:
    return Conditions(
        url="http://e", model="m", server="x", date="2026-01-01", inferry="0", seconds=1.0, flags=given(FLAGS)
    )


def test_observations_come_back_as_they_were_written() -> None:
    seen = simulate_observations(probes()[:3], GPU, FLAGS)
    assert from_lines(to_lines(a_condition(), seen)) == (a_condition(), seen)


@pytest.mark.parametrize(
    ("raw", "complaint"), [(b"", "empty"), (b"{}\n", "line 1"), (to_lines(a_condition(), []) + b"[1]\n", "line 2")]
)
def test_other_files_are_refused_with_the_line(raw: bytes, complaint: str) -> None:
    with pytest.raises(ObservationFormatError, match=complaint):
        from_lines(raw)


def _slower(one: Observation, factor: float) -> Observation:
    calls: Sequence[CallTiming] = [
        replace(
            call,
            sent_s=call.sent_s * factor,
            heard_s=tuple(at * factor for at in call.heard_s),
            ended_s=call.ended_s * factor,
        )
        for call in one.calls
    ]
    return replace(one, calls=tuple(calls))


def _squeezed(one: Observation, part: float) -> Observation:
    """Its events came in a lump at the end, in that part of their time."""
    calls = tuple(
        replace(call, heard_s=tuple(call.ended_s - part * (call.ended_s - at) for at in call.heard_s))
        for call in one.calls
    )
    return replace(one, calls=calls)
