"""Engines on a real Ray cluster of three nodes beside its head: failover, scaling, and scaling from zero."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.main import app
from support.ray_cluster import LIMIT_S, Cluster, ray, ray_cluster, serve
from support.serving import Serving

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # warnings of Ray's own code
APP = "fleet"
ENGINE = {"kind": "embedded", "max_sequences": 2, "kv_tokens": 8192, "threads": 1, "capacity": "fixed"}
SCALING = {"target_wait_s": 1.0, "scale_down_after_s": 3.0}


def config(cluster: Cluster, model: Path, min_replicas: int, max_replicas: int) -> dict[str, Any]:
    worker = {
        "kind": "ray",
        "name": APP,
        "address": cluster.address,
        "engine": {**ENGINE, "model": str(model), "models": ["m"]},
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "drain_timeout_s": 30.0,
        "max_scale_up_wait_s": LIMIT_S,
    }
    return {"workers": [worker], "scaling": SCALING, "single_flight": {"identical": False}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    """A cluster with the application, deployed and deleted by the command line."""
    with ray_cluster(nodes=4) as found:
        path = tmp_path_factory.mktemp("ray") / "config.json"
        path.write_text(json.dumps(config(found, tiny_model, 1, 1)))
        command("deploy", path, f"{APP}: application {APP} runs")
        command("status", path, "1 running")
        yield found
        command("delete", path, f"{APP}: deleted")
        assert CliRunner().invoke(app, ["ray", "status", str(path)]).exit_code == 3


def command(name: str, path: Path, expected: str) -> None:
    result = CliRunner().invoke(app, ["ray", name, str(path)])
    assert result.exit_code == 0, result.output
    assert expected in result.output


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def ready(gateway: Serving) -> list[str]:
    """The replicas' workers that are up."""
    return [one.name for one in gateway.service.pool.report() if one.phase == "ready"]


class Stream:
    """A streamed completion. `tokens` grows while it is read; `error` is what the client saw instead of an end."""

    def __init__(self, gateway: Serving, tokens: int) -> None:
        self.tokens = 0
        self.text = ""
        self.worker: str | None = None
        self.error: str | None = None
        self.finished = False
        self._port = gateway.port
        self._wanted = tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self) -> "Stream":
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self

    def _read(self) -> None:
        body = {
            "model": "m",
            "prompt": "one two three",
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": self._wanted,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            self.error = response.read().decode()
            return
        self.worker = response.headers["x-inferry-worker"]
        for line in response:
            if line.startswith(b"data: [DONE]"):
                self.finished = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                self.error = self.error or (json.dumps(event["error"]) if "error" in event else None)
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                self.tokens += len(event.get("choices", ()))


def served_without_error(stream: Stream) -> bool:
    return stream.error is None and stream.finished


def test_a_step_of_load_starts_and_stops_replicas(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    with Serving(tmp_path, config=config(cluster, tiny_model, 1, 3)) as gateway:
        until(lambda: len(ready(gateway)) == 1, "one replica")
        streams: list[Stream] = []
        end = time.monotonic() + LIMIT_S
        while len(ready(gateway)) < 3:
            assert time.monotonic() < end, "three replicas"
            streams = [stream for stream in streams if not stream.finished]
            streams += [Stream(gateway, 100) for _ in range(12 - len(streams))]
            time.sleep(0.2)
        assert all(served_without_error(stream.join()) for stream in streams)
        until(lambda: len(gateway.service.pool.names()) == 2, "one replica and the standby")
        assert len(ready(gateway)) == 1


def test_the_first_call_after_scaling_to_zero_is_answered(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    with Serving(tmp_path, config=config(cluster, tiny_model, 0, 1)) as gateway:
        until(lambda: not serve.replicas(APP) and gateway.service.pool.names() == [APP], "no replica")
        stream = Stream(gateway, 5).join()
        assert served_without_error(stream), stream.error
        assert stream.tokens >= 1


def test_a_killed_node_causes_no_client_error(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    """Last in this file: the cluster has one node less afterwards."""
    with Serving(tmp_path, config=config(cluster, tiny_model, 2, 2)) as gateway:
        until(lambda: len(ready(gateway)) == 2, "two replicas")
        whole = Stream(gateway, 400).join()
        assert served_without_error(whole)
        streams = [Stream(gateway, 400) for _ in range(4)]
        until(lambda: all(stream.tokens >= 1 for stream in streams), "first tokens")
        victim = streams[0].worker
        assert victim is not None
        kill_node_of(cluster, victim)
        for stream in streams:
            assert served_without_error(stream.join()), stream.error
            assert stream.text == whole.text
        assert resumed(gateway) >= 1
        until(lambda: len(ready(gateway)) == 2 and victim not in ready(gateway), "a replacement")


def kill_node_of(cluster: Cluster, worker: str) -> None:
    actor = serve.replicas(APP)[worker.removeprefix(f"{APP}-")]
    (found,) = (one for one in ray._private.state.actors().values() if one["Name"] == actor and one["State"] == "ALIVE")
    (node,) = (one for one in cluster.worker_nodes if one.node_id == found["Address"]["NodeID"])
    cluster.remove_node(node, allow_graceful=False)


def resumed(gateway: Serving) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("inferry_attempt_retries_total"))
