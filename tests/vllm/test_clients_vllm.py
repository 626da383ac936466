"""Anthropic's client and LangChain before real vLLM: whole and streamed answers are the server's own.

The other tests here use the client of OpenAI.
"""

from typing import Any, Protocol

import pytest
from anthropic import Anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from openai import OpenAI

from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
MAX_TOKENS = 12


class Served(Protocol):
    @property
    def url(self) -> str: ...


class Serve(Protocol):
    def __call__(self) -> Served: ...


@pytest.fixture(autouse=True)
def without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def own_text(servers: tuple[VllmServer, VllmServer]) -> str:
    """What the server answers without the gateway."""
    with OpenAI(base_url=servers[0].url + "/v1", api_key="unused", max_retries=0, timeout=120) as direct:
        answer = direct.chat.completions.create(model="m", messages=HELLO, temperature=0, max_tokens=MAX_TOKENS)
    text = answer.choices[0].message.content
    assert text
    return text


def test_the_client_of_anthropic(serve: Serve, own_text: str) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    with Anthropic(base_url=serve().url, api_key="unused", max_retries=0, timeout=120) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(model="m", messages=HELLO)
    assert [block.type for block in whole.content] == ["text"]
    assert "".join(block.text for block in whole.content if block.type == "text") == own_text
    assert "".join(pieces) == own_text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    inputs = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == inputs > 0


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_langchain(serve: Serve, own_text: str, api: str) -> None:
    url = serve().url
    settings: Any = {"model": "m", "api_key": "unused", "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0}
    models: dict[str, BaseChatModel] = {
        "openai": ChatOpenAI(base_url=url + "/v1", **settings),
        "anthropic": ChatAnthropic(base_url=url, **settings),
    }
    model = models[api]
    question = HELLO[0]["content"]
    whole = model.invoke(question)
    assert whole.text == own_text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_tokens"] > 0
    assert 0 < whole.usage_metadata["output_tokens"] <= MAX_TOKENS
    pieces = [piece.text for piece in model.stream(question)]
    assert "".join(pieces) == own_text
    assert len([piece for piece in pieces if piece]) > 1
