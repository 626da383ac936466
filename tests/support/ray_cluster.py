"""A Ray cluster for tests: several nodes on this machine, without a dashboard."""

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

# Read when ray is imported. Without it Ray writes a token file into the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray  # a missing Ray fails the tests: it is in the `dev` extra
from ray.cluster_utils import Cluster

from support.children import import_the_same_tree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve uses deprecated features of pydantic
    from inferry.workers.ray import serve

__all__ = ["LIMIT_S", "Cluster", "named_actors", "ray", "ray_cluster", "serve", "until_gone"]

LIMIT_S = 300.0


@contextlib.contextmanager
def ray_cluster(nodes: int = 1) -> Iterator[Cluster]:
    """A cluster whose first node has no CPUs to give: it holds the control plane and is not killed."""
    import_the_same_tree()
    os.makedirs("/tmp/ray", exist_ok=True)  # Ray writes the address of its latest cluster there
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:  # a short path: sockets are in it
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": directory})
        try:
            ray.init(address=cluster.address, namespace="tests", log_to_driver=False, configure_logging=False)
            for _ in range(nodes - 1):
                cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def until_gone(actor: str) -> None:
    """Wait until the name of a killed actor is free."""
    deadline = time.monotonic() + LIMIT_S
    while any(found["name"] == actor for found in named_actors()):
        assert time.monotonic() < deadline, f"actor {actor} still exists"
        time.sleep(0.05)


def named_actors() -> list[dict[str, Any]]:
    return list(ray.util.list_named_actors(all_namespaces=True))
