"""The pooled APIs by real vLLM servers: equal to the server's own, and one request for many calls."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from support.gateway_process import GatewayProcess
from support.pooling_models import embedding_model, scoring_model
from support.serving import get, post
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

TEXTS = ["the scheduler", "a queue of jobs", "é 日", "the scheduler plans jobs " * 20]


class PoolingServer(VllmServer):
    """A server of a pooling model. `path` and `call` are one of its calls."""

    path = "/v1/embeddings"
    call: dict[str, Any] = {"model": "m", "input": "up?"}  # noqa: RUF012

    def _one_token(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", self.path, json.dumps(self.call), {"content-type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()


class ClassifyingServer(PoolingServer):
    path = "/classify"


class ScoringServer(PoolingServer):
    path = "/v1/score"
    call = {"model": "m", "text_1": "up?", "text_2": "up"}  # noqa: RUF012


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    scratch = tmp_path_factory.mktemp("embeds")
    model = embedding_model(scratch / "model", pooling="lasttoken")
    with PoolingServer(model, scratch / "server.log", "--runner", "pooling") as server:
        yield server


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    scratch = tmp_path_factory.mktemp("scores")
    model = scoring_model(scratch / "model")
    with ScoringServer(model, scratch / "server.log", "--runner", "pooling") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(embeds: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    worker = {"kind": "vllm", "name": "up", "url": embeds.url}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), {"workers": [worker]}) as gateway:
        yield gateway


def asked(url: str, path: str, **fields: Any) -> Any:
    status, _, answer = post(url, path, {"model": "m", **fields})
    assert status == 200, answer
    return answer


def test_a_pooling_server_is_detected(gateway: GatewayProcess) -> None:
    (model,) = get(gateway.url, "/v1/models")[2]["data"]
    assert model["tasks"] == ["embed", "score"]
    status, _, answer = post(gateway.url, "/v1/completions", {"model": "m", "prompt": "hi"})
    assert (status, answer["error"]["code"]) == (400, "unsupported_feature")


def test_embeddings_are_those_of_the_server(gateway: GatewayProcess, embeds: VllmServer) -> None:
    own = asked(embeds.url, "/v1/embeddings", input=TEXTS)
    ours = asked(gateway.url, "/v1/embeddings", input=TEXTS)
    for a, b in zip(own["data"], ours["data"], strict=True):
        assert (a["index"], a["object"]) == (b["index"], b["object"])
        assert a["embedding"] == pytest.approx(b["embedding"], abs=1e-5)
    assert own["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"]
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused") as api:
        answer = api.embeddings.create(model="m", input=TEXTS[0])
    assert answer.data[0].embedding == pytest.approx(own["data"][0]["embedding"], abs=1e-5)


def test_concurrent_calls_get_their_own_vectors(gateway: GatewayProcess, embeds: VllmServer) -> None:
    texts = [f"text number {number}" for number in range(200)]

    async def scenario() -> list[Any]:
        async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused") as api:
            return list(await asyncio.gather(*(api.embeddings.create(model="m", input=text) for text in texts)))

    answers = asyncio.run(scenario())
    own = asked(embeds.url, "/v1/embeddings", input=texts)
    for answer, expected in zip(answers, own["data"], strict=True):
        assert answer.data[0].embedding == pytest.approx(expected["embedding"], abs=1e-4)
    assert sum(answer.usage.prompt_tokens for answer in answers) == own["usage"]["prompt_tokens"]


def test_scores_by_similarity_are_those_of_the_server(gateway: GatewayProcess, embeds: VllmServer) -> None:
    call = {"text_1": TEXTS[0], "text_2": TEXTS}
    own = asked(embeds.url, "/v1/score", **call)["data"]
    ours = asked(gateway.url, "/v1/score", **call)["data"]
    assert [one["score"] for one in ours] == pytest.approx([one["score"] for one in own], abs=1e-5)


def test_a_cross_encoder_scores_and_reranks_as_the_server_does(scores: VllmServer, tmp_path: Path) -> None:
    worker = {"kind": "vllm", "name": "up", "url": scores.url}
    with GatewayProcess(tmp_path / "gateway", {"workers": [worker]}) as gateway:
        assert get(gateway.url, "/v1/models")[2]["data"][0]["tasks"] == ["classify", "score"]
        pairs = {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}
        own, ours = (asked(url, "/v1/score", **pairs) for url in (scores.url, gateway.url))
        assert [one["score"] for one in ours["data"]] == pytest.approx([one["score"] for one in own["data"]], abs=1e-5)
        assert ours["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
        call = {"query": "the queue", "documents": TEXTS, "top_n": 3}
        own, ours = (asked(url, "/v1/rerank", **call) for url in (scores.url, gateway.url))
        for a, b in zip(own["results"], ours["results"], strict=True):
            assert (a["index"], a["document"]["text"]) == (b["index"], b["document"]["text"])
            assert a["relevance_score"] == pytest.approx(b["relevance_score"], abs=1e-5)
        assert own["usage"] == ours["usage"]


def test_the_embedded_engine_scores_as_vllm_does(scores: VllmServer, tmp_path: Path) -> None:
    model = scoring_model(tmp_path / "model")
    worker = {"kind": "embedded", "name": "own", "model": str(model), "models": ["m"]}
    with GatewayProcess(tmp_path / "gateway", {"workers": [worker]}) as gateway:
        pairs = {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}
        own, ours = (asked(url, "/v1/score", **pairs) for url in (scores.url, gateway.url))
        assert [one["score"] for one in ours["data"]] == pytest.approx([one["score"] for one in own["data"]], abs=1e-4)
        assert ours["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]


def test_classifications_are_those_of_the_server_and_of_the_embedded_engine(tmp_path: Path) -> None:
    model = scoring_model(tmp_path / "model", labels=3, id2label={"0": "bug", "1": "praise", "2": "question"})
    with ClassifyingServer(model, tmp_path / "server.log", "--runner", "pooling") as server:
        workers = [
            {"kind": "vllm", "name": "up", "url": server.url},
            {"kind": "embedded", "name": "own", "model": str(model), "models": ["own"]},
        ]
        with GatewayProcess(tmp_path / "gateway", {"workers": workers}) as gateway:
            assert [one["tasks"] for one in get(gateway.url, "/v1/models")[2]["data"]] == [["classify"]] * 2
            own = asked(server.url, "/classify", input=TEXTS)
            for model_name in ("m", "own"):
                ours = asked(gateway.url, "/v1/classify", input=TEXTS, model=model_name)
                assert ours["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
                for a, b in zip(own["data"], ours["data"], strict=True):
                    assert a["probs"] == pytest.approx(b["probs"], abs=1e-4)
                    assert (a["index"], a["label"], a["num_classes"]) == (b["index"], b["label"], b["num_classes"])
