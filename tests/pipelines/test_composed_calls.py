"""Routes, cascades and ensembles over HTTP: each API, streamed and whole, errors, permissions, disconnects."""

import asyncio
import json
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inferry.ledger.stores.opening import open_queries
from support.tenant_gateway import CHAT
from support.two_models import TwoModelGateway, chat, streamed_text
from support.waiting import until

NESTED = ("auto", "pair", "nested", "best")


def a_pipeline(model: str) -> dict[str, Any]:
    """Two stages, one after the other, that call the model."""
    draft = {"kind": "generate", "model": model, "messages": [{"content": "{{ input.text }}"}], "max_tokens": 16}
    answer = {**draft, "messages": [{"content": "Again: {{ draft }}"}]}
    return {"inputs": {"text": {}}, "chat_input": "text", "stages": {"draft": draft, "answer": answer}}


CONFIG: dict[str, Any] = {
    "routes": {
        "auto": {
            "rules": [
                {"when": {"tools": True}, "model": "large"},
                {"when": {"max_prompt_bytes": 200}, "model": "small"},
            ],
            "default": "large",
        },
        "sorted": {
            "classify": {"model": "small", "labels": {"easy": "small", "hard": "large"}, "timeout_ms": 30_000},
            "default": "large",
        },
        "nested": {"default": "pair"},
    },
    "cascades": {
        "pair": {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 0},
        "compared": {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 1},
    },
    "ensembles": {
        "panel": {"models": ["small", "large", "small"]},
        "three": {"models": ["small", "large", "small"], "min_answers": 3},
        "best": {"models": ["small", "large"], "choose": "logprob"},
        **{f"with-{model}": {"models": [model, "large"], "choose": "logprob"} for model in NESTED},
    },
    "pipelines": {f"by-{model}": a_pipeline(model) for model in NESTED},
    "tenants": {"narrow": {"models": ["pair"]}},
    "prices": {"small": {"input": 1.0, "output": 1.0}, "large": {"input": 10.0, "output": 10.0}},
}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TwoModelGateway]:
    with TwoModelGateway(tmp_path, CONFIG) as found:
        yield found


def test_a_route_chooses_by_rules_and_the_answer_says_the_path(gateway: TwoModelGateway) -> None:
    short = gateway.call("POST", CHAT, chat("auto"))
    long = gateway.call("POST", CHAT, chat("auto", "x" * 300))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with_tools = gateway.call("POST", CHAT, chat("auto", tools=tools))
    assert [one.headers["x-inferry-path"] for one in (short, long, with_tools)] == ["small", "large", "large"]
    assert short.json["choices"][0]["message"]["content"] == "Small"


def test_a_route_streams_in_every_api(gateway: TwoModelGateway) -> None:
    streamed = gateway.call("POST", CHAT, chat("auto", stream=True))
    message = gateway.call("POST", "/v1/messages", chat("auto"))
    response = gateway.call("POST", "/v1/responses", {"model": "auto", "input": "Hello?"})
    completion = gateway.call("POST", "/v1/completions", {"model": "auto", "prompt": "Hello?", "max_tokens": 8})
    several = gateway.call("POST", "/v1/completions", {"model": "auto", "prompt": ["a", "b"], "max_tokens": 8})
    assert streamed_text(streamed.body) == "Small"
    assert message.json["content"][0]["text"] == "Small"
    assert response.json["output"][0]["content"][0]["text"] == "Small"
    assert completion.json["choices"][0]["text"] == "Small"
    assert [one["text"] for one in several.json["choices"]] == ["Small", "Small"]
    assert {one.headers["x-inferry-path"] for one in (streamed, message, response, completion, several)} == {"small"}


def test_a_classifier_chooses_the_model_of_its_label(gateway: TwoModelGateway) -> None:
    gateway.answers["small"] = lambda body: "Hard." if "structured_outputs" in body else "Small"
    answer = gateway.call("POST", CHAT, chat("sorted"))
    assert answer.headers["x-inferry-path"] == "small>large"
    gateway.answers["small"] = "neither"
    assert gateway.call("POST", CHAT, chat("sorted")).headers["x-inferry-path"] == "small>large"
    gateway.status["small"] = 400
    assert gateway.call("POST", CHAT, chat("sorted")).json["choices"][0]["message"]["content"] == "Large"


