"""A body made from events has the fields of the server's own body, in their order."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.response_shapes import shape_of, with_null_fields
from inferry.ingress.openai.collect import collect_events
from support.http_gateway import HttpGateway
from support.upstream import DONE, Upstream, begin, event

CHAT = "/v1/chat/completions"
# As vLLM 0.32 writes them, for one call: whole, and as a stream.
WHOLE = {
    "chat": """{"id":"chatcmpl-1","object":"chat.completion","created":17,"model":"tiny","choices":[{"index":0,
    "message":{"role":"assistant","content":"oolean E","refusal":null,"annotations":null,"audio":null,
    "function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,
    "routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":
    {"prompt_tokens":15,"total_tokens":17,
    "completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0,"multimodal_tokens":null},
    "completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,
    "kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}""",
    "completions": """{"id":"cmpl-1","object":"text_completion","created":17,"model":"tiny","choices":[{"index":0,
    "text":"oolean E","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,
    "prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":
    {"prompt_tokens":16,"total_tokens":18,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,
    "created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null,
    "ec_transfer_params":null,"metrics":null}""",
}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": "tiny"}
STREAM = {
    "chat": [
        {
            **HEAD,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            "prompt_token_ids": None,
            "prompt_text": None,
        },
        {**HEAD, "choices": [{"index": 0, "delta": {"content": "oolean"}, "logprobs": None, "finish_reason": None}]},
        {
            **HEAD,
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": " E"},
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": None,
                }
            ],
        },
        {
            **HEAD,
            "choices": [],
            "usage": {
                "prompt_tokens": 15,
                "total_tokens": 17,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
            },
            "system_fingerprint": "vllm-0.32.0",
        },
    ],
    "completions": [
        {
            **HEAD,
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}],
        }
        for text, finish in (("oolean", None), (" E", "length"))
    ]
    + [
        {
            **HEAD,
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [],
            "usage": {
                "prompt_tokens": 16,
                "total_tokens": 18,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "system_fingerprint": "vllm-0.32.0",
        }
    ],
}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_stream_makes_the_answer_that_the_server_would_have_given(api: str) -> None:
    whole = json.loads(WHOLE[api])
    shown = json.loads(WHOLE[api].replace("oolean E", "other"))
    *events, last = [event(one) for one in STREAM[api]]
    found = collect_events(b"".join(events), last, shape_of(shown))
    assert json.dumps(found) == json.dumps(whole), "order and all"


def test_a_response_shape_holds_no_content() -> None:
    answer = {"a": "secret", "b": None, "c": [{"d": "secret", "e": None}], "token_ids": [1], "f": ["secret"]}
    shape = shape_of(answer)
    assert "secret" not in repr(shape)
    assert with_null_fields({}, shape) == {"b": None, "token_ids": None}
    assert with_null_fields({"c": [{"d": 1}, 2], "x": 3}, shape) == {
        "b": None,
        "c": [{"d": 1, "e": None}, 2],
        "token_ids": None,
        "x": 3,
    }


async def answers(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    api = "chat" if request.path.endswith("chat/completions") else "completions"
    if not body.get("stream"):
        return web.Response(body=WHOLE[api].encode(), content_type="application/json")
    response = await begin(request)
    await response.write(b"".join(map(event, STREAM[api])) + DONE)
    return response


class Vllm(Upstream):
    """Answers its probe as it answers calls."""

    def _answer_probe(self, body: dict[str, Any]) -> web.Response:
        answer = json.loads(WHOLE["chat" if "messages" in body else "completions"])
        return web.json_response(answer)


class OverVllm(HttpGateway):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, answers)
        self.upstream = Vllm(answers)


def test_a_client_gets_what_it_would_have_got_without_a_gateway(tmp_path: Path) -> None:
    with OverVllm(tmp_path) as gateway:
        key = {"authorization": f"Bearer {gateway.key('acme')}"}
        for api, path, prompt in (
            ("chat", CHAT, {"messages": [{"role": "user", "content": "x"}]}),
            ("completions", "/v1/completions", {"prompt": "x"}),
        ):
            for more in ({}, {"prompt_logprobs": 1}, {"echo": True}, {"use_beam_search": True}):
                answer = gateway.call("POST", path, {"model": "m", "max_tokens": 2, **prompt, **more}, key)
                assert json.dumps(answer.json) == json.dumps(json.loads(WHOLE[api])), (api, more)
                assert ("stream" in gateway.upstream.bodies[-1]) is (not more)


def test_a_feature_without_worker_support_is_refused_for_whole_answers(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, answers, kind="openai") as gateway:
        key = {"authorization": f"Bearer {gateway.key('acme')}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
        answer = gateway.call("POST", CHAT, body, key)
        assert (answer.status, answer.code) == (400, "unsupported_feature")


def test_an_answer_without_reasoning_has_the_field_of_an_answer_with_it() -> None:
    shape = shape_of({"role": "assistant", "content": None, "reasoning": "I see"})
    answer = {"role": "assistant", "content": "so"}
    assert with_null_fields(answer, shape) == {**answer, "reasoning": None}
