"""An `Upstream` that can freeze, with its sockets open and nothing answered, and die, with its port closed."""

import asyncio

from aiohttp import web

from support.upstream import Script, Upstream


class FreezingUpstream(Upstream):
    """`probe_count` counts the questions that came besides calls: metrics pages and lists of models."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.metrics_hang = False
        self.models_hang = False
        self.probe_count = 0

    def freeze(self) -> None:
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    async def die(self) -> None:
        """The port is closed, and with it all connections."""
        assert self._runner is not None
        self.thaw()
        await self._runner.cleanup()

    async def revive(self) -> None:
        """Again, on the same port."""
        await self.__aenter__()

    async def __aenter__(self) -> "FreezingUpstream":
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.thaw()
        self.release.set()
        await super().__aexit__(*exc)

    async def _models(self, request: web.Request) -> web.Response:
        self.probe_count += 1
        await self.thawed.wait()
        if self.models_hang:
            await asyncio.Event().wait()
        return await super()._models(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.probe_count += 1
        await self.thawed.wait()
        if self.metrics_hang:
            await asyncio.Event().wait()
        return await super()._metrics(request)

    async def _abort(self, request: web.Request) -> web.Response:
        await self.thawed.wait()
        return await super()._abort(request)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        await self.thawed.wait()
        return await super()._call(request)
