"""The official client works unchanged, sync and async, against the real engine."""

import asyncio
from pathlib import Path
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Classify this ticket: I was charged twice."}]


def client(gateway: Serving, **headers: str) -> OpenAI:
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, default_headers=headers)


def test_a_non_streaming_chat_call(real: Serving) -> None:
    with client(real) as api:
        answer = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_call_gives_the_same_answer(real: Serving) -> None:
    with client(real) as api:
        whole = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=24, temperature=0)
        chunks = list(
            api.chat.completions.create(
                model="tiny",
                messages=HELLO,
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_no_usage_unless_asked_for(real: Serving) -> None:
    with client(real) as api:
        chunks = list(api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions_take_text_and_token_ids(real: Serving) -> None:
    with client(real) as api:
        text = api.completions.create(model="tiny", prompt="def main", max_tokens=5, temperature=0)
        ids = api.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=5, temperature=0)
        pieces = list(
            api.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=5, temperature=0, stream=True)
        )
    assert text.object == "text_completion"
    assert text.usage is not None
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4
    assert "".join(piece.choices[0].text for piece in pieces) == ids.choices[0].text


def test_many_async_calls_at_once_each_get_their_own_answer(real: Serving) -> None:
    prompts = [f"ticket {number}: " + "please help " * (number % 7) for number in range(24)]

    async def ask(api: AsyncOpenAI, prompt: str) -> str:
        pieces = []
        stream = await api.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0, stream=True)
        async for piece in stream:
            pieces.append(piece.choices[0].text)
        return "".join(pieces)

    async def scenario() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0) as api:
            together = await asyncio.gather(*(ask(api, prompt) for prompt in prompts))
            alone = [await ask(api, prompt) for prompt in prompts]
        return together, alone

    together, alone = asyncio.run(scenario())
    assert together == alone


def test_a_seed_makes_sampling_repeatable(real: Serving) -> None:
    with client(real) as api:
        answers = {
            api.completions.create(model="tiny", prompt="once", max_tokens=20, temperature=1.0, seed=seed)
            .choices[0]
            .text
            for seed in (7, 7, 8)
        }
    assert len(answers) == 2


def test_a_stop_string_ends_the_answer_before_itself(real: Serving) -> None:
    with client(real) as api:
        free = api.completions.create(model="tiny", prompt="the parser", max_tokens=40, temperature=0)
        text = free.choices[0].text
        stop = text[10:14]
        cut = api.completions.create(model="tiny", prompt="the parser", max_tokens=40, temperature=0, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_models_are_listed(real: Serving) -> None:
    with client(real) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert api.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("nope")


def test_errors_become_the_clients_own_exceptions(real: Serving) -> None:
    with client(real) as api:
        with pytest.raises(openai.NotFoundError) as unknown:
            api.chat.completions.create(model="nope", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as too_long:
            api.completions.create(model="tiny", prompt=[1] * 20_000)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as several:
            api.chat.completions.create(model="tiny", messages=HELLO, n=2)
        assert several.value.code == "unsupported_feature"


def test_an_error_after_the_first_byte_is_raised_and_not_swallowed(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        gateway.worker.dies_after = 2
        with client(gateway) as api:
            stream = api.chat.completions.create(model="m", messages=HELLO, stream=True)
            heard: list[str] = []
            with pytest.raises(openai.APIError) as broken:
                heard.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(heard) == "one two"
    assert broken.value.code == "worker_lost"


def test_headers_report_worker_and_queue_time(real: Serving) -> None:
    headers = {
        "x-inferry-lane": "P0",
        "x-inferry-run-id": "run-7",
        "x-inferry-step-id": "draft",
        "x-inferry-tenant": "acme",
        "x-request-id": "mine-1",
    }
    with client(real, **headers) as api:
        raw = api.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=2)
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-inferry-lane"] == "P0"
    assert raw.headers["x-inferry-worker"] == "local"
    assert int(raw.headers["x-inferry-batch-size"]) >= 1
    assert float(raw.headers["x-inferry-queue-ms"]) >= 0


def test_service_tier_names_a_lane(real: Serving) -> None:
    with client(real) as api:
        tiers: list[tuple[Literal["priority", "default", "flex"], str]]
        tiers = [("priority", "P0"), ("default", "P1"), ("flex", "P2")]
        for tier, lane in tiers:
            raw = api.chat.completions.with_raw_response.create(
                model="tiny",
                messages=HELLO,
                max_tokens=1,
                service_tier=tier,
            )
            assert raw.headers["x-inferry-lane"] == lane


def test_metrics_count_what_was_served(real: Serving) -> None:
    with client(real) as api:
        api.completions.create(model="tiny", prompt="count me", max_tokens=4)
    status, _, text = get(real.url, "/metrics")
    assert status == 200
    for name in ("inferry_tokens_total", "inferry_time_to_first_token_seconds_bucket", "inferry_batch_size_bucket"):
        assert name in text
    assert get(real.url, "/health")[0] == 200
    assert get(real.url, "/ready")[2]["workers"] == {"local": "ready"}


def test_the_same_greedy_call_of_many_agents_is_computed_once(real: Serving) -> None:
    async def ask(api: AsyncOpenAI, number: int) -> tuple[str, bool]:
        raw = await api.completions.with_raw_response.create(
            model="tiny",
            prompt="once and for all",
            max_tokens=256,
            temperature=0,
            user=f"agent-{number}",
            extra_body={"ignore_eos": True},
        )
        return raw.parse().choices[0].text, "x-inferry-shared-with" in raw.headers

    async def scenario() -> list[tuple[str, bool]]:
        async with AsyncOpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0) as api:
            alone = await ask(api, 0)
            return [alone, *await asyncio.gather(*(ask(api, number) for number in range(8)))]

    answers = asyncio.run(scenario())
    assert len({text for text, _ in answers}) == 1
    assert [shared for _, shared in answers].count(True) >= 4, "all but those that came too late"
