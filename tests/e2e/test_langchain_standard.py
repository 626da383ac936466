"""LangChain's standard tests of chat models, for `ChatOpenAI` and `ChatAnthropic` before a gateway.

The worker is a scripted model. Tests of media are skipped by the suite: they download files.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
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
        self.url, self.key = gateway.url, key

    @property
    def model_override_value(self) -> str:
        return "m"


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
