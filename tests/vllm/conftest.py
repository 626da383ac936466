"""Two real vLLM servers on the CPU, with one model in float32: what one has begun the other can end exactly."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.contract_model import ensure_contract_model
from support.gateway_process import GatewayProcess
from support.vllm_server import VllmServer

Serve = Callable[..., GatewayProcess]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_contract_model(tmp_path_factory.getbasetemp() / "vllm-model")


@pytest.fixture(scope="session")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Both, started side by side; a test that kills one leaves it dead, and the next has it started again."""
    scratch = tmp_path_factory.mktemp("servers")
    servers = VllmServer(model, scratch / "a.log"), VllmServer(model, scratch / "b.log")
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def servers(both: tuple[VllmServer, VllmServer]) -> tuple[VllmServer, VllmServer]:
    """Both, up."""
    begun = [server for server in both if not server.generates()]
    for server in begun:
        server.begin()
    for server in begun:
        server.wait()
    return both


@pytest.fixture
def serve(servers: tuple[VllmServer, VllmServer], tmp_path: Path) -> Iterator[Serve]:
    """A gateway before both servers; workers and the rest of the configuration as the test says."""
    with ExitStack() as stack:

        def start(worker: dict[str, Any] | None = None, **config: Any) -> GatewayProcess:
            workers = [
                {"kind": "vllm", "name": name, "url": server.url, "inter_token_timeout_s": 4.0, **(worker or {})}
                for name, server in zip(("a", "b"), servers, strict=True)
            ]
            return stack.enter_context(GatewayProcess(tmp_path / "gateway", {"workers": workers, **config}))

        yield start
