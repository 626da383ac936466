"""GPU-seconds estimated from outside against the true division of every step, in the simulator."""

from statistics import fmean

import pytest

from benchmarks.attribution import play
from benchmarks.controller import engines
from inferry.sim.costs import load_model
from inferry.sim.harbor import harbor

MODEL = load_model()
LOADS = {"agents": (0.3, 20), "burst": (1.0, 60)}


@pytest.mark.parametrize("load", LOADS)
def test_estimates_agree_with_the_steps_per_run_and_per_job(load: str) -> None:
    """The mean of the seeds counts: the 95th percentile of some forty runs moves by a point with the schedule."""
    scale, digests = LOADS[load]
    seeds = [
        play(harbor(seed, seconds=30.0, scale=scale, digests=digests), MODEL.costs, MODEL.flags, warm_up_s=10.0)
        for seed in (1, 2, 3)
    ]
    assert max(abs(found["total_error"]) for found in seeds) <= 0.01
    assert fmean(found["run_error_p95"] for found in seeds) <= 0.05
    assert fmean(found["job_error_p95"] for found in seeds) <= 0.20
    assert max(found["unattributed"] for found in seeds) <= 0.05


def test_a_server_without_counters_is_estimated_from_what_the_gateway_sees() -> None:
    runs = harbor(4, seconds=30.0, scale=0.3, digests=20)
    found = play(runs, MODEL.costs, MODEL.flags, counts=False, warm_up_s=10.0)
    assert found["run_error_p95"] <= 0.05
    assert found["job_error_p95"] <= 0.20
    assert found["unattributed"] <= 0.05


def test_costs_are_learned_from_prompts_that_take_longer_than_an_interval() -> None:
    """Their time passes before they are observed."""
    costs, _ = engines()["five times slower"]
    found = play(harbor(1, seconds=30.0, scale=0.3, digests=20), costs, MODEL.flags, warm_up_s=10.0)
    assert found["run_error_p95"] <= 0.05
    assert found["job_error_p95"] <= 0.10
