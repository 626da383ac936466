"""One configuration that grows: one process, several processes on one host, several gateways with Redis and PostgreSQL.

The same clients, with the same key, find their runs, files and batches after every move, and none of their calls fails
for good.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.children import environment
from support.gateway_process import GatewayProcess
from support.redis_server import RedisServer
from support.serving import free_port, get, post
from support.several_processes import EngineThread, a_body, expected_text
from support.sharing_gateways import SECRET, GatewayChild
from support.steady_clients import SteadyClients
from support.waiting import until


class Client:
    """A tenant's client. It knows one URL and one key, and what it has stored."""

    def __init__(self, key: str) -> None:
        self.headers = {"authorization": f"Bearer {key}"}
        self.calls = 0

    def call(self, url: str) -> None:
        body = a_body(self.calls, 6)
        status, _, answer = post(url, "/v1/completions", body, {**self.headers, "x-inferry-run-id": "grows"})
        assert status == 200, answer
        assert (status, answer["choices"][0]["text"]) == (200, expected_text(body))
        self.calls += 1

    def store(self, url: str) -> None:
        """A file, and a batch of it that runs to its end."""
        line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": a_body(1, 3)}
        parts = [('name="purpose"', "batch"), ('name="file"; filename="b.jsonl"', json.dumps(line))]
        form = "".join(f"--x\r\ncontent-disposition: form-data; {name}\r\n\r\n{text}\r\n" for name, text in parts)
        multipart = {**self.headers, "content-type": "multipart/form-data; boundary=x"}
        status, _, self.file = post(url, "/v1/files", (form + "--x--\r\n").encode(), multipart)
        assert status == 200, self.file
        wanted = {"input_file_id": self.file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        status, _, self.batch = post(url, "/v1/batches", wanted, self.headers)
        assert status == 200, self.batch
        until(lambda: self.get(url, f"/v1/batches/{self.batch['id']}")["status"] == "completed")

    def get(self, url: str, path: str) -> Any:
        status, _, answer = get(url, path, self.headers)
        assert status == 200, (path, status, answer)
        return answer

    def check(self, url: str) -> None:
        """Everything that was there before is there now."""
        self.call(url)
        batch = self.get(url, f"/v1/batches/{self.batch['id']}")
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert self.get(url, f"/v1/files/{self.file['id']}")["bytes"] == self.file["bytes"]
        assert "custom_id" in str(self.get(url, f"/v1/files/{batch['output_file_id']}/content"))
        until(lambda: self.get(url, "/v1/runs/grows")["tokens"]["output"] == 6 * self.calls)
        assert get(url, "/v1/models", {"authorization": "Bearer ifk_wrong"})[0] == 401


def a_worker(name: str, engine: EngineThread) -> dict[str, Any]:
    return {"kind": "vllm", "name": name, "url": engine.upstream.url, "models": ["m"]}


def inferry(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inferry", *arguments],
        cwd=directory,
        env=environment(CLUSTER_SECRET=SECRET),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_configuration_grows_from_one_process_to_several_gateways(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    home = tmp_path / "home"
    ledger = f"sqlite:///{home / 'inferry.db'}"
    with EngineThread() as engine, EngineThread() as another, ExitStack() as stack:
        config: dict[str, Any] = {
            "ledger": ledger,
            "workers": [a_worker("first", engine)],
            "health": {"no_worker_timeout_s": 120},
            "server": {"drain_timeout_s": 100},
        }
        with GatewayProcess(home, config) as one:
            client = Client(inferry(home, "keys", "create", "--tenant", "acme", "--ledger", ledger, "--quiet"))
            until(lambda: get(one.url, "/v1/models", {})[0] == 401)
            client.call(one.url)
            client.store(one.url)
            client.check(one.url)
            ports = [one.port]
            clients = stack.enter_context(SteadyClients(ports, headers=client.headers, retries=True))
            clients.wait_for()
            ports.clear()
        config["workers"].append(a_worker("second", another))
        with GatewayProcess(home, config, processes=3) as several:
            ports[:] = [several.port]
            for _ in range(4):
                client.check(several.url)
            clients.wait_for()
            until(lambda: another.upstream.bodies)
            ports.clear()
        inferry(home, "ledger", "copy", ledger, postgres_url)
        gateways = []
        for number in range(2):
            cluster = {"redis": redis_server.url, "listen": f"127.0.0.1:{free_port()}", "secret_env": "CLUSTER_SECRET"}
            gateways.append(
                GatewayChild(tmp_path / str(number), {**config, "ledger": postgres_url, "cluster": cluster})
            )
            stack.callback(gateways[-1].kill)
        ports[:] = [child.port for child in gateways]
        clients.processes.clear()
        for child in gateways:
            until(child.is_ready, problem=child.log.read_text)
            client.check(f"http://127.0.0.1:{child.port}")
        clients.wait_for()
        until(lambda: len(clients.processes) == 2)
        assert clients.failures == []
