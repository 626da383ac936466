"""Applications on Ray Serve: deploy, list replicas, set their number, delete. All functions block."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from msgspec import Struct
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID  # what the endpoint `/scale` of Serve uses
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from inferry.workers.in_process.engine_link import EngineProgram
from inferry.workers.ray.link import NAMESPACE
from inferry.workers.ray.replica import EngineReplica, replica_of

DEPLOYMENT = "engine"
GCS_RECONNECT_S = 86_400
"""How long the process outlives Ray's control plane. Ray's own default of 60 s ends the process that uses it."""
HEALTH_CHECK_S = 2.0
_connecting = threading.Lock()


class RayUnavailable(Exception):
    """The Ray cluster cannot be reached; the message says why."""


class AppStatus(Struct, frozen=True):
    """An application as Ray Serve reports it. `replicas` counts its replicas by state."""

    app: str
    status: str
    message: str
    replicas: Mapping[str, int]


class AppSettings(Struct, frozen=True, kw_only=True):
    """How replicas are placed. `make_program` makes the engine on the replica's node."""

    app: str
    make_program: Callable[[], EngineProgram]
    replicas: int
    cpus: float
    gpus: float
    drain_timeout_s: float


def connect(address: str) -> None:
    """Connect this process to the cluster, once. Raises RayUnavailable."""
    with _connecting:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_RECONNECT_S))
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RayUnavailable(f"no Ray cluster at {address}: {error}") from None


def deploy(settings: AppSettings) -> None:
    """Place the engines; return when the application runs. An application of the same name is replaced."""
    # Without HTTP proxies: calls come through the gateway. Serve that runs already keeps its own.
    serve.start(proxy_location="Disabled")
    bundle = {"CPU": settings.cpus, **({"GPU": settings.gpus} if settings.gpus else {})}
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        num_replicas=max(1, settings.replicas),
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )
    bound = deployment.bind(settings.make_program, settings.cpus, settings.gpus, settings.drain_timeout_s)
    serve.run(bound, name=settings.app, route_prefix=None, external_scaler_enabled=True)
    if settings.replicas == 0:
        # Serve refuses to deploy zero replicas; the first one has shown that the engine starts.
        set_replicas(settings.app, 0)


def set_replicas(app: str, replicas: int) -> None:
    """Set the number of replicas, as Serve's endpoint `/scale` does. Raises RayUnavailable."""
    try:
        client: Any = _get_global_client()
        ray.get(client._controller.update_deployment_replicas.remote(DeploymentID(DEPLOYMENT, app), replicas))
    except (RayError, RayServeException, ValueError) as error:
        raise RayUnavailable(f"application {app} could not be scaled: {error}") from None


def replicas(app: str) -> dict[str, str]:
    """The actors of an application by the id of their replica. Raises RayUnavailable."""
    try:
        named = ray.util.list_named_actors(all_namespaces=True)
    except RayError as error:
        raise RayUnavailable(f"the actors cannot be listed: {error}") from None
    actors = [one["name"] for one in named if one["namespace"] == NAMESPACE]
    return {found: actor for actor in actors if (found := replica_of(app, actor)) is not None}


def status(app: str) -> AppStatus | None:
    """None where the application is not deployed."""
    found = serve.status().applications.get(app)
    if found is None:
        return None
    deployment = found.deployments.get(DEPLOYMENT)
    states = {} if deployment is None else {str(state): count for state, count in deployment.replica_states.items()}
    return AppStatus(app, str(found.status), found.message, states)


def delete(app: str) -> bool:
    """Delete the application; False where it is not deployed."""
    if app not in serve.status().applications:
        return False
    serve.delete(app)
    return True
