"""Invalid input gets a precise error in OpenAI's format, and does not affect other calls."""

import json
import socket
from typing import Any

import pytest

from support.scripted_gateway import ScriptedGateway
from support.serving import get, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **fields}


WRONG: list[tuple[str, str, Any, dict[str, str], int, str, str | None]] = [
    ("malformed JSON", CHAT, b'{"model": "m", "messages": [', {}, 400, "invalid_request", None),
    ("an empty body", CHAT, b"", {}, 400, "invalid_request", None),
    ("a list for a body", CHAT, b"[]", {}, 400, "invalid_request", None),
    ("invalid UTF-8", CHAT, b'{"model": "m\xff", "messages": []}', {}, 400, "invalid_request", None),
    ("NaN", CHAT, b'{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":NaN}', {}, 400,
     "invalid_request", None),
    ("deep nesting", CHAT, b'{"model":"m","messages":[{"role":"user","content":' + b"[" * 100_000, {}, 400,
     "invalid_request", None),
    ("deep nesting in a field nobody reads", CHAT, b'{"model":"m","x":' + b'{"a":' * 100_000, {}, 400,
     "invalid_request", None),
    ("no model", CHAT, {"messages": HELLO}, {}, 400, "invalid_request", "model"),
    ("no messages", CHAT, {"model": "m"}, {}, 400, "invalid_request", "messages"),
    ("empty messages", CHAT, chat(messages=[]), {}, 400, "invalid_request", "messages"),
    ("messages of the wrong type", CHAT, chat(messages="hello"), {}, 400, "invalid_request", "messages"),
    ("a message without a role", CHAT, chat(messages=[{"content": "x"}]), {}, 400, "invalid_request",
     "messages[0].role"),
    ("an unknown role", CHAT, chat(messages=[{"role": "king", "content": "x"}]), {}, 400, "invalid_request",
     "messages[0].role"),
    ("a number for a model", CHAT, chat(model=7), {}, 400, "invalid_request", "model"),
    ("an unknown model", CHAT, chat(model="gpt-nope"), {}, 404, "model_not_found", "model"),
    ("text for max_tokens", CHAT, chat(max_tokens="12"), {}, 400, "invalid_request", "max_tokens"),
    ("negative max_tokens", CHAT, chat(max_tokens=-1), {}, 400, "invalid_request", "max_tokens"),
    ("zero max_completion_tokens", CHAT, chat(max_completion_tokens=0), {}, 400, "invalid_request",
     "max_completion_tokens"),
    ("huge max_tokens", CHAT, chat(max_tokens=10**9), {}, 400, "context_length_exceeded", "max_tokens"),
    ("max_tokens beyond any integer", CHAT, b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":'
     + b"9" * 400 + b"}", {}, 400, "invalid_request", "max_tokens"),
    ("a prompt beyond the context", COMPLETIONS, {"model": "m", "prompt": [1] * 5000}, {}, 400,
     "context_length_exceeded", "prompt"),
    ("a prompt of mixed types", COMPLETIONS, {"model": "m", "prompt": [1, "a"]}, {}, 400, "invalid_request", "prompt"),
    ("a negative token id", COMPLETIONS, {"model": "m", "prompt": [1, -1]}, {}, 400, "invalid_request", "prompt"),
    ("an empty prompt", COMPLETIONS, {"model": "m", "prompt": ""}, {}, 400, "invalid_request", "prompt"),
    ("an empty prompt among several", COMPLETIONS, {"model": "m", "prompt": ["a", ""]}, {}, 400, "invalid_request",
     "prompt[1]"),
    ("a number among prompts", COMPLETIONS, {"model": "m", "prompt": ["a", 1]}, {}, 400, "invalid_request",
     "prompt[1]"),
    ("a list of texts among prompts", COMPLETIONS, {"model": "m", "prompt": [["a"], "b"]}, {}, 400, "invalid_request",
     "prompt[0]"),
    ("a negative token id among prompts", COMPLETIONS, {"model": "m", "prompt": [[1], [-1]]}, {}, 400,
     "invalid_request", "prompt[1]"),
    ("a prompt beyond the context among others", COMPLETIONS, {"model": "m", "prompt": [[1], [1] * 5000]}, {}, 400,
     "context_length_exceeded", "prompt[1]"),
    ("too many prompts", COMPLETIONS, {"model": "m", "prompt": ["a"] * 513}, {}, 400, "invalid_request", "prompt"),
    ("more prompts than bytes for their fields", COMPLETIONS, {"model": "m", "prompt": ["a"] * 500,
     "metadata": {"x": "y" * 2400}}, {}, 413, "body_too_large", None),
    ("an image for a worker without", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url",
     "image_url": {"url": "http://a/b.png"}}]}]), {}, 400, "unsupported_feature",
     "messages[0].content[0].image_url"),
    ("an echo by a worker without", COMPLETIONS, {"model": "m", "prompt": "a", "echo": True}, {}, 400,
     "unsupported_feature", "echo"),
    ("temperature out of range", CHAT, chat(temperature=3), {}, 400, "invalid_request", "temperature"),
    ("top_p of zero", CHAT, chat(top_p=0), {}, 400, "invalid_request", "top_p"),
    ("a top_k no engine has", CHAT, chat(top_k=2**63), {}, 400, "invalid_request", "top_k"),
    ("stop tokens beyond any vocabulary", CHAT, chat(stop_token_ids=[2**70]), {}, 400, "invalid_request",
     "stop_token_ids"),
    ("a stop string without end", CHAT, chat(stop="x" * 5000), {}, 400, "invalid_request", "stop"),
    ("structured output that mentions text", CHAT, chat(response_format={"type": "json_schema", "json_schema": {
     "name": "a", "schema": {"properties": {"text": {"type": "string"}}}}}), {}, 400, "unsupported_feature",
     "response_format"),
    ("log probabilities of none", COMPLETIONS, {"model": "m", "prompt": "a", "logprobs": 0}, {}, 400,
     "unsupported_feature", "logprobs"),
    ("too many stops", CHAT, chat(stop=["x"] * 40), {}, 400, "invalid_request", "stop"),
    ("tools the worker cannot do", CHAT, chat(tools=[{"type": "function"}]), {}, 400, "unsupported_feature", "tools"),
    ("n above one", CHAT, chat(n=2), {}, 400, "unsupported_feature", "n"),
    ("an unknown service tier", CHAT, chat(service_tier="gold"), {}, 400, "invalid_request", "service_tier"),
    ("an unknown lane", CHAT, chat(), {"x-inferry-lane": "P9"}, 400, "unknown_lane", "x-inferry-lane"),
    ("a bad deadline", CHAT, chat(), {"x-inferry-deadline-ms": "soon"}, 400, "invalid_request",
     "x-inferry-deadline-ms"),
    ("a run id with a space", CHAT, chat(), {"x-inferry-run-id": "a b"}, 400, "invalid_request", "x-inferry-run-id"),
    ("a body over the limit", CHAT, b" " * 1_000_001, {}, 413, "body_too_large", None),
    ("a path that does not exist", "/v1/embeddingz", chat(), {}, 404, "not_found", None),
    ("a method that does not exist", "/v1/models", chat(), {}, 405, "method_not_allowed", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "headers", "status", "code", "param"), [w[1:] for w in WRONG],
                         ids=[w[0] for w in WRONG])  # fmt: skip