@pytest.mark.parametrize(("logprob", "text", "path"), [(-0.1, "Small", "small"), (-2.0, "Large", "small>large")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_cascade_answers_in_every_api(
    gateway: TwoModelGateway, logprob: float, text: str, path: str, stream: bool
) -> None:
    gateway.logprob = logprob
    more: dict[str, Any] = {"stream": True} if stream else {}
    answer = gateway.call("POST", CHAT, chat("pair", **more))
    assert answer.headers["x-inferry-path"] == path
    assert (streamed_text(answer.body) if stream else answer.json["choices"][0]["message"]["content"]) == text
    message = gateway.call("POST", "/v1/messages", chat("pair", **more))
    response = gateway.call("POST", "/v1/responses", {"model": "pair", "input": "Hello?", **more})
    completion = gateway.call("POST", "/v1/completions", {"model": "pair", "prompt": "Hello?", **more})
    for found in (message, response, completion):
        assert found.status == 200, found.body
        assert found.headers["x-inferry-path"] == path
        assert text in found.body.decode() or text[3:] in found.body.decode()
    if not stream:
        assert message.json["content"][0]["text"] == text
        assert message.json["stop_reason"] == "end_turn"
        assert response.json["output"][0]["content"][0]["text"] == text
        assert answer.json["choices"][0]["logprobs"] is None, "the client asked for none"
    assert gateway.service.gateway.in_flight == 0


def test_the_steps_are_rows_of_one_run(gateway: TwoModelGateway) -> None:
    gateway.logprob = -2.0
    gateway.call("POST", CHAT, chat("pair"), {"x-inferry-run-id": "r1", "x-inferry-step-id": "s1"})
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 30))
    rows = gateway.as_admin("GET", "/admin/reports/composed").json["rows"]
    (row,) = rows
    assert (row["name"], row["calls"], row["accepted"]) == ("pair", 1, 0)
    assert gateway.call("GET", "/v1/runs/r1").json["jobs"]["done"] == 2
    entries = open_queries(gateway.config.ledger)
    with entries:
        found = [(one.step_id, one.composed) for one in entries.jobs(run="r1")]
    assert sorted(found) == [("s1/large", "pair/large"), ("s1/small", "pair/small")]


def recorded(gateway: TwoModelGateway, calls: int) -> bool:
    """Whether the ledger has this many calls of the first composed model."""
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 30))
    rows = gateway.as_admin("GET", "/admin/reports/composed").json["rows"]
    return bool(rows) and rows[0]["calls"] == calls


def test_a_sample_is_compared_and_reported(gateway: TwoModelGateway) -> None:
    gateway.answers = {"small": "Same answer.", "large": "same  answer"}
    gateway.call("POST", CHAT, chat("compared"))
    until(lambda: recorded(gateway, 1))  # the large model is asked after the client has its answer
    gateway.answers["large"] = "another"
    gateway.call("POST", CHAT, chat("compared"))
    until(lambda: recorded(gateway, 2))
    gateway.logprob = -3.0
    assert gateway.call("POST", CHAT, chat("compared")).json["choices"][0]["message"]["content"] == "another"
    until(lambda: recorded(gateway, 3))
    (row,) = gateway.as_admin("GET", "/admin/reports/composed").json["rows"]
    assert (row["accepted"], row["compared"], row["agreed"]) == (2, 2, 1)
    assert row["agreement_low"] < 0.5 < row["agreement_high"]
    # Large-only: three calls of 12 tokens at 10 per million. Spent: three small, one large, two compared.
    assert row["cost_large_only"] == pytest.approx(3 * 120e-6, rel=0.01)
    assert row["cost"] == pytest.approx(3 * 12e-6 + 120e-6 + 2 * 120e-6, rel=0.01)


def test_a_stream_of_the_large_model_is_compared_and_not_delayed(gateway: TwoModelGateway) -> None:
    """With clients that stream and a threshold that accepts nothing, there is something to choose a threshold from."""
    gateway.answers = {"small": "Same answer.", "large": "same  answer"}
    gateway.logprob = -3.0
    headers = {"x-inferry-run-id": "r1"}
    for calls, text in enumerate(("same  answer", "another"), 1):
        gateway.answers["large"] = text
        answer = gateway.call("POST", CHAT, chat("compared", stream=True), headers)
        assert streamed_text(answer.body) == text
        assert answer.body.count(b'"content":') > 1, "as it is generated"
        assert answer.headers["x-inferry-path"] == "small>large"
        until(partial(recorded, gateway, calls))
    with open_queries(gateway.config.ledger) as queries:
        assert sorted(queries.score_pairs("compared", 0.0)) == [(-3.0, False), (-3.0, True)]
        found = sorted((one.composed, one.lane) for one in queries.jobs(run="r1"))
    assert found == [("compared/compared", "P2")] * 2 + [("compared/large", "P1")] * 2 + [("compared/small", "P1")] * 2
    (row,) = gateway.as_admin("GET", "/admin/reports/composed").json["rows"]
    assert (row["calls"], row["accepted"]) == (2, 0)
    assert row["cost_large_only"] == pytest.approx(2 * 120e-6), "without what only the comparison cost"


