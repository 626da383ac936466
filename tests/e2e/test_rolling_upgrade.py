"""Gateways that share workers are replaced one after the other, as a rolling update does."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.redis_server import RedisServer
from support.serving import free_port
from support.several_processes import EngineThread
from support.sharing_gateways import GatewayChild
from support.steady_clients import SteadyClients
from support.waiting import until


def test_every_gateway_is_replaced_without_a_failed_call(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with EngineThread() as engine, ExitStack() as stack:
        engine.delay_s = 0.004

        def start(number: int) -> GatewayChild:
            listen = f"127.0.0.1:{free_port()}"
            config: dict[str, Any] = {
                "ledger": postgres_url,
                "cluster": {"redis": redis_server.url, "listen": listen, "secret_env": "CLUSTER_SECRET"},
                "workers": [{"kind": "vllm", "name": "up", "url": engine.upstream.url, "models": ["m"]}],
                "server": {"drain_timeout_s": 120},
                "health": {"no_worker_timeout_s": 120},
            }
            child = GatewayChild(tmp_path / str(number), config)
            stack.callback(child.kill)
            until(child.is_ready, problem=child.log.read_text)
            return child

        running = [start(0), start(1)]
        ports = [child.port for child in running]
        owned = 0
        with SteadyClients(ports) as clients:
            for number in (2, 3):
                clients.wait_for(3)
                new, old = start(number), running.pop(0)
                running.append(new)
                owned += old.metric("inferry_domain_owner") == 1
                ports.append(new.port)
                ports.remove(old.port)
                clients.wait_for(2)  # every client that makes connections has noticed
                old.popen.send_signal(signal.SIGTERM)
                assert old.popen.wait(timeout=120) == 0
                until(lambda: sum(child.metric("inferry_domain_owner") for child in running) == 1)
            clients.wait_for()
        assert clients.failures == [], "".join(child.log.read_text()[-3000:] for child in running)
        assert len(clients.processes) == 4
        assert owned >= 1
