"""Rows of the comparison on real engines: the same calls through the gateway, directly, and in the simulator."""

import asyncio

import pytest

from benchmarks.gpu_rows import MAX_STEPS, MAX_TOOL_S, _compared, _hurried, engine_model, errors, play_on, runs_of
from inferry.domain.lanes import Lane
from inferry.loadgen.requests import RequestMetadata
from inferry.sim.calls import Run, Step
from inferry.sim.costs import CostModel, EngineFlags
from support.simulated_engine_server import EngineServer, RealTimeEngine

COSTS = CostModel(base_s=0.001, prefill_token_s=0.00001, sequence_s=0.0, kv_token_s=0.0)


def some_runs() -> list[Run]:
    step = Step("call", ((1, 0, 40),), 4)
    return [
        Run(run_id=f"run-{number}", tenant="t", lane=lane, at=0.0, steps=(step,)) for number, lane in enumerate(Lane)
    ]


def test_calls_of_an_engine_have_rows_by_run_and_lane() -> None:
    with EngineServer(RealTimeEngine(COSTS, EngineFlags())) as server:
        played = asyncio.run(play_on(server.url, some_runs(), RequestMetadata(), 5))
    assert {(row.run, row.lane, row.outcome, row.produced) for row in played.rows.values()} == {
        (f"run-{number}", lane, "done", 4) for number, lane in enumerate(Lane)
    }
    assert (played.output_tokens, played.failed) == (12, 0)
    assert played.wall_s > 0
    same = _compared(played, played)
    assert same["kept"]
    assert same["throughput"] == 1.0
    assert set(same["lanes"]) == {"P0", "P1", "P2"}


def test_sessions_are_cut_to_their_first_calls_and_short_pauses() -> None:
    step = Step("call", ((1, 0, 40),), 4, tool_s=30.0)
    run = Run(run_id="run", tenant="t", lane=Lane.P1, at=1.0, steps=(step,) * (MAX_STEPS + 3))
    (hurried,) = _hurried([run])
    assert [one.tool_s for one in hurried.steps] == [MAX_TOOL_S] * MAX_STEPS
    assert hurried.at == run.at


def test_batch_jobs_begin_among_the_live_runs() -> None:
    runs = runs_of("harbor", 5)
    assert [run.at for run in runs] == sorted(run.at for run in runs)
    assert Lane.P2 in {run.lane for run in runs[:50]}


def test_flags_of_the_engine_are_those_of_the_simulator() -> None:
    assert engine_model("recommended").flags.max_num_batched_tokens == 2048
    assert engine_model("default").flags.max_num_batched_tokens == 8192


def test_the_simulators_error_is_relative_to_the_measurement() -> None:
    def row(wall_s: float, p95_s: float) -> dict[str, object]:
        lane = {"ttft_p95_s": p95_s, "direct_ttft_p95_s": 0.0}
        return {"lanes": {"P0": lane}, "gateway": {"wall_s": wall_s}, "direct": {"wall_s": wall_s}}

    found = errors(row(100.0, 2.0), row(90.0, 3.0))
    assert found == {"gateway wall_s": pytest.approx(-0.1), "direct wall_s": pytest.approx(-0.1), "P0 ttft_p95_s": 0.5}