def test_routes_and_votes_are_reported(gateway: TwoModelGateway) -> None:
    for text in ("Hello?", "Hello?", "x" * 300):
        gateway.call("POST", CHAT, chat("auto", text))
    gateway.answers["small"] = lambda body: "Hard." if "structured_outputs" in body else "Small"
    gateway.call("POST", CHAT, chat("sorted"))
    gateway.answers["small"] = "Small"
    gateway.call("POST", CHAT, chat("nested"))
    gateway.call("POST", CHAT, chat("three"))
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 30))
    found = {row["name"]: row for row in gateway.as_admin("GET", "/admin/reports/composed").json["rows"]}
    auto, labelled, nested, three = (found[name] for name in ("auto", "sorted", "nested", "three"))
    assert (auto["kind"], auto["calls"], auto["answered_by"]) == ("route", 3, "small: 2, large: 1")
    assert (auto["accepted"], auto["agreement"], auto["vote_share"]) == (None, None, None)
    # Calls of 12 tokens, at 1 per million with the small model and at 10 with the large one.
    assert auto["cost"] == pytest.approx(144e-6)
    assert auto["cost_large_only"] == pytest.approx(360e-6)
    assert auto["saved"] == pytest.approx(0.6)
    assert labelled["saved"] == pytest.approx(-0.1), "the classifier costs, and the dearest model was chosen"
    assert (nested["answered_by"], nested["cost_large_only"]) == ("pair: 1", None), "a cascade has no price"
    assert (three["kind"], three["accepted"]) == ("ensemble", None)
    assert three["vote_share"] == pytest.approx(2 / 3)


