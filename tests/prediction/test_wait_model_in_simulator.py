"""Predicted waits beside the real scheduler, in virtual time: a little of what `make bench BENCH=waits` measures."""

from pathlib import Path

from benchmarks.wait_arrivals import agent_runs, burst_mix, trace_calls
from benchmarks.wait_simulation import PredictingFrontend, play
from benchmarks.waits import QUEUE_LIMITS, cells, line
from inferry.domain.lanes import Lane
from inferry.sim.traces import read_trace


def test_nine_in_ten_jobs_are_sent_within_their_predicted_p90() -> None:
    seconds = 120.0
    outcomes = [
        one
        for make, intensity in ((burst_mix, 20.0), (agent_runs, 1.0))
        for one in play(make(5, intensity, seconds), QUEUE_LIMITS, seconds).all_outcomes(seconds)
        if 20.0 <= one.prediction.at < 90.0
    ]
    found = cells(outcomes)
    assert found["all"]["judged"] > 2000
    assert 0.87 <= found["all"]["covered_judged"] <= 0.96
    assert 0.85 <= found["P1"]["covered_judged"] <= 0.96
    # Batch waits are as long as so short a run: all of them share one error, and only too little would be a fault.
    assert found["P2"]["judged"] > 200
    assert found["P2"]["covered_judged"] >= 0.80
    assert found["all"]["p90_over_p50"] < 4, "covering everything would be easy"
    assert f"of {found['P1']['judged']:5d}" in line(found)


def test_every_job_that_is_queued_is_accounted_for_until_it_goes() -> None:
    frontend: PredictingFrontend = play(agent_runs(6, 0.6, 30.0))
    assert frontend.scheduler.queued == 0
    assert not frontend._predictions
    assert not any(frontend.waits.has_queue_ahead(lane) for lane in Lane)


def test_a_trace_that_ends_begins_again_with_runs_of_their_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_ms,input_tokens,output_tokens\n0,10,5\n4000,20,5\n10000,30,5\n")
    recorded = read_trace(trace)
    runs = trace_calls(recorded, 1, 2.0, 12.0)
    assert [run.at for run in runs] == [0, 2, 5, 5, 7, 10, 10]
    assert len({run.run_id for run in runs}) == len(runs)
    assert len(trace_calls(recorded, 1, 2.0, 4.0)) < 3, "what is shorter than the trace has a piece of it"
