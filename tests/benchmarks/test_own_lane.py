"""Jobs that write far more than predicted make room for short ones of their lane, where the lane says so."""

import pytest

from benchmarks.own_lane import figures, heavy_tail, play
from inferry.domain.lanes import Lane


@pytest.mark.parametrize("lane", [Lane.P1, Lane.P2])
def test_short_jobs_end_sooner_beside_a_heavy_tail(lane: Lane) -> None:
    runs = heavy_tail(1, lane, 0.8, calls=600)
    without, with_own = figures(play(runs)), figures(play(runs, lane))
    assert with_own["short_s"] < 0.6 * without["short_s"]
    assert with_own["long_s"] < 1.5 * without["long_s"]
    assert with_own["done_s"] < 1.05 * without["done_s"]
