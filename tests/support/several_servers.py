"""A gateway before several scripted servers, each with the worker configuration that a test gives it."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from inferry.cli.config.loader import parse
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import SystemClock
from support.tenant_gateway import CHAT, Answer, TenantGateway
from support.upstream import Upstream


class SeveralServers(TenantGateway):
    """`workers` has the settings of each by name; `listed_adapters` are the adapters that a server lists."""

    def __init__(
        self,
        directory: Path,
        workers: Mapping[str, Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        listed_adapters: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.upstreams = {name: Upstream() for name in workers}
        for name, adapters in (listed_adapters or {}).items():
            self.upstreams[name].adapters = adapters
        self._worker_settings = workers
        super().__init__(directory, self._workers, {"auth": {"mode": "off"}, **(config or {})})

    def _workers(self) -> Any:
        workers = [
            {"kind": "vllm", "name": name, "url": self.upstreams[name].url, **settings}
            for name, settings in self._worker_settings.items()
        ]
        return [make_worker(one, SystemClock())[0] for one in parse({"workers": workers}).workers], {}

    async def _main(self) -> None:
        async with AsyncExitStack() as stack:
            for upstream in self.upstreams.values():
                await stack.enter_async_context(upstream)
            await super()._main()

    async def _until_ready(self) -> None:
        """All workers are up."""
        async with asyncio.timeout(120):
            while {view.phase.value for view in self.service.gateway.views()} != {"ready"}:
                await asyncio.sleep(0.01)

    def ask(self, model: str = "m", tenant: str = "default", max_tokens: int = 3) -> Answer:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}
        return self.call("POST", CHAT, body, {"x-inferry-tenant": tenant})

    def served_by(self, model: str = "m", tenant: str = "default", max_tokens: int = 3) -> set[str]:
        """The workers of six calls."""
        answers = [self.ask(model, tenant, max_tokens) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}, answers[0].body
        return {answer.headers["x-inferry-worker"] for answer in answers}
