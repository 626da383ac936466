"""Embeddings, scores and reranking over HTTP: what is accepted, what is answered, what shares a request."""

import asyncio
import base64
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.pooling import REFUSED, label_of, pools, probs_of, score_of, vector_of
from support.pooling_gateway import EMBEDDINGS, PoolingGateway
from support.tenant_gateway import CHAT, bearer
from support.upstream import Upstream


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingGateway]:
    with PoolingGateway(tmp_path_factory.mktemp("pooling")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def key(gateway: PoolingGateway) -> str:
    return gateway.key("acme")


def test_an_embedding_is_answered_as_openai_does(gateway: PoolingGateway, key: str) -> None:
    answer = gateway.post(EMBEDDINGS, key, input="text")
    assert answer.status == 200
    data = [{"object": "embedding", "index": 0, "embedding": vector_of("text")}]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    assert answer.json == {"object": "list", "data": data, "model": "m", "usage": usage}
    assert answer.headers["x-inferry-worker"] == "up"


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_input_is_accepted(gateway: PoolingGateway, key: str, given: Any, inputs: list[Any]) -> None:
    answer = gateway.post(EMBEDDINGS, key, input=given)
    assert [one["embedding"] for one in answer.json["data"]] == [vector_of(one) for one in inputs]
    assert answer.json["usage"]["prompt_tokens"] == sum(map(len, inputs))
    assert gateway.upstream.bodies[-1]["input"] == inputs


def test_base64_is_float32_in_little_endian(gateway: PoolingGateway, key: str) -> None:
    answer = gateway.post(EMBEDDINGS, key, input="text", encoding_format="base64")
    packed = base64.b64decode(answer.json["data"][0]["embedding"])
    assert list(struct.unpack("<3f", packed)) == vector_of("text")


def test_options_are_forwarded_and_the_callers_own_fields_are_not_shared(gateway: PoolingGateway, key: str) -> None:
    gateway.post(EMBEDDINGS, key, input="text", dimensions=2, truncate_prompt_tokens=9, user="me", added=1)
    sent = gateway.upstream.bodies[-1]
    assert {name: sent[name] for name in ("dimensions", "truncate_prompt_tokens", "user", "added")} == {
        "dimensions": 2,
        "truncate_prompt_tokens": 9,
        "user": "me",
        "added": 1,
    }


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "d", [("q", "d")]),
        ("q", ["d", "e"], [("q", "d"), ("q", "e")]),
        (["q", "r"], ["d", "e"], [("q", "d"), ("r", "e")]),
    ],
    ids=["one to one", "one to many", "many to many"],
)
def test_scores_are_answered_as_vllm_does(
    gateway: PoolingGateway, key: str, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    answer = gateway.post("/v1/score", key, text_1=first, text_2=second).json
    assert answer["data"] == [
        {"index": index, "object": "score", "score": score_of(*pair)} for index, pair in enumerate(pairs)
    ]
    assert (answer["object"], answer["model"]) == ("list", "m")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 2 * len(pairs)


def test_a_classification_is_answered_as_vllm_does(gateway: PoolingGateway, key: str) -> None:
    answer = gateway.post("/v1/classify", key, input=["a", "b"], use_activation=True)
    assert answer.json["data"] == [
        {"index": index, "label": label_of(one), "probs": probs_of(one), "num_classes": 2}
        for index, one in enumerate(["a", "b"])
    ]
    assert set(answer.json) == {"id", "object", "created", "model", "data", "usage"}
    assert answer.json["id"].startswith("classify-")
    assert (answer.json["object"], answer.json["model"]) == ("list", "m")
    assert answer.json["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    sent = {**gateway.upstream.bodies[-1], "cache_salt": "salt"}
    assert sent == {"model": "m", "input": ["a", "b"], "use_activation": True, "cache_salt": "salt"}


def test_documents_are_ordered_by_their_score(gateway: PoolingGateway, key: str) -> None:
    documents = ["a", "b", "c", "d"]
    ranked = sorted(range(4), key=lambda index: -score_of("q", documents[index]))
    answer = gateway.post("/v1/rerank", key, query="q", documents=["a", {"text": "b"}, "c", "d"]).json
    assert answer["results"] == [
        {"index": index, "document": {"text": documents[index]}, "relevance_score": score_of("q", documents[index])}
        for index in ranked
    ]
    best = gateway.post("/v1/rerank", key, query="q", documents=documents, top_n=2, return_documents=False).json
    assert best["results"] == [
        {"index": index, "relevance_score": score_of("q", documents[index])} for index in ranked[:2]
    ]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, "input"),
        (EMBEDDINGS, {"input": [1, "a"]}, "input"),
        (EMBEDDINGS, {"input": 5}, "input"),
        (EMBEDDINGS, {"input": {"text": "a"}}, "input"),
        (EMBEDDINGS, {"input": [1.5]}, "input"),
        (EMBEDDINGS, {"input": [True]}, "input"),
        (EMBEDDINGS, {"input": [[]]}, "input[0]"),
        (EMBEDDINGS, {"input": [[1], [-1]]}, "input[1]"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "priority": 1}, "priority"),
        ("/v1/classify", {}, "input"),
        ("/v1/classify", {"input": [[]]}, "input[0]"),
        ("/v1/classify", {"input": "a", "use_activation": 1}, "use_activation"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": [5]}, "text_2[0]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ],
)
def test_invalid_requests_are_refused_by_name(
    gateway: PoolingGateway, key: str, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = gateway.post(path, key, **fields)
    assert (answer.status, answer.code, answer.json["error"]["param"]) == (400, "invalid_request", param)


def test_an_unknown_model_and_a_wrong_method(gateway: PoolingGateway, key: str) -> None:
    answer = gateway.call("POST", EMBEDDINGS, {"model": "x", "input": "a"}, bearer(key))
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert gateway.call("GET", EMBEDDINGS, None, bearer(key)).status == 405
    assert gateway.call("POST", EMBEDDINGS, {"model": "m", "input": "a"}).status == 401


def test_an_input_that_exceeds_the_context_is_refused_by_its_index(gateway: PoolingGateway, key: str) -> None:
    assert gateway.post(EMBEDDINGS, key, input=[[1] * 4096]).status == 200
    answer = gateway.post(EMBEDDINGS, key, input=[[1], [1] * 4097])
    assert (answer.code, answer.json["error"]["param"]) == ("context_length_exceeded", "input[1]")
    assert gateway.post(EMBEDDINGS, key, input=[[1], [1] * 4097], truncate_prompt_tokens=-1).status == 200


def test_models_say_what_they_do_and_other_tasks_are_refused(tmp_path: Path) -> None:
    for name in ("pools", "generates"):
        (tmp_path / name).mkdir()
    with PoolingGateway(tmp_path / "pools", generates=False) as pooling:
        key = pooling.key("acme")
        assert pooling.call("GET", "/v1/models", None, bearer(key)).json["data"][0]["tasks"] == [
            *("classify", "embed", "score")
        ]
        assert pooling.post(EMBEDDINGS, key, input="a").status == 200
        answer = pooling.post(CHAT, key, messages=[{"role": "user", "content": "hi"}])
        assert (answer.status, answer.code) == (400, "unsupported_feature")
        assert "generate" in answer.json["error"]["message"]
    with PoolingGateway(tmp_path / "generates", script=None) as generating:
        key = generating.key("acme")
        assert generating.call("GET", "/v1/models", None, bearer(key)).json["data"][0]["tasks"] == ["generate"]
        answer = generating.post(EMBEDDINGS, key, input="a")
        assert (answer.status, answer.code) == (400, "unsupported_feature")
        assert generating.post("/v1/rerank", key, query="q", documents=["d"]).code == "unsupported_feature"
        refused = generating.post("/v1/classify", key, input="a")
        assert (refused.status, refused.code) == (400, "unsupported_feature")
        assert "does not support the task `classify`" in refused.json["error"]["message"]


class Paused:
    """A server whose first request is answered once the gateway has `waiting` further jobs."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    async def __call__(self, up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "first" in str(body):
            self.began.set()
            while not self.may_end.is_set():
                await asyncio.sleep(0.005)
        return await pools(up, request, body)


PATIENT = {"P1": {"coalesce_ms": 60_000, "max_wait_ms": 120_000, "max_batch": 1000}}


def embed_behind_a_pass(gateway: PoolingGateway, paused: Paused, key: str, calls: list[tuple[str, Any]]) -> list[Any]:
    """The answers of calls that all arrive while a pass runs."""
    answers: list[Any] = []
    first = threading.Thread(target=lambda: gateway.post(EMBEDDINGS, key, input="first"))
    others = threading.Thread(target=lambda: answers.extend(gateway.embed_all(calls)))
    first.start()
    assert paused.began.wait(120)
    others.start()
    while gateway.service.gateway.in_flight < 1 + len(calls):
        first.join(0.01)
    paused.may_end.set()
    first.join()
    others.join()
    return answers


def test_calls_that_arrive_during_a_pass_are_one_request(tmp_path: Path) -> None:
    """60 concurrent calls behind a running pass are one further pass."""
    paused = Paused()
    with PoolingGateway(tmp_path, script=paused, config={"lanes": PATIENT}) as gateway:
        key = gateway.key("acme")
        other_key = gateway.key("acme")
        calls = [(key if number % 2 else other_key, f"text {number}") for number in range(60)]
        answers = embed_behind_a_pass(gateway, paused, key, calls)
        assert [len(body["input"]) for body in gateway.upstream.bodies] == [1, 60]
        for (_, text), answer in zip(calls, answers, strict=True):
            assert answer.json["data"][0]["embedding"] == vector_of(text)
            assert answer.json["usage"]["prompt_tokens"] == len(text)
            assert answer.headers["x-inferry-batch-size"] == "60"
        assert gateway.metric("inferry_tokens_total") >= 60


def test_tenants_with_salted_caches_never_share_a_request(tmp_path: Path) -> None:
    paused = Paused()
    tenants = {"a": {}, "b": {}, "open1": {"isolation": "none"}, "open2": {"isolation": "none"}}
    with PoolingGateway(tmp_path, script=paused, config={"lanes": PATIENT, "tenants": tenants}) as gateway:
        keys = {name: gateway.key(name) for name in tenants}
        calls = [(keys[name], f"{name} {number}") for name in tenants for number in range(4)]
        embed_behind_a_pass(gateway, paused, keys["a"], calls)
        groups = [{text.split()[0] for text in body["input"]} for body in gateway.upstream.bodies[1:]]
        assert sorted(map(sorted, groups)) == [["a"], ["b"], ["open1", "open2"]]
        salts = [body.get("cache_salt") for body in gateway.upstream.bodies[1:]]
        assert len(set(salts) - {None}) == 2


def test_different_options_never_share_a_request(gateway: PoolingGateway, key: str, tmp_path: Path) -> None:
    paused = Paused()
    with PoolingGateway(tmp_path, script=paused, config={"lanes": PATIENT}) as own:
        key = own.key("acme")
        calls = [(key, "text"), (key, [1, 2]), (key, ["a", "b"]), (key, [[3]])]
        answers = embed_behind_a_pass(own, paused, key, calls)
        assert all(answer.status == 200 for answer in answers)
        sent = sorted(str(sorted(map(str, body["input"]))) for body in own.upstream.bodies[1:])
        assert sent == ["['[1, 2]', '[3]']", "['a', 'b', 'text']"]


def test_an_invalid_input_fails_its_own_call_only(tmp_path: Path) -> None:
    paused = Paused()
    with PoolingGateway(tmp_path, script=paused, config={"lanes": PATIENT}) as gateway:
        key = gateway.key("acme")
        calls = [(key, "good"), (key, REFUSED), (key, "fine")]
        answers = embed_behind_a_pass(gateway, paused, key, calls)
        assert [answer.status for answer in answers] == [200, 400, 200]
        assert answers[0].json["data"][0]["embedding"] == vector_of("good")


def test_a_cancelled_run_ends_its_held_calls(tmp_path: Path) -> None:
    paused = Paused()
    with PoolingGateway(tmp_path, script=paused, config={"lanes": PATIENT}) as gateway:
        key = gateway.key("acme")
        first = threading.Thread(target=lambda: gateway.post(EMBEDDINGS, key, input="first"))
        first.start()
        assert paused.began.wait(120)
        answers: list[Any] = []
        call = {"model": "m", "input": "held"}
        headers = bearer(key, x_inferry_run_id="r1")
        second = threading.Thread(target=lambda: answers.append(gateway.call("POST", EMBEDDINGS, call, headers)))
        second.start()
        while gateway.service.gateway.in_flight < 2:
            second.join(0.01)
        assert gateway.call("DELETE", "/v1/runs/r1", None, bearer(key)).status == 200
        second.join()
        assert (answers[0].status, answers[0].code) == (409, "run_cancelled")
        paused.may_end.set()
        first.join()
        assert len(gateway.upstream.bodies) == 1


def test_input_tokens_are_charged_and_limited(tmp_path: Path) -> None:
    config = {
        "tenants": {"acme": {"run_token_ceiling": 1000}},
        "prices": {"m": {"input": 1, "output": 5}},
    }
    with PoolingGateway(tmp_path, config=config) as gateway:
        key = gateway.key("acme")
        headers = bearer(key, x_inferry_run_id="r1")
        call = {"model": "m", "input": [[7] * 400]}
        assert gateway.call("POST", EMBEDDINGS, call, headers).status == 200
        assert gateway.call("POST", EMBEDDINGS, call, headers).status == 200
        answer = gateway.call("POST", EMBEDDINGS, call, headers)
        assert (answer.status, answer.code) == (402, "run_budget_exhausted")
        run = gateway.call("GET", "/v1/runs/r1", None, bearer(key)).json
        assert (run["tokens"]["prompt"], run["tokens"]["output"]) == (800, 0)
