"""LoRA adapters of the embedded engine behind the gateway: from the configuration, loaded and unloaded at runtime."""

import http.client
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inferry.engine.tokenizer import HfTokenizer
from support.adapters import make_adapter, merged_model
from support.checkpoints import reference_model
from support.engine_fixtures import TIE
from support.tenant_gateway import Answer, TenantGateway, bearer

PATH, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [11, 12, 13, 14, 15] * 15
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third"), 1):
        make_adapter(root / name, tiny_model, seed=seed, spread=0.2)
    make_adapter(root / "dora", tiny_model, use_dora=True)
    return root


@pytest.fixture(scope="module")
def texts(folder: Path, tiny_model: Path) -> dict[str, str]:
    """What greedy decoding makes of the prompt, by adapter, with the weights merged."""
    models = {"tiny": reference_model(tiny_model)} | {
        name: merged_model(tiny_model, folder / name) for name in ("first", "second", "third")
    }
    tokenizer = HfTokenizer(tiny_model)
    found: dict[str, str] = {}
    for name, model in models.items():
        tokens = list(PROMPT)
        with torch.inference_mode():
            for _ in range(TOKENS):
                best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
                assert float(best.values[0] - best.values[1]) > TIE
                tokens.append(int(best.indices[0]))
        found[name] = tokenizer.decode(tokens[len(PROMPT) :])
    assert len(set(found.values())) == 4
    return found


@pytest.fixture
def gateway(tmp_path: Path, tiny_model: Path, folder: Path) -> Iterator[TenantGateway]:
    worker = {
        "kind": "embedded", "name": "local", "model": str(tiny_model), "models": ["tiny"], "threads": 1,
        "adapters": {"first": str(folder / "first")}, "adapter_dirs": [str(folder)], "max_adapters": 2,
    }  # fmt: skip
    with TenantGateway(tmp_path, None, {"workers": [worker], "tenants": {"acme": {}}}) as gateway:
        yield gateway


def ask(gateway: TenantGateway, key: str, model: str, **more: Any) -> Answer:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
    return gateway.call("POST", PATH, body, bearer(key))


def text_of(gateway: TenantGateway, key: str, model: str) -> str:
    answer = ask(gateway, key, model)
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["text"]
    return text


