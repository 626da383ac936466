"""Gateways that share the workers of a `workers_file`, as processes: the file changes, and the owner is killed."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.redis_server import RedisServer
from support.serving import free_port, get, post
from support.several_processes import EngineThread, a_body, expected_text
from support.sharing_gateways import GatewayChild
from support.waiting import until


def test_a_change_of_the_file_and_the_loss_of_the_owner_leave_every_gateway_with_the_workers_of_the_file(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    file = tmp_path / "workers.yaml"

    def write(**engines: EngineThread) -> None:
        entries = [
            {"kind": "vllm", "name": name, "url": engine.upstream.url, "models": ["m"]}
            for name, engine in engines.items()
        ]
        file.with_suffix(".new").write_text(json.dumps(entries))
        file.with_suffix(".new").rename(file)

    def url(child: GatewayChild) -> str:
        return f"http://127.0.0.1:{child.port}"

    def workers(child: GatewayChild) -> list[str]:
        status, _, body = get(url(child), "/admin/workers")
        return sorted(one["name"] for one in body["workers"]) if status == 200 else []

    def call(child: GatewayChild, number: int) -> None:
        status, _, answer = post(url(child), "/v1/completions", a_body(number))
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected_text(a_body(number))

    with EngineThread() as one, EngineThread() as two, ExitStack() as stack:
        write(one=one)
        found = []
        for number in range(2):
            listen = f"127.0.0.1:{free_port()}"
            config: dict[str, Any] = {
                "ledger": postgres_url,
                "cluster": {"redis": redis_server.url, "listen": listen, "secret_env": "CLUSTER_SECRET"},
                "workers_file": str(file),
                "health": {"no_worker_timeout_s": 120},
            }
            found.append(GatewayChild(tmp_path / str(number), config))
            stack.callback(found[-1].kill)
        for number, child in enumerate(found):
            until(child.is_ready, problem=child.log.read_text)
            call(child, number)
        write(one=one, two=two)
        for child in found:
            until(lambda child=child: workers(child) == ["one", "two"], problem=child.log.read_text)  # type: ignore[misc]
        (owner,) = (child for child in found if child.metric("inferry_domain_owner") == 1)
        (other,) = (child for child in found if child is not owner)
        owner.kill()
        until(lambda: other.metric("inferry_domain_owner") == 1, problem=other.log.read_text)
        until(lambda: workers(other) == ["one", "two"], problem=other.log.read_text)
        call(other, 5)
