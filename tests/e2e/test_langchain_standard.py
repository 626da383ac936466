"""LangChain's standard tests of chat models, for `ChatOpenAI` and `ChatAnthropic` before a gateway.

The worker is a scripted model. The images and sound that the suite downloads are a few bytes here. The suite skips
its test of speed.
"""

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import httpx
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from support.http_gateway import HttpGateway
from support.scripted_model import ScriptedModelGateway

pytestmark = [
    # Of the clients: a parsed answer that pydantic did not expect, and schemas of pydantic 1.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema"),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with ScriptedModelGateway(tmp_path_factory.mktemp("langchain")) as serving:
        yield serving


@pytest.fixture(scope="module")
def key(gateway: HttpGateway) -> str:
    return gateway.key("acme")


@pytest.fixture
def benchmark() -> None:
    """Of pytest-benchmark, which is off; the suite's only test with it is skipped."""


@pytest.fixture
def vcr() -> None:
    """Of pytest-recording, which is off; as above."""


class Suite(ChatModelIntegrationTests):
    __test__ = False

    @pytest.fixture(autouse=True)
    def _gateway(self, gateway: HttpGateway, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LANGSMITH_TRACING", "false")
        monkeypatch.setenv("LANGCHAIN_TESTS_USER_AGENT", "none")
        monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, content=b"a file"))
        self.url, self.key = gateway.url, key

    @property
    def model_override_value(self) -> str:
        return "m"

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.ask("A long prompt.", stream=stream)
        return self.ask("A long prompt.", stream=stream)

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self.ask("Think first.", stream=stream)

    def ask(self, text: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            answer = model.invoke(text)
            assert isinstance(answer, AIMessage)
            return answer
        first, *rest = model.stream(text)
        return reduce(add, rest, first)


class TestChatOpenAI(Suite):
    __test__ = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": f"{self.url}/v1", "api_key": self.key, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_urls(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_audio_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input", "reasoning_output"], "stream": ["cache_read_input", "reasoning_output"]}


class TestChatAnthropic(Suite):
    __test__ = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": self.url, "api_key": self.key}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}