def test_bad_input_gets_a_precise_error(
    scripted: ScriptedGateway, path: str, body: Any, headers: dict[str, str], status: int, code: str, param: str | None
) -> None:
    got_status, got_headers, answer = post(scripted.url, path, body, headers)
    assert (got_status, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert got_headers["x-request-id"]
    assert_it_still_serves(scripted)


def test_a_wrong_method_on_a_call_names_the_right_one(scripted: ScriptedGateway) -> None:
    status, _, answer = get(scripted.url, CHAT)
    assert status == 405
    assert "POST" in answer["error"]["message"]


def test_an_error_never_repeats_what_the_user_wrote(scripted: ScriptedGateway) -> None:
    canary = "canary-7f3a"
    for body in (
        chat(messages=[{"role": canary, "content": canary}]),
        chat(messages=[{"role": "user", "content": canary}], temperature=canary),
        chat(messages=canary),
        {"model": "m", "prompt": {"a": canary}},
    ):
        path = COMPLETIONS if "prompt" in body else CHAT
        status, _, answer = post(scripted.url, path, body)
        assert status == 400
        assert canary not in json.dumps(answer)


def test_a_half_sent_body_times_out(short_timeout_gateway: ScriptedGateway) -> None:
    with socket.create_connection(("127.0.0.1", short_timeout_gateway.port), timeout=120) as sock:
        sock.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model":')
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"invalid_request"' in answer
    assert get(short_timeout_gateway.url, "/health")[0] == 200


def test_a_half_sent_body_whose_sender_leaves_is_forgotten(scripted: ScriptedGateway) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", scripted.port), timeout=120) as sock:
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    assert_it_still_serves(scripted)


def test_a_body_far_over_the_limit_is_refused_without_being_read(scripted: ScriptedGateway) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=120) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n" + b" " * 65536
        )
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_64_mb_body_is_answered_and_not_kept(scripted: ScriptedGateway) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=120) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            for _ in range(64):
                sock.sendall(piece)
        except OSError:
            pass  # it may stop reading before the end
        try:
            answer = read_all(sock)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    assert_it_still_serves(scripted)


