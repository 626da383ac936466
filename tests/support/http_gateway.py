"""A gateway that asks for keys, in front of a scripted server that answers like vLLM."""

from pathlib import Path
from typing import Any

from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.workers.openai_http.profiles import PROFILES
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.tenant_gateway import TenantGateway
from support.upstream import Upstream, well_behaved


class HttpGateway(TenantGateway):
    """Both run on the gateway's loop."""

    def __init__(
        self, directory: Path, script: Any = well_behaved, config: dict[str, Any] | None = None, *, kind: str = "vllm"
    ) -> None:
        self.upstream = Upstream(script)
        self._kind = kind
        super().__init__(directory, self._workers, config)

    def _workers(self) -> Any:
        settings = HttpWorkerSettings(
            url=self.upstream.url, profile=PROFILES[self._kind], models=("m",), api_key="sk-upstream-key"
        )
        return [OpenAIHttpWorker("up", settings, SystemClock(), DEFAULT_LANES)], {}

    async def _main(self) -> None:
        async with self.upstream:
            await super()._main()
