"""GPU-seconds estimated from outside against the true division of every step, in the simulator."""

import pytest

from benchmarks.attribution import play
from inferry.sim.costs import load_model
from inferry.sim.harbor import harbor

MODEL = load_model()
LOADS = {"agents": (0.3, 20), "burst": (1.0, 60)}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("load", LOADS)
def test_estimates_agree_with_the_steps_per_run_and_per_job(load: str, seed: int) -> None:
    scale, digests = LOADS[load]
    runs = harbor(seed, seconds=30.0, scale=scale, digests=digests)
    found = play(runs, MODEL.costs, MODEL.flags, warm_up_s=10.0)
    assert abs(found["total_error"]) <= 0.01
    assert found["run_error_p95"] <= 0.05
    assert found["job_error_p95"] <= 0.20
    assert found["unattributed"] <= 0.05


def test_a_server_without_counters_is_estimated_from_what_the_gateway_sees() -> None:
    runs = harbor(4, seconds=30.0, scale=0.3, digests=20)
    found = play(runs, MODEL.costs, MODEL.flags, counts=False, warm_up_s=10.0)
    assert found["run_error_p95"] <= 0.05
    assert found["job_error_p95"] <= 0.20
    assert found["unattributed"] <= 0.05
