"""The class that Ray Serve deploys. A replica starts an actor with the engine, watches it and drains it.

The engine is in an actor of its own because the gateway must address one replica: to cancel, to count what is in
flight, and to send a run to the replica that has its prefix. A handle of Ray Serve chooses the replica itself.
"""

from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from inferry.workers.in_process.engine_link import EngineProgram
from inferry.workers.ray.engine_host import EngineHost
from inferry.workers.ray.link import NAMESPACE

ACTOR_PREFIX = "inferry-engine:"
_DRAIN_SHARE = 0.9
"""Part of the replica's shutdown time that its calls have: the rest is for the process to end."""


class EngineReplica:
    """`cpus` and `gpus` are those of the actor; it is in the replica's placement group, so both are on one node."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, make_program: Callable[[], EngineProgram], cpus: float, gpus: float, drain_timeout_s: float
    ) -> None:
        context = serve.get_replica_context()
        self._drain_timeout_s = drain_timeout_s
        options = {"num_cpus": cpus, "num_gpus": gpus, "namespace": NAMESPACE}
        name = actor_name(context.app_name, context.replica_id.unique_id)
        self._host: Any = ray.remote(EngineHost).options(name=name, **options).remote(make_program)
        self._running = self._host.run.remote()
        await self._host.wait_ready.remote()

    async def check_health(self) -> None:
        """Raises where the engine or its actor has ended; Ray Serve then replaces the replica."""
        ended, _ = ray.wait([self._running], timeout=0)
        if ended:
            raise RuntimeError(f"the engine has ended: {await self._running}")

    async def __del__(self) -> None:
        """Called by Ray Serve before it stops the replica. Calls in flight complete."""
        await self._host.drain.remote(self._drain_timeout_s * _DRAIN_SHARE)


def actor_name(app: str, replica_id: str) -> str:
    return f"{ACTOR_PREFIX}{app}:{replica_id}"


def replica_of(app: str, actor: str) -> str | None:
    """The id of the replica whose actor this is; None where it is none of this application."""
    prefix = actor_name(app, "")
    return actor.removeprefix(prefix) if actor.startswith(prefix) else None
