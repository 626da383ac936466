"""Python functions behind the gateway, over its APIs, with quotas and ledger."""

import json
import time
from collections.abc import Iterator

import pytest

from support.tenant_gateway import TenantGateway

MODULE = """
import os

def reply(inputs):
    if any("crash" in str(one) for one in inputs):
        os._exit(1)
    return [one.upper() if isinstance(one, str) else f"{len(one)} messages" for one in inputs]

async def embed(texts):
    return [[float(len(text)), 0.0] for text in texts]

def score(pairs):
    return [len(set(a.split()) & set(b.split())) for a, b in pairs]
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantGateway]:
    directory = tmp_path_factory.mktemp("functions")
    (directory / "served_functions.py").write_text(MODULE)
    config = {
        "workers": [
            {
                "name": f"{task}-worker",
                "kind": "python",
                "function": f"served_functions:{name}",
                "model": name,
                "task": task,
                "directory": str(directory),
            }
            for task, name in (("generate", "reply"), ("embed", "embed"), ("score", "score"))
        ],
        "auth": {"mode": "off"},
        "tenants": {"small": {"requests_per_minute": 1}},
    }
    with TenantGateway(directory, config=config) as serving:
        # A gateway is ready when its first worker is.
        while set(serving.call("GET", "/ready").json["workers"].values()) != {"ready"}:
            time.sleep(0.05)
        yield serving


def test_completions_and_chats(gateway: TenantGateway) -> None:
    answer = gateway.call("POST", "/v1/completions", {"model": "reply", "prompt": "hello"})
    assert answer.status == 200
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("HELLO", "stop")
    assert answer.headers["x-inferry-worker"] == "generate-worker"
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    chat = gateway.call("POST", "/v1/chat/completions", {"model": "reply", "messages": messages}).json
    assert chat["choices"][0]["message"]["content"] == "2 messages"
    assert chat["usage"]["completion_tokens"] == 3


def test_streams_stop_strings_and_limits(gateway: TenantGateway) -> None:
    request = {"model": "reply", "prompt": "hello there world", "stream": True, "max_tokens": 2}
    events = gateway.call("POST", "/v1/completions", request).body.decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "HELLO TH"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    stopped = gateway.call("POST", "/v1/completions", {"model": "reply", "prompt": "hello there", "stop": [" "]})
    assert stopped.json["choices"][0]["text"] == "HELLO"


def test_embeddings_scores_and_reranking(gateway: TenantGateway) -> None:
    embedded = gateway.call("POST", "/v1/embeddings", {"model": "embed", "input": ["a", "abc"]}).json
    assert [one["embedding"] for one in embedded["data"]] == [[1.0, 0.0], [3.0, 0.0]]
    scored = gateway.call("POST", "/v1/score", {"model": "score", "text_1": "a b", "text_2": ["a b c", "d"]}).json
    assert [one["score"] for one in scored["data"]] == [2.0, 0.0]
    ranked = gateway.call("POST", "/v1/rerank", {"model": "score", "query": "a b", "documents": ["d", "a b"]}).json
    assert [one["index"] for one in ranked["results"]] == [1, 0]


def test_what_a_function_cannot_do_is_refused_by_name(gateway: TenantGateway) -> None:
    refused = gateway.call("POST", "/v1/embeddings", {"model": "reply", "input": "a"})
    assert refused.status == 400
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    refused = gateway.call("POST", "/v1/chat/completions", {"model": "reply", "messages": messages, "tools": tools})
    assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_feature")


def test_a_crash_of_the_function_fails_its_call_only(gateway: TenantGateway) -> None:
    lost = gateway.call("POST", "/v1/completions", {"model": "reply", "prompt": "crash"})
    assert lost.status in (502, 503)
    served = gateway.call("POST", "/v1/embeddings", {"model": "embed", "input": "a"})
    assert served.status == 200
    again = gateway.call("POST", "/v1/completions", {"model": "reply", "prompt": "again"})
    assert again.json["choices"][0]["text"] == "AGAIN", "the call waits for the next process"


def test_quotas_and_ledger_count_its_calls(gateway: TenantGateway) -> None:
    small = {"x-inferry-tenant": "small", "x-inferry-run-id": "functions"}
    request = {"model": "embed", "input": ["a", "b"]}
    assert gateway.call("POST", "/v1/embeddings", request, headers=small).status == 200
    refused = gateway.call("POST", "/v1/embeddings", request, headers=small)
    assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limited")
    run = gateway.call("GET", "/v1/runs/functions", headers=small).json
    assert run["tokens"]["prompt"] > 0, run
