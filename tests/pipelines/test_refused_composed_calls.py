"""Requests that composed models refuse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tenant_gateway import CHAT
from support.two_models import TwoModelGateway

STAGE = {"kind": "generate", "model": "small", "messages": [{"content": "{{ input.text }}"}], "max_tokens": 16}
PIPELINE = {"inputs": {"text": {"default": "Hello?"}}, "chat_input": "text", "stages": {"answer": STAGE}}
CONFIG: dict[str, Any] = {"pipelines": {"p": PIPELINE}, "routes": {"auto": {"default": "small"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModelGateway]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    with TwoModelGateway(directory, CONFIG) as found:
        yield found


@pytest.mark.parametrize("path", ["/v1/pipelines/p", CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("body", [None, b"", b" ", b"{"])
def test_a_body_without_json_is_refused(gateway: TwoModelGateway, path: str, body: bytes | None) -> None:
    refused = gateway.call("POST", path, body)
    assert refused.status == 400
    assert b"not valid JSON" in refused.body


@pytest.mark.parametrize("content", [[PICTURE], [TEXT, PICTURE]])
def test_a_pipeline_as_a_model_names_the_part_that_it_cannot_take(gateway: TwoModelGateway, content: Any) -> None:
    refused = gateway.call("POST", CHAT, {"model": "p", "messages": [{"role": "user", "content": content}]})
    assert (refused.status, refused.code) == (400, "unsupported_feature")
    assert "`image_url` parts" in refused.json["error"]["message"]
    answered = gateway.call("POST", CHAT, {"model": "p", "messages": [{"role": "user", "content": [TEXT, TEXT]}]})
    assert answered.status == 200


def test_a_prefilled_answer_of_a_pipeline_is_refused_by_name(gateway: TwoModelGateway) -> None:
    turns = [{"role": "user", "content": "Where is my parcel?"}, {"role": "assistant", "content": "Thanks"}]
    body = {"model": "p", "max_tokens": 9, "messages": turns}
    gateway.upstream.bodies.clear()
    message = gateway.call("POST", "/v1/messages", body)
    assert message.status == 400
    assert "`messages: prefilled answer` is not supported by the pipeline" in message.json["error"]["message"]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    refused = gateway.call("POST", CHAT, {**body, **flags})
    assert (refused.code, refused.json["error"]["param"]) == ("unsupported_feature", "continue_final_message")
    assert not gateway.asked()
    assert gateway.call("POST", CHAT, {**body, **flags, "continue_final_message": False}).status == 200
    assert not flags.keys() & gateway.upstream.bodies[-1].keys()
