"""The processes of a cluster, each of which can be killed, paused, started again and cut off from Redis."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.children import TESTS, environment
from support.redis_server import RedisServer
from support.serving import free_port, get
from support.tcp_proxy import Proxies, Proxy
from support.waiting import until

GATEWAYS, ENGINES = 3, 2
PULLING = "pulling work"
"""What a pull-worker says once it has found a gateway. Where it finds none it ends."""
SECRETS = {"CLUSTER_SECRET": "a secret of sixteen or more", "WORKER_KEY": "the key of all pull-workers"}
TENANT, RUN_CEILING = "acme", 4000


class Member:
    """A process. `kills` counts how often it was killed."""

    def __init__(self, name: str, directory: Path, command: Sequence[str], port: int | None, **variables: str) -> None:
        self.name, self.port, self._variables = name, port, variables
        self.directory = directory / name
        self.directory.mkdir()
        self.log = self.directory / "log"
        self._command = [sys.executable, "-m", *command]
        self.kills = 0
        self.start()

    def start(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command,
                cwd=self.directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(TESTS, **self._variables),
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.kills += 1
        self.popen.kill()
        self.popen.wait(120)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def has_said(self, text: str) -> bool:
        """Whether the text is in its log since it was started. Started again where it has ended by itself."""
        if not self.is_alive():
            self.start()
        return text.encode() in self.log.read_bytes()[self._log_start :]

    def answers(self, path: str) -> bool:
        assert self.is_alive(), self.log.read_text()
        try:
            return get(self.url, path)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def metric(self, name: str) -> float | None:
        """None where it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return next((float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} ")), None)


class Cluster:
    """Redis, engines, gateways that share both, and a pull-worker, with proxies wherever a cut is possible."""

    def __init__(self, directory: Path, ledger: str, *, ttl_ms: int = 1500) -> None:
        self._directory, self.ledger, self._ttl_ms = directory, ledger, ttl_ms
        self._stack = ExitStack()
        self.redis = RedisServer()
        self.cuts: dict[str, Proxy] = {}
        self.gateways: list[Member] = []
        self.engines: list[Member] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.redis)
            self._proxies = stack.enter_context(Proxies())
            socket = self.redis.url.removeprefix("unix://")
            for number in range(ENGINES):
                port = free_port()
                command = ["support.chaos_engine", str(port)]
                self.engines.append(self._member(stack, f"engine-{number}", command, port))
                self.cuts[f"engine-{number}"] = self._proxies.to(port)
            for number in range(GATEWAYS):
                self.cuts[f"redis of gateway-{number}"] = self._proxies.to(socket)
                self.gateways.append(self._gateway(stack, number))
            for gateway in self.gateways:
                until(lambda gateway=gateway: gateway.answers("/ready"), every_s=0.1, problem=gateway.log.read_text)  # type: ignore[misc]
            self.cuts["redis of worker"] = self._proxies.to(socket)
            self.worker = self._pull_worker(stack)
            until(lambda: self.worker.has_said(PULLING), every_s=0.1, problem=self.worker.log.read_text)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @property
    def members(self) -> list[Member]:
        return [*self.gateways, *self.engines, self.worker]

    def owner(self) -> Member | None:
        """The gateway that owns the workers. None while no one does, or where it does not answer."""
        return next((one for one in self.gateways if one.metric("inferry_domain_owner") == 1), None)

    def stop(self) -> None:
        """Stop the pull-worker and the gateways in good order."""
        stopping = [self.worker, *self.gateways]
        for one in stopping:
            one.signal(signal.SIGTERM)
        for one in stopping:
            assert one.popen.wait(120) == 0, one.log.read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.log.read_text()}" for one in self.members)

    def _member(
        self, stack: ExitStack, name: str, command: Sequence[str], port: int | None, **variables: str
    ) -> Member:
        member = Member(name, self._directory, command, port, **variables)
        stack.callback(member.kill)
        return member

    def _gateway(self, stack: ExitStack, number: int) -> Member:
        name, port, listen = f"gateway-{number}", free_port(), free_port()
        link = self.cuts[f"link to {name}"] = self._proxies.to(listen)
        workers = [
            {"kind": "vllm", "name": one.name, "url": f"http://127.0.0.1:{self.cuts[one.name].port}", "models": ["m"]}
            for one in self.engines
        ]
        cluster = {
            "redis": f"redis://127.0.0.1:{self.cuts[f'redis of {name}'].port}/0",
            "name": name,
            "listen": f"127.0.0.1:{listen}",
            "advertise": f"127.0.0.1:{link.port}",
            "secret_env": "CLUSTER_SECRET",
            "ttl_ms": self._ttl_ms,
            "pull_models": ["far"],
            "worker_key_env": "WORKER_KEY",
        }
        config: dict[str, Any] = {"ledger": self.ledger, "cluster": cluster, "workers": workers}
        config["tenants"] = {"default": {}, TENANT: {"run_token_ceiling": RUN_CEILING}}
        path = self._directory / f"{name}.yaml"
        path.write_text(json.dumps(config))
        command = ["inferry", "serve", "--config", str(path), "--port", str(port)]
        return self._member(stack, name, command, port, **SECRETS)

    def _pull_worker(self, stack: ExitStack) -> Member:
        redis = f"redis://127.0.0.1:{self.cuts['redis of worker'].port}/0"
        command = ["inferry", "worker", "--redis", redis, "--concurrency", "8", "--model", "far", "--name", "worker"]
        command += ["--upstream", f"http://127.0.0.1:{self.cuts['engine-0'].port}"]
        for gateway in self.gateways:
            command += ["--gateway", gateway.url]
        return self._member(stack, "worker", command, None, INFERRY_WORKER_KEY=SECRETS["WORKER_KEY"])


def pause(member: Member) -> None:
    member.signal(signal.SIGSTOP)


def resume(member: Member) -> None:
    member.signal(signal.SIGCONT)
