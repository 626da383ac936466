"""LangChain's `ChatOpenAI` works unchanged: whole, streamed, async, several at once, and its errors."""

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from support.serving import Serving

ASKED = [SystemMessage("You sort tickets."), HumanMessage("I was charged twice.")]


@pytest.fixture(autouse=True)
def tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def a_model(gateway: Serving, **more: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(base_url=gateway.url + "/v1", api_key=SecretStr("unused"), **settings)


def test_a_non_streaming_call(real: Serving) -> None:
    answer = a_model(real).invoke(ASKED)
    assert answer.text
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12


def test_a_streamed_call_gives_the_same_answer(real: Serving) -> None:
    model = a_model(real, stream_usage=True)
    whole = AIMessageChunk(content="")
    pieces = 0
    for piece in model.stream(ASKED):
        assert isinstance(piece, AIMessageChunk)
        whole += piece
        pieces += 1
    assert pieces > 2
    said = model.invoke(ASKED)
    assert whole.text == said.text
    assert whole.usage_metadata is not None
    assert said.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == said.usage_metadata["total_tokens"]


def test_async_calls_and_streams(real: Serving) -> None:
    async def scenario() -> tuple[str, str]:
        model = a_model(real)
        answer = await model.ainvoke(ASKED)
        pieces = [piece.text async for piece in model.astream(ASKED)]
        return answer.text, "".join(pieces)

    whole, streamed = asyncio.run(scenario())
    assert whole == streamed


def test_a_batch_of_calls_comes_back_in_order(real: Serving) -> None:
    prompts: list[Any] = [f"ticket {number}" for number in range(6)]
    model = a_model(real)
    together = [answer.text for answer in model.batch(prompts)]
    assert together == [model.invoke(prompt).text for prompt in prompts]


def test_the_granted_service_tier_is_reported(real: Serving) -> None:
    answer = a_model(real, service_tier="flex").invoke(ASKED)
    assert answer.response_metadata["service_tier"] == "flex"


def test_errors_are_the_clients_own(real: Serving) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        a_model(real, model="nope").invoke(ASKED)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as several:
        a_model(real, n=2).invoke(ASKED)
    assert several.value.code == "unsupported_feature"
