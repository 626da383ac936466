"""Sessions in a closed loop on an engine: which ones follow each other, and what counts."""

from array import array
from itertools import islice

import pytest

from benchmarks.gpu_sessions import RAMP_S, Sessions, figures
from inferry.domain.lanes import Lane
from inferry.loadgen.load_generator import Call, RunRecord
from inferry.sim.calls import Run, Step


def a_session(number: int) -> Run:
    step = Step("call", ((number, 0, 40),), 4)
    return Run(run_id=f"run-{number}", tenant=f"t{number}", lane=Lane.P1, at=9.0, steps=(step, step))


def a_call(due: float, ttft_s: float | None = None, cached: int = 0, outcome: str = "done") -> Call:
    call = Call(a_session(1), 0, due)
    call.outcome, call.cached = outcome, cached
    call.times = array("d", [] if ttft_s is None else [due + ttft_s])
    return call


def ended(at: float, began: float = 0.0, ok: bool = True) -> RunRecord:
    return RunRecord(a_session(1), began, at, ok, False, False)


def test_sessions_begin_within_the_ramp_and_are_taken_again_and_again() -> None:
    taken = list(islice(Sessions([a_session(1), a_session(2)], 2), 5))
    assert [run.run_id for run in taken] == ["run-1-0", "run-2-1", "run-1-2", "run-2-3", "run-1-4"]
    assert taken[1].at >= RAMP_S / 2
    assert taken[4].at < RAMP_S / 2, "a later session begins when it is taken"


def test_what_was_due_after_the_warm_up_counts() -> None:
    calls = [a_call(5.0, 9.0), a_call(10.0, 1.0, cached=20), a_call(69.0, 3.0, outcome="timeout"), a_call(60.0, 3.0)]
    found = figures(calls, [ended(9.0), ended(40.0, 15.0), ended(50.0, ok=False), ended(71.0)], 10.0, 70.0)
    assert found["sessions_per_minute"] == 1.0
    assert found["calls_per_second"] == pytest.approx(2 / 60, abs=0.001)
    assert found["cached"] == 0.25
    assert (found["ttft_max_s"], found["slowest_session_s"], found["failed"]) == (3.0, 25.0, 1)


def test_a_call_without_a_token_at_the_end_counts_with_what_it_had_waited() -> None:
    found = figures([a_call(10.0, 1.0), a_call(10.0), a_call(90.0)], [], 0.0, 100.0)
    assert found["ttft_max_s"] == 90.0
