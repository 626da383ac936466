"""Two seeds of `make chaos`: faults of every part of a cluster under mixed load. Recovery is not timed."""

from pathlib import Path

from support.chaos_cluster import run
from support.chaos_processes import Cluster

SEEDS = (2, 7)


def test_promises_hold_while_parts_of_the_cluster_are_killed_paused_and_cut_off(
    tmp_path: Path, postgres_url: str
) -> None:
    with Cluster(tmp_path, postgres_url) as cluster:
        for seed in SEEDS:
            found = run(cluster, seed)
            assert not found.problems, (seed, found, cluster.logs())
        cluster.stop()
