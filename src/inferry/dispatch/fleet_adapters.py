"""Loads and unloads LoRA adapters on all workers that can, while the gateway runs."""

import asyncio

from inferry.dispatch.loop import DispatchLoop
from inferry.dispatch.model_catalog import ModelCatalog
from inferry.dispatch.pool import Pool
from inferry.domain.errors import Conflict, GatewayError, InvalidRequest, NotFound
from inferry.domain.ports import AdapterHost
from inferry.domain.workers import WorkerView


class FleetAdapters:
    """An adapter has one name, and is served under it by every worker that may load its path.

    `wanted` are path and base model of the adapters that operators have loaded, by name.
    """

    def __init__(self, pool: Pool, loop: DispatchLoop, models: ModelCatalog) -> None:
        self._pool = pool
        self._loop = loop
        self._models = models
        self._loading: set[str] = set()
        self.wanted: dict[str, tuple[str, str | None]] = {}

    async def load(self, name: str, path: str, base: str | None) -> list[str]:
        """Load the adapter on all workers of the base model, or of the only one; return the workers.

        Raises a GatewayError, and then no worker serves the adapter.
        """
        if name in self._loading or any(name in view.models for view in self._pool.views()):
            raise Conflict(f"there is a model or adapter `{name}` already")
        if any(stream.attempt.job.route.model == name for stream in self._loop.streams()):
            # A call that was interrupted would continue with other weights.
            raise Conflict(f"calls of an earlier adapter `{name}` have not ended")
        hosts = self._hosts(path, base)
        self._loading.add(name)  # a second load of the name would undo this one where it fails
        try:
            workers = await self._load(name, path, hosts)
            self.wanted[name] = path, base
            return workers
        finally:
            self._loading.discard(name)

    async def restore(self, name: str) -> None:
        """Load a wanted adapter on new workers of the same engines; its calls may wait already. Raises GatewayError."""
        path, base = self.wanted[name]
        await self._load(name, path, self._hosts(path, base))

    async def _load(self, name: str, path: str, hosts: dict[str, str]) -> list[str]:
        self._models.share_tokenizer(name, next(iter(hosts.values())))
        loaded: list[str] = []
        error: GatewayError | None = None
        try:
            for worker in hosts:
                await self._host(worker).load_adapter(name, path)
                loaded.append(worker)
        except GatewayError as refused:
            error = refused
        if error is not None:
            await self._unload(name, loaded)
            raise error
        for worker in loaded:
            self._pool.refresh_view(worker)
        return loaded

    async def unload(self, name: str) -> list[str]:
        """Refuse new calls of the adapter, end queued ones, and return the workers once they have freed it: after the
        last running call of it.
        """
        workers = [view.worker for view in self._pool.views() if name in view.adapters and self._is_host(view)]
        was_wanted = self.wanted.pop(name, None) is not None
        if not workers and not was_wanted:
            raise NotFound(f"there is no adapter `{name}` that could be unloaded")
        await self._unload(name, workers)
        return workers

    async def _unload(self, name: str, workers: list[str]) -> None:
        hosts = [self._host(worker) for worker in workers]
        freed = [host.unload_adapter(name) for host in hosts]  # none serves the name from here on
        for worker in workers:
            self._pool.refresh_view(worker)
        self._models.forget_tokenizer(name)
        self._loop.end_unroutable("has unloaded it")
        await asyncio.gather(*freed)

    def _hosts(self, path: str, base: str | None) -> dict[str, str]:
        """The workers that may load the path, with their base model."""
        hosts: dict[str, str] = {}
        for view in self._pool.views():
            if self._is_host(view) and self._host(view.worker).may_load(path):
                parent = self._host(view.worker).cards()[0].name
                if base is None or base in view.models:
                    hosts[view.worker] = parent
        if not hosts:
            raise InvalidRequest(
                "`lora_path` is not below a directory that `adapter_dirs` of a worker names", param="lora_path"
            )
        if len(set(hosts.values())) > 1:
            names = ", ".join(sorted(set(hosts.values())))
            raise InvalidRequest(f"`base_model_name` must name one of {names}", param="base_model_name")
        return hosts

    def _is_host(self, view: WorkerView) -> bool:
        return isinstance(self._pool.worker(view.worker), AdapterHost)

    def _host(self, worker: str) -> AdapterHost:
        found = self._pool.worker(worker)
        if not isinstance(found, AdapterHost):
            raise NotFound(f"worker {worker} was removed")
        return found