def test_adapters_are_models_from_the_configuration_and_at_runtime(
    gateway: TenantGateway, folder: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    key = gateway.key("acme")
    assert [text_of(gateway, key, name) for name in ("tiny", "first", "tiny")] == [
        texts[name] for name in ("tiny", "first", "tiny")
    ]
    assert ask(gateway, key, "mine").code == "model_not_found"
    body = {"lora_name": "mine", "lora_path": str(folder / "second")}
    loaded = gateway.as_admin("POST", LOAD, body)
    assert (loaded.status, loaded.json) == (
        200,
        {"object": "lora_adapter", "id": "mine", "loaded": True, "workers": ["local"]},
    )
    models = {one["id"]: one for one in gateway.call("GET", "/v1/models", None, bearer(key)).json["data"]}
    assert {name: one["parent"] for name, one in models.items()} == {"tiny": None, "first": "tiny", "mine": "tiny"}
    assert all(one["ready"] for one in models.values())
    assert text_of(gateway, key, "mine") == texts["second"]
    assert gateway.service.gateway.views()[0].adapters == {"first", "mine"}
    assert gateway.as_admin("POST", LOAD, body).code == "conflict"
    full = gateway.as_admin("POST", LOAD, {"lora_name": "more", "lora_path": str(folder / "third")})
    assert (full.status, "max_adapters 2" in full.json["error"]["message"]) == (400, True)
    assert gateway.as_admin("POST", UNLOAD, {"lora_name": "mine"}).json["loaded"] is False
    assert ask(gateway, key, "mine").code == "model_not_found"
    assert gateway.as_admin("POST", UNLOAD, {"lora_name": "mine"}).status == 404
    # Another adapter of the same name: nothing of the first one is left, cached blocks included.
    body["lora_path"] = str(folder / "third")
    assert gateway.as_admin("POST", LOAD, body).status == 200
    assert text_of(gateway, key, "mine") == texts["third"]
    assert text_of(gateway, key, "mine") == texts["third"]
    assert 'model="mine"' in gateway.call("GET", "/metrics").body.decode()
    gateway.__exit__(None, None, None)
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        rows = list(ledger.execute("SELECT model, count(*), sum(cached_tokens) FROM attempts GROUP BY model"))
    assert rows == [("first", 1, 0), ("mine", 3, 64), ("tiny", 2, 64)]


def test_operators_alone_change_adapters_and_only_from_allowed_directories(
    gateway: TenantGateway, folder: Path, tmp_path: Path, tiny_model: Path
) -> None:
    key = gateway.key("acme")
    body = {"lora_name": "mine", "lora_path": str(folder / "second")}
    for headers in (None, bearer(key), bearer("wrong")):
        for path in (LOAD, UNLOAD, "/v1/%6coad_lora_adapter"):
            refused = gateway.call("POST", path, body, headers)
            assert (refused.status, refused.code) == (403, "admin_only")
    assert gateway.as_admin("GET", LOAD).status == 405
    make_adapter(tmp_path / "elsewhere", tiny_model)
    (folder / "link").unlink(missing_ok=True)
    os.symlink(tmp_path / "elsewhere", folder / "link")
    for path in (str(tmp_path / "elsewhere"), str(folder / "link"), "", "../x", "a\0b", str(folder)):
        refused = gateway.as_admin("POST", LOAD, body | {"lora_path": path})
        assert (refused.status, "adapter_dirs" in refused.json["error"]["message"]) == (400, True)
    wrong_bodies: list[Any] = [*(body | {"lora_name": name} for name in ("", "a b")), {"lora_name": "x"}, []]
    for wrong in (*wrong_bodies, body | {"more": 1}):
        assert gateway.as_admin("POST", LOAD, wrong).status == 400
    assert gateway.as_admin("POST", LOAD, body | {"lora_name": "tiny"}).code == "conflict"
    assert gateway.as_admin("POST", LOAD, body | {"base_model_name": "other"}).status == 400
    broken = gateway.as_admin("POST", LOAD, body | {"lora_path": str(folder / "dora")})
    assert (broken.status, "use_dora" in broken.json["error"]["message"]) == (400, True)
    missing = gateway.as_admin("POST", LOAD, body | {"lora_path": str(folder / "missing")})
    assert (missing.status, "adapter_config.json" in missing.json["error"]["message"]) == (400, True)
    assert gateway.as_admin("POST", UNLOAD, {"lora_name": "tiny"}).status == 404
    assert [one["id"] for one in gateway.call("GET", "/v1/models", None, bearer(key)).json["data"]] == ["tiny", "first"]


def test_a_running_call_keeps_its_adapter_until_it_has_ended(
    gateway: TenantGateway, folder: Path, texts: dict[str, str]
) -> None:
    key = gateway.key("acme")
    stream = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=120)
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 1_500, "temperature": 0, "ignore_eos": True}
    stream.request("POST", PATH, json.dumps(body | {"stream": True}), bearer(key))
    response = stream.getresponse()
    response.read(1)
    answers: list[Answer] = []
    unloading = threading.Thread(
        target=lambda: answers.append(gateway.as_admin("POST", UNLOAD, {"lora_name": "first"}))
    )
    unloading.start()
    while ask(gateway, key, "first").status != 404:  # new calls are refused at once
        time.sleep(0.01)
    assert text_of(gateway, key, "tiny") == texts["tiny"]  # beside the call that still runs
    reload = gateway.as_admin("POST", LOAD, {"lora_name": "first", "lora_path": str(folder / "second")})
    assert (reload.status, reload.code) == (409, "conflict")
    assert answers == []
    stream.close()
    unloading.join(120)
    assert [answer.status for answer in answers] == [200]
    for name in ("one", "two"):  # its place is free
        assert gateway.as_admin("POST", LOAD, {"lora_name": name, "lora_path": str(folder / "second")}).status == 200
    assert text_of(gateway, key, "two") == texts["second"]


def test_adapters_are_there_again_after_a_crash_of_the_engine(
    gateway: TenantGateway, folder: Path, texts: dict[str, str]
) -> None:
    key = gateway.key("acme")
    assert gateway.as_admin("POST", LOAD, {"lora_name": "mine", "lora_path": str(folder / "second")}).status == 200
    worker: Any = gateway.service.pool.worker("local")
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    while worker.pid in (None, pid):
        time.sleep(0.01)
    assert [text_of(gateway, key, name) for name in ("mine", "first", "tiny")] == [
        texts[name] for name in ("second", "first", "tiny")
    ]