def test_headers_have_a_size(scripted: ScriptedGateway) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=120) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 1_000_000)
        try:
            answer = read_all(sock)
        except ConnectionResetError:
            answer = b"HTTP/1.1 431"  # it closed before all of it was sent
    assert answer.startswith(b"HTTP/1.1 431")
    assert_it_still_serves(scripted)


def test_a_deadline_that_passed_is_not_retried_by_openais_clients(scripted: ScriptedGateway) -> None:
    status, headers, answer = post(scripted.url, CHAT, chat(), {"x-inferry-deadline-ms": "0"})
    assert status == 408
    assert answer["error"]["code"] in {"deadline_infeasible", "queue_timeout"}  # at the door, or in the queue
    assert headers["x-should-retry"] == "false"


def test_nonsense_instead_of_http_is_refused(scripted: ScriptedGateway) -> None:
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=120) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 what is this\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400")
    assert_it_still_serves(scripted)


def test_idle_connections_delay_no_other_client(scripted: ScriptedGateway) -> None:
    idle = [socket.create_connection(("127.0.0.1", scripted.port), timeout=120) for _ in range(500)]
    try:
        assert_it_still_serves(scripted)
    finally:
        for sock in idle:
            sock.close()


def assert_it_still_serves(gateway: ScriptedGateway) -> None:
    status, _, answer = post(gateway.url, CHAT, chat())
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "one two three"


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


RESERVED: dict[str, Any] = {
    "priority": -9,
    "request_id": "another call's",
    "session_id": "another tenant's",
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "10.0.0.1"},
    "ec_transfer_params": {},
    "vllm_xargs": {"session_id": "x"},
    "rid": "another call's",
    "extra_key": "x",
    "session_params": {"id": "x"},
    "lora_path": "another",
    "data_parallel_rank": 0,
    "routed_dp_rank": 0,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "disaggregated_params": {"ctx_request_id": 1},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_that_only_the_gateway_sets_are_refused_by_name(scripted: ScriptedGateway, path: str) -> None:
    body = chat() if path == CHAT else {"model": "m", "prompt": "hello"}
    for field, value in RESERVED.items():
        status, _, answer = post(scripted.url, path, {**body, field: value})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_request", field)
        assert answer["error"]["message"] == f"`{field}` is set by the gateway and not accepted from clients"
        assert post(scripted.url, path, {**body, field: None})[0] == 200