def test_a_small_model_without_log_probabilities_is_unsure(
    gateway: TwoModelGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.logprob = None
    answers = [gateway.call("POST", CHAT, chat("pair")) for _ in range(2)]
    assert {one.headers["x-inferry-path"] for one in answers} == {"small>large"}
    assert caplog.text.count("gives no log probabilities") == 1


def test_an_ensemble_votes_and_cancels_what_is_left(gateway: TwoModelGateway) -> None:
    gateway.hold.add("large")
    answer = gateway.call("POST", CHAT, chat("panel"))
    assert answer.json["choices"][0]["message"]["content"] == "Small"
    assert answer.headers["x-inferry-path"] == "small+large+small>small"
    until(lambda: gateway.service.gateway.in_flight == 0)
    until(lambda: not gateway.upstream.running)


def test_an_ensemble_chooses_the_surest_answer_and_survives_a_failed_member(gateway: TwoModelGateway) -> None:
    assert gateway.call("POST", CHAT, chat("best")).json["choices"][0]["message"]["content"] == "Small"
    gateway.status["small"] = 400
    assert gateway.call("POST", CHAT, chat("best")).json["choices"][0]["message"]["content"] == "Large"
    gateway.status["large"] = 400
    failed = gateway.call("POST", CHAT, chat("best"))
    assert (failed.status, failed.code) == (400, "invalid_request")


def test_composed_models_are_listed_and_may_call_each_other(gateway: TwoModelGateway) -> None:
    listed = {one["id"]: one["owned_by"] for one in gateway.call("GET", "/v1/models").json["data"]}
    assert listed["auto"] == "inferry-route"
    assert listed["pair"] == "inferry-cascade"
    assert listed["panel"] == "inferry-ensemble"
    answer = gateway.call("POST", CHAT, chat("nested"))
    assert answer.headers["x-inferry-path"] == "pair>small"
    assert gateway.call("POST", CHAT, chat("unknown")).code == "model_not_found"


@pytest.mark.parametrize(
    ("model", "asked", "answer"),
    [
        ("auto", ["small"], "Small"),
        ("pair", ["small"], "Small"),
        ("nested", ["small"], "Small"),
        ("best", ["large", "small"], "Small"),
    ],
)
def test_a_step_may_call_another_composed_model(
    gateway: TwoModelGateway, model: str, asked: list[str], answer: str
) -> None:
    """As a stage of a pipeline, the last one and another one, whole and streamed, and as a member of an ensemble."""
    for path, body in (
        (f"/v1/pipelines/by-{model}", {"input": {"text": "Hello?"}}),
        (f"/v1/pipelines/by-{model}", {"input": {"text": "Hello?"}, "stream": True}),
        (CHAT, chat(f"by-{model}")),
        (CHAT, chat(f"by-{model}", stream=True)),
        (CHAT, chat(f"with-{model}")),
        ("/v1/messages", chat(f"by-{model}")),
    ):
        gateway.upstream.bodies.clear()
        found = gateway.call("POST", path, body, {"x-inferry-run-id": "nested-run"})
        assert found.status == 200, found.body
        text = streamed_text(found.body) if body.get("stream") else found.body.decode()
        assert answer in text
        expected = sorted(asked * 2) if "by-" in str(path) + str(body) else sorted([*asked, "large"])
        assert sorted(gateway.asked()) == expected
    assert gateway.service.gateway.in_flight == 0
    gateway.run(asyncio.to_thread(gateway.service.gateway._recorder.flush, 30))
    with open_queries(gateway.config.ledger) as ledger:
        rows = ledger.jobs(run="nested-run", limit=100)
    assert {str(row.composed).partition("/")[0] for row in rows} >= {"pair" if model == "nested" else model}
    assert all(row.run_id == "nested-run" for row in rows)


def test_an_error_of_a_nested_call_names_the_stage_and_a_disconnect_ends_it(gateway: TwoModelGateway) -> None:
    gateway.status["small"] = 400
    failed = gateway.call("POST", CHAT, chat("by-auto"))
    assert (failed.status, failed.code, failed.json["error"]["param"]) == (400, "invalid_request", "stages.draft")
    gateway.status.clear()
    gateway.hold.add("small")
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        body = json.dumps(chat("by-nested")).encode()
        client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        until(lambda: len(gateway.upstream.running) == 1)
    until(lambda: gateway.service.gateway.in_flight == 0)


def test_a_tenant_needs_permission_for_the_name_and_not_for_its_steps(gateway: TwoModelGateway) -> None:
    narrow = {"x-inferry-tenant": "narrow"}
    assert gateway.call("POST", CHAT, chat("pair"), narrow).status == 200
    assert gateway.call("POST", CHAT, chat("auto"), narrow).code == "model_not_allowed"
    assert gateway.call("POST", CHAT, chat("small"), narrow).code == "model_not_allowed"


def test_errors_of_steps_keep_their_type_and_the_shape_of_the_api(gateway: TwoModelGateway) -> None:
    too_long = {"model": "pair", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
    assert gateway.call("POST", CHAT, too_long).code == "invalid_request"
    gateway.status = {"small": 400, "large": 400}
    failed = gateway.call("POST", "/v1/messages", chat("pair"))
    assert (failed.status, failed.json["type"]) == (400, "error")
    gateway.status = {}
    late = gateway.call("POST", CHAT, chat("pair"), {"x-inferry-deadline-ms": "0"})
    assert (late.status, late.code) == (504, "deadline_exceeded")
    embedding = gateway.call("POST", "/v1/embeddings", {"model": "pair", "input": "x"})
    assert (embedding.status, embedding.code) == (400, "unsupported_feature")


@pytest.mark.parametrize("model", ["pair", "panel"])
def test_what_a_model_cannot_answer_is_refused_by_its_field(gateway: TwoModelGateway, model: str) -> None:
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "model"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
    ]
    if model == "panel":
        refusals.append((CHAT, chat("panel", n=2), "n"))
    for path, fields, param in refusals:
        refused = gateway.call("POST", path, {**fields, "model": model})
        assert (refused.status, refused.code, refused.json["error"]["param"]) == (400, "unsupported_feature", param)


@pytest.mark.parametrize("model", ["pair", "panel", "sorted", "auto"])
def test_a_disconnect_cancels_every_step(gateway: TwoModelGateway, model: str) -> None:
    gateway.hold |= {"small", "large"}
    body = json.dumps(chat(model)).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        until(lambda: len(gateway.upstream.running) == (3 if model == "panel" else 1))
    until(lambda: not gateway.upstream.running)
    until(lambda: gateway.service.gateway.in_flight == 0)
    assert not any(gateway.service.gateway.queue_depths().values())


def test_a_cancelled_run_ends_all_steps(gateway: TwoModelGateway) -> None:
    gateway.hold |= {"small"}
    body = json.dumps(chat("pair")).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nx-inferry-run-id: r9\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
        client.sendall(head % (CHAT.encode(), len(body)) + body)
        until(lambda: len(gateway.upstream.running) == 1)
        assert gateway.call("DELETE", "/v1/runs/r9").status == 200
        assert client.recv(4096).startswith(b"HTTP/1.1 409")
    until(lambda: gateway.service.gateway.in_flight == 0)
    assert "large" not in gateway.asked()
