"""Other SDKs through the adapters: their calls belong to the run."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled
from langchain_core.tools import tool

from inferry.client import AsyncClient, Client, Run, agents_provider, anthropic, chat_model, openai
from support.children import environment
from support.http_gateway import HttpGateway
from support.scripted_model import ScriptedModelGateway

HELLO: Any = [{"role": "user", "content": "Hello"}]
ADAPTERS: dict[str, Callable[[Run], object]] = {
    "openai": openai,
    "anthropic": anthropic,
    "langchain-openai": lambda run: chat_model(run, "m"),
    "langchain-anthropic": lambda run: chat_model(run, "m", api="anthropic"),
    "openai-agents": agents_provider,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with ScriptedModelGateway(tmp_path_factory.mktemp("adapters")) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(gateway: HttpGateway) -> Iterator[Client]:
    with Client(gateway.url, api_key=gateway.key("acme")) as client:
        yield client


@pytest.fixture(autouse=True)
def without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    set_tracing_disabled(True)


def jobs_of(run: Run) -> tuple[int, set[str]]:
    """The number of calls that the gateway counts for the run, and their lanes, once they are in the ledger."""
    end = time.monotonic() + 120
    while True:
        status = run.status()
        ended, steps = status["jobs"]["ended"], status["latest_steps"]
        if len(steps) == ended:
            return ended, {step["lane"] for step in steps}
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_sdks_of_openai_and_anthropic(client: Client) -> None:
    with client.run(lane="P0") as run:
        with openai(run, max_retries=0) as api:
            said = api.chat.completions.create(model="m", messages=HELLO)
            assert said.choices[0].message.content
        with anthropic(run) as messages:
            message = messages.messages.create(model="m", messages=HELLO, max_tokens=99)
            assert message.content
    assert jobs_of(run) == (2, {"P0"})


def test_the_async_sdks(gateway: HttpGateway, client: Client) -> None:
    async def scenario() -> str:
        async with AsyncClient(gateway.url, api_key=client.api_key) as asynchronous, asynchronous.run() as run:
            async with openai(run) as api:
                stream = await api.chat.completions.create(model="m", messages=HELLO, stream=True)
                assert [piece async for piece in stream]
            async with anthropic(run) as messages:
                await messages.messages.create(model="m", messages=HELLO, max_tokens=99)
            return run.id

    assert jobs_of(client.run(asyncio.run(scenario())))[0] == 2


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_langchain(client: Client, api: Any) -> None:
    @tool
    def weather(city: str) -> str:
        """Looks outside."""
        return f"sun in {city}"

    with client.run() as run:
        model = chat_model(run, "m", api=api)
        asked = "What is the weather in Bern?"
        first = model.bind_tools([weather]).invoke(asked)
        assert first.tool_calls[0]["args"] == {"city": "Bern"}
        with run.tool("weather"):
            result = weather.invoke(first.tool_calls[0])
        assert "sun in Bern" in model.bind_tools([weather]).invoke([("user", asked), first, result]).text
    assert jobs_of(run)[0] == 2


@pytest.mark.parametrize("use_responses", [False, True], ids=["chat", "responses"])
def test_the_agents_sdk(client: Client, use_responses: bool) -> None:
    @function_tool
    def weather(city: str) -> str:
        """Looks outside."""
        return f"sun in {city}"

    async def scenario(run: Run) -> tuple[str, str]:
        agent = Agent(name="guide", instructions="Help.", model="m", tools=[weather])
        provider = agents_provider(run, use_responses=use_responses)
        config = RunConfig(model_provider=provider)
        whole = await Runner.run(agent, "What is the weather in Bern?", run_config=config)
        streamed = Runner.run_streamed(agent, "What is the weather in Basel?", run_config=config)
        assert [event async for event in streamed.stream_events()]
        assert isinstance(provider, OpenAIProvider)
        await provider._get_client().close()
        return str(whole.final_output), str(streamed.final_output)

    with client.run() as run:
        assert asyncio.run(scenario(run)) == ("The tool says: sun in Bern", "The tool says: sun in Basel")
    assert jobs_of(run)[0] == 4


@pytest.mark.parametrize("package", ADAPTERS)
def test_a_missing_package_is_named(package: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"openai-agents": "agents"}.get(package, package.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {package}$"):
        ADAPTERS[package](client.run())


def test_the_client_imports_no_sdk() -> None:
    code = "import sys, inferry.client; print([name for name in sys.argv[1:] if name in sys.modules])"
    sdks = ["openai", "anthropic", "langchain_core", "langchain_openai", "agents", "httpx", "aiohttp", "torch"]
    done = subprocess.run(
        [sys.executable, "-c", code, *sdks], env=environment(), capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "[]\n"
