"""Prompts for engines that take token ids, sent to processes that do not own the workers."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.adapters import make_adapter
from support.gateway_process import GatewayProcess
from support.redis_server import RedisServer
from support.serving import free_port, post
from support.sharing_gateways import GatewayChild
from support.waiting import until

PROMPT = "the prompt of a call"
PROCESSES = 3
CALLS = 24
"""Each on a connection of its own, so that every process gets some."""


def embedded(name: str, model: Path, served: str, **more: Any) -> dict[str, Any]:
    return {"kind": "embedded", "name": name, "model": str(model), "models": [served], "threads": 1, **more}


def a_call(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}


def text_of(url: str, model: str, **more: Any) -> str:
    status, _, answer = post(url, "/v1/completions", a_call(model, **more))
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def test_every_gateway_of_a_cluster_serves_an_embedded_worker(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str, tiny_model: Path
) -> None:
    with ExitStack() as stack:
        found: list[GatewayChild] = []
        for number in range(2):
            config: dict[str, Any] = {
                "ledger": postgres_url,
                "cluster": {
                    "redis": redis_server.url,
                    "listen": f"127.0.0.1:{free_port()}",
                    "secret_env": "CLUSTER_SECRET",
                },
                "workers": [embedded("local", tiny_model, "tiny")],
                "health": {"no_worker_timeout_s": 120},
            }
            found.append(GatewayChild(tmp_path / str(number), config))
            stack.callback(found[-1].kill)
        for child in found:
            until(child.is_ready, problem=child.log.read_text)
        urls = [f"http://127.0.0.1:{child.port}" for child in found]
        assert len({text_of(url, "tiny") for url in urls}) == 1
        assert all(text_of(url, "tiny", echo=True).startswith(PROMPT) for url in urls)


@pytest.fixture
def gateway(tmp_path: Path, tiny_model: Path) -> Iterator[GatewayProcess]:
    make_adapter(tmp_path / "adapters" / "first", tiny_model, seed=1, spread=0.2)
    write(tmp_path, [embedded("one", tiny_model, "tiny", adapter_dirs=[str(tmp_path / "adapters")])])
    with GatewayProcess(
        tmp_path / "gateway", {"workers_file": str(tmp_path / "workers.yaml")}, processes=PROCESSES
    ) as found:
        ready = "worker owner is ready"
        found.until(lambda: found.log_path.read_text().count(ready) == PROCESSES - 1, 300)
        yield found


def write(directory: Path, workers: list[dict[str, Any]]) -> None:
    (directory / "new").write_text(json.dumps(workers))
    (directory / "new").rename(directory / "workers.yaml")


def wait_until_all_serve(gateway: GatewayProcess, model: str) -> None:
    """Until every process knows the model. Until then its calls are refused as those of an unknown model."""
    served = 0
    while served < CALLS:
        status, _, answer = post(gateway.url, "/v1/completions", a_call(model))
        served = served + 1 if status == 200 else 0
        assert status == 200 or answer["error"]["code"] in {"model_not_found", "no_worker"}, answer


def test_every_process_serves_a_model_that_a_file_adds(
    gateway: GatewayProcess, tmp_path: Path, tiny_model: Path
) -> None:
    one = embedded("one", tiny_model, "tiny", adapter_dirs=[str(tmp_path / "adapters")])
    write(tmp_path, [one, embedded("two", tiny_model, "other")])
    wait_until_all_serve(gateway, "other")
    assert text_of(gateway.url, "other") == text_of(gateway.url, "tiny")


def test_every_process_serves_an_adapter_that_is_loaded(gateway: GatewayProcess, tmp_path: Path) -> None:
    load = {"lora_name": "first", "lora_path": str(tmp_path / "adapters" / "first")}
    status, _, answer = post(gateway.url, "/v1/load_lora_adapter", load)
    assert status == 200, answer
    wait_until_all_serve(gateway, "first")
    assert len({text_of(gateway.url, "first") for _ in range(CALLS)}) == 1
