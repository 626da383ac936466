"""Pipelines before the embedded engine: their answers are those of the stages called by hand."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.serving import Serving, get, post

DOCUMENTS = ["the scheduler plans jobs", "a parcel is late", "an invoice was paid twice", "the queue is full"]
PROMPT = "Context:\n{{ context }}\n\nQuestion: {{ input.question }}"
MESSAGES = [{"role": "system", "content": "Answer."}, {"content": PROMPT}]
STAGES: dict[str, Any] = {
    "query": {"kind": "embed", "model": "tiny", "input": "{{ input.question }}"},
    "passages": {"kind": "embed", "model": "tiny", "input": "{{ input.documents }}"},
    "best": {
        "kind": "rank",
        "query": "{{ query }}",
        "vectors": "{{ passages }}",
        "documents": "{{ input.documents }}",
        "top": 2,
    },
    "context": {"kind": "join", "items": "{{ best.text }}", "separator": "\n"},
    "answer": {"kind": "generate", "model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0},
}
INPUTS = {"question": {}, "documents": {"type": "list[text]", "default": DOCUMENTS}}
NOTE = {"kind": "generate", "model": "tiny", "messages": [{"content": "{{ text }}"}], "max_tokens": 4, "temperature": 0}
QUESTION = "Who plans the jobs?"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Serving]:
    directory = tmp_path_factory.mktemp("pipelines")
    stored = directory / "documents.jsonl"
    stored.write_text("".join(json.dumps({"text": text, "vector": [n, 1.0]}) + "\n" for n, text in enumerate("ab")))
    pipelines = {
        "answers": {"inputs": INPUTS, "stages": STAGES, "chat_input": "question"},
        "notes": {
            "inputs": {"texts": {"type": "list[text]"}},
            "stages": {
                "each": {"kind": "map", "over": "{{ input.texts }}", "item": "text", "stages": {"note": NOTE}},
                "all": {"kind": "join", "items": "{{ each }}", "separator": "|"},
            },
        },
        "vectors": {
            "inputs": {"texts": {"type": "list[text]"}},
            "stages": {
                "each": {
                    "kind": "map",
                    "over": "{{ input.texts }}",
                    "stages": {"one": {"kind": "embed", "model": "tiny", "input": "query: {{ item }}"}},
                }
            },
        },
        "reranked": {
            "inputs": {"question": {}, "documents": {"type": "list[text]"}},
            "stages": {
                "best": {
                    "kind": "rank",
                    "model": "tiny",
                    "query": "{{ input.question }}",
                    "documents": "{{ input.documents }}",
                }
            },
        },
        "stored": {
            "inputs": {"vector": {"type": "vector"}},
            "stages": {"best": {"kind": "rank", "query": "{{ input.vector }}", "file": str(stored), "top": 1}},
        },
        "counted": {
            "inputs": {"text": {}},
            "stages": {
                "size": {"kind": "function", "function": "builtins:len", "arguments": {}, "returns": "number"},
            },
        },
    }
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with Serving(directory, config={"workers": [worker], "pipelines": pipelines}) as served:
        yield served


def run(gateway: Serving, name: str, input: Any, **more: Any) -> Any:
    status, _, body = post(gateway.url, f"/v1/pipelines/{name}", {"input": input, **more})
    assert status == 200, body
    return body


def embed(gateway: Serving, texts: list[str]) -> list[list[float]]:
    _, _, body = post(gateway.url, "/v1/embeddings", {"model": "tiny", "input": texts})
    return [one["embedding"] for one in body["data"]]


def by_hand(gateway: Serving, question: str, documents: list[str]) -> tuple[list[str], str]:
    """The stages, called by a client one after another: the best documents and the answer."""
    ((query,), vectors) = embed(gateway, [question]), embed(gateway, documents)
    scores = [math.fsum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
    best = [documents[index] for index in sorted(range(len(scores)), key=lambda index: -scores[index])[:2]]
    context = "\n".join(best)
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": f"Context:\n{context}\n\nQuestion: {question}"},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    _, _, answer = post(gateway.url, "/v1/chat/completions", body)
    return best, answer["choices"][0]["message"]["content"]


def test_results_are_those_of_the_stages_called_by_hand(gateway: Serving) -> None:
    found = run(gateway, "answers", {"question": QUESTION}, include_stages=True)
    best, answer = by_hand(gateway, QUESTION, DOCUMENTS)
    assert found["output"] == found["stages"]["answer"] == answer
    assert [one["text"] for one in found["stages"]["best"]] == best
    assert found["stages"]["query"] == pytest.approx(embed(gateway, [QUESTION])[0], abs=1e-5)
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 12


def test_stages_are_returned_on_request_only(gateway: Serving) -> None:
    assert "stages" not in run(gateway, "answers", {"question": QUESTION})


def test_a_pipeline_is_a_model_of_chat_completions(gateway: Serving) -> None:
    expected = by_hand(gateway, QUESTION, DOCUMENTS)[1]
    messages: Any = [{"role": "user", "content": "earlier"}, {"role": "user", "content": QUESTION}]
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as api:
        assert "answers" in {one.id for one in api.models.list()}
        whole = api.chat.completions.create(model="answers", messages=messages)
        streamed = api.chat.completions.create(model="answers", messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert whole.choices[0].message.content == "".join(pieces) == expected
    assert len(pieces) > 2


@pytest.mark.parametrize(
    "message", [{"content": "x"}, {"role": 3, "content": "x"}, {"role": "user", "content": 3}, "x"]
)
def test_a_chat_message_of_another_shape_is_refused(gateway: Serving, message: Any) -> None:
    status, _, answer = post(gateway.url, "/v1/chat/completions", {"model": "answers", "messages": [message]})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_a_pipeline_without_chat_input_is_no_model(gateway: Serving) -> None:
    with OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as api:
        assert "notes" not in {one.id for one in api.models.list()}
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="notes", messages=[{"role": "user", "content": "x"}])


def test_the_last_stage_is_streamed(gateway: Serving) -> None:
    body = {"input": {"question": QUESTION}, "stream": True}
    status, headers, events = post(gateway.url, "/v1/pipelines/answers", body)
    assert (status, headers["x-inferry-path"]) == (200, "tiny")
    lines = [line[6:] for line in events.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])
    assert text == by_hand(gateway, QUESTION, DOCUMENTS)[1]


def test_a_map_keeps_the_order_of_its_list(gateway: Serving) -> None:
    texts = [f"text {number}" for number in range(20)]
    found = run(gateway, "notes", {"texts": texts}, include_stages=True)
    for text, note in zip(texts[:4], found["stages"]["each"], strict=False):
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        assert post(gateway.url, "/v1/chat/completions", body)[2]["choices"][0]["message"]["content"] == note
    assert found["output"] == "|".join(found["stages"]["each"])
    assert run(gateway, "notes", {"texts": []})["output"] == ""


def test_a_map_of_embeddings_is_one_call(gateway: Serving) -> None:
    texts = [f"text {number}" for number in range(20)]
    headers = {"x-inferry-run-id": "one-call"}
    status, _, found = post(gateway.url, "/v1/pipelines/vectors", {"input": {"texts": texts}}, headers)
    assert status == 200
    expected = embed(gateway, [f"query: {text}" for text in texts])
    assert found["output"] == [pytest.approx(vector, abs=1e-5) for vector in expected]
    _, _, report = get(gateway.url, "/v1/runs/one-call")
    assert report["steps"] == 1


def test_documents_are_ranked_by_a_model_or_by_stored_vectors(gateway: Serving) -> None:
    found = run(gateway, "reranked", {"question": QUESTION, "documents": DOCUMENTS})["output"]
    body = {"model": "tiny", "query": QUESTION, "documents": DOCUMENTS}
    results = post(gateway.url, "/v1/rerank", body)[2]["results"]
    assert [(one["index"], one["text"]) for one in found] == [(r["index"], r["document"]["text"]) for r in results]
    assert run(gateway, "stored", {"vector": [2.0, 0.1]})["output"] == [
        {"index": 1, "score": pytest.approx(0.742, abs=0.01), "text": "b"}
    ]


def test_pipelines_are_listed_without_their_templates(gateway: Serving) -> None:
    _, _, listed = get(gateway.url, "/v1/pipelines")
    assert [one["id"] for one in listed["data"]][:2] == ["answers", "notes"]
    _, _, one = get(gateway.url, "/v1/pipelines/answers")
    assert one["inputs"] == {
        "question": {"type": "text", "required": True},
        "documents": {"type": "list[text]", "required": False},
    }
    assert one["stages"][-1] == {"name": "answer", "kind": "generate", "needs": ["context"], "type": "text"}
    assert "Context" not in json.dumps(one)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("answers", {"input": {}}, 400, "invalid_request", "input.question"),
        ("answers", {"input": {"question": 3}}, 400, "invalid_request", "input.question"),
        ("answers", {"input": {"question": "a", "other": 1}}, 400, "invalid_request", "input"),
        ("answers", {"inputs": {}}, 400, "invalid_request", None),
        ("answers", {"input": {"question": "a", "documents": []}}, 200, None, None),
        ("answers", {"input": {"question": "word " * 9000}}, 400, "context_length_exceeded", "stages.query"),
        ("notes", {"input": {"texts": ["a"]}, "stream": True}, 400, "unsupported_feature", "stream"),
        ("notes", {"input": {"texts": ["a", "word " * 9000]}}, 400, "context_length_exceeded", "stages.each.note-1"),
        ("stored", {"input": {"vector": [1, 2, 3]}}, 400, "invalid_request", "stages.best"),
        ("counted", {"input": {"text": "a"}}, 500, "function_failed", "stages.size"),
        ("unknown", {}, 404, "not_found", None),
    ],
)
def test_an_error_names_the_input_or_the_stage(
    gateway: Serving, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    found, _, answer = post(gateway.url, f"/v1/pipelines/{path}", body)
    assert found == status, answer
    if code is not None:
        assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)


def test_a_misspelt_input_is_named(gateway: Serving) -> None:
    for name, said in (("qestion", "no input `qestion`"), ("some words", "no such input"), ("q" * 65, "no such input")):
        _, _, answer = post(gateway.url, "/v1/pipelines/answers", {"input": {name: "a"}})
        assert f"{said}; its inputs are: question" in answer["error"]["message"]


def test_every_step_is_in_the_ledger_of_one_run(gateway: Serving) -> None:
    headers = {"x-inferry-run-id": "ledger-run"}
    status, _, body = post(gateway.url, "/v1/pipelines/answers", {"input": {"question": QUESTION}}, headers)
    assert (status, body["run_id"]) == (200, "ledger-run")
    _, _, report = get(gateway.url, "/v1/runs/ledger-run")
    assert report["steps"] == 2, "both embed stages are one call"
