"""An answer that is not streamed is the one that the server would have given without a gateway, field for field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.gateway_process import GatewayProcess
from support.serving import post
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ONE_OFF = frozenset({"id", "created"})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": CITY, "strict": True}}
NAMED = {"type": "function", "function": {"name": "lookup"}}
SPACES = set("\u0120\u010a\u0109\u010d")
"""How byte-level tokenizers spell space, newline, tab and return."""
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"stream": False, "user": "u"}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"n": 2, "temperature": 1.0, "seed": 5}),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"stop": ["e", "o"], "max_tokens": 60}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (CHAT, {"tools": [LOOKUP], "tool_choice": "none"}),
    (CHAT, {"prompt_logprobs": 1}),
    (CHAT, {"prompt_logprobs": 0}),
    (CHAT, {"echo": True}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": [5, 60, 70], "logprobs": 2}),
    (COMPLETIONS, {"n": 2, "temperature": 1.0, "seed": 3}),
    (COMPLETIONS, {"return_token_ids": True}),
    (COMPLETIONS, {"stop": ["e", "o"], "max_tokens": 60}),
    (COMPLETIONS, {"stop": ["e", "o"], "max_tokens": 60, "include_stop_str_in_output": True}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt_logprobs": 2}),
    (COMPLETIONS, {"use_beam_search": True, "n": 2}),
    (COMPLETIONS, {"prompt": ["One two", "three four", "five"]}),
    (COMPLETIONS, {"prompt": [[5, 60], [70, 8]], "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1}),
    (COMPLETIONS, {"prompt": ["One two", "three four"], "echo": True}),
]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
    with VllmServer(model, tmp_path_factory.mktemp("whole") / "vllm.log", *tools) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    worker = {"kind": "vllm", "name": "a", "url": server.url}
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), {"workers": [worker]}) as gateway:
        yield gateway


def masked(value: Any) -> Any:
    """Without what differs from call to call. Ids of tool calls are drawn."""
    if isinstance(value, dict):
        return {key: "*" if key in ONE_OFF else masked(one) for key, one in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "fields"), CASES, ids=lambda value: value if isinstance(value, str) else str(value))
def test_an_answer_is_the_servers_own(
    server: VllmServer, gateway: GatewayProcess, path: str, fields: dict[str, Any]
) -> None:
    direct, through = both(server, gateway, path, fields)
    assert json.dumps(through) == json.dumps(direct), "fields, values and order"


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_call_of_a_tool_is_the_servers_own(
    server: VllmServer, gateway: GatewayProcess, model: Path, choice: Any
) -> None:
    """A call that is complete: of one that is cut off, vLLM's two parsers make two things. The one for streams leaves
    arguments as the model wrote them, and content null.
    """
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    compact = {str(token): -100 for name, token in vocabulary.items() if set(name) <= SPACES}
    more = {"logit_bias": compact, "parallel_tool_calls": False, "max_tokens": 400}
    direct, through = both(server, gateway, CHAT, {"tools": [LOOKUP], "tool_choice": choice, **more})
    assert read(through) == read(direct)


def test_images_are_refused_by_name_if_the_model_takes_none(gateway: GatewayProcess) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]
    status, _, answer = post(gateway.url, CHAT, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert (status, answer["error"]["code"]) == (400, "unsupported_feature")
    assert answer["error"]["param"] == "messages[0].content[1].image_url"


def read(answer: dict[str, Any]) -> dict[str, Any]:
    """What a client understands of an answer with tool calls."""
    for choice in answer["choices"]:
        choice["message"]["content"] = choice["message"]["content"] or None
        for call in choice["message"]["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return answer


def both(server: VllmServer, gateway: GatewayProcess, path: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The server's own answer, and the gateway's."""
    prompt = {"messages": [{"role": "user", "content": "hello there"}]} if path == CHAT else {"prompt": "hello there"}
    body = {"model": "m", "temperature": 0, "max_tokens": 12, **prompt, **fields}
    status, _, direct = post(server.url, path, body)
    assert status == 200, direct
    status, _, through = post(gateway.url, path, body)
    assert status == 200, through
    return masked(direct), masked(through)
