"""Log probabilities of the embedded engine through the official client: values, failover, a cascade by them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from openai import OpenAI

from inferry.engine.tokenizer import HfTokenizer
from support.serving import Serving

HELLO: Any = [{"role": "user", "content": "How is the weather?"}]
NEAR = 1e-4


@pytest.fixture
def api(real: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(api: OpenAI, stream: bool, **fields: Any) -> tuple[str, list[Any], Any]:
    """Text, entries and the finish reason."""
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "logprobs": True, **fields}
    if not stream:
        (choice,) = api.chat.completions.create(**given).choices
        assert choice.logprobs is not None
        return choice.message.content or "", choice.logprobs.content or [], choice.finish_reason
    text, entries, finish = "", list[Any](), None
    for event in api.chat.completions.create(**given, stream=True):
        (choice,) = event.choices
        text += choice.delta.content or ""
        entries += [] if choice.logprobs is None else choice.logprobs.content or []
        finish = choice.finish_reason
    return text, entries, finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 20])
def test_a_chat_has_the_values_of_the_model(api: OpenAI, tiny_model: Path, stream: bool, top: int) -> None:
    text, entries, finish = chat(api, stream, top_logprobs=top, temperature=0, extra_body={"ignore_eos": True})
    assert finish == "length"
    assert "".join(entry.token for entry in entries) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = HfTokenizer(tiny_model).encode_chat(HELLO)
    for entry in entries:
        with torch.inference_mode():
            row = model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
        ids.append(int(row.argmax()))
        assert entry.logprob == pytest.approx(float(row.max()), abs=NEAR)
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row.topk(top).values.tolist(), abs=NEAR)
        assert entry.bytes == list(entry.token.encode())
    assert len(entries) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_tokens_have_their_own_and_the_likelier_ones_theirs(api: OpenAI, stream: bool) -> None:
    text, entries, _ = chat(api, stream, top_logprobs=2, temperature=2, seed=4, extra_body={"ignore_eos": True})
    assert len(entries) == 12
    assert "".join(entry.token for entry in entries) == text
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in entries)
    assert any(entry.logprob < entry.top_logprobs[1].logprob for entry in entries)


def test_a_stream_and_a_whole_answer_have_the_same_entries(api: OpenAI) -> None:
    whole, streamed = (chat(api, stream, temperature=0, top_logprobs=3) for stream in (False, True))
    assert [entry.token for entry in whole[1]] == [entry.token for entry in streamed[1]]
    assert [one.logprob for one in whole[1]] == pytest.approx([one.logprob for one in streamed[1]], abs=NEAR)


@pytest.mark.parametrize("top", [None, 3])
def test_a_response_has_the_entries_of_a_chat(api: OpenAI, top: int | None) -> None:
    given: Any = {"model": "tiny", "input": HELLO, "max_output_tokens": 12, "temperature": 0, "top_logprobs": top}
    given["include"] = ["message.output_text.logprobs"]
    text, entries, _ = chat(api, False, top_logprobs=top, temperature=0)
    (item,) = api.responses.create(**given).output
    (part,) = item.content
    assert part.text == text
    expected = [one.model_dump() for one in entries]
    assert "".join(one["token"] for one in expected).startswith(text)
    spelled = [one.model_dump() for one in part.logprobs]
    assert [one["token"] for one in spelled] == [one["token"] for one in expected[: len(spelled)]]
    assert "".join(one["token"] for one in spelled) == text
    for found, wanted in zip(spelled, expected, strict=False):
        assert found["logprob"] == pytest.approx(wanted["logprob"], abs=NEAR)
        assert found["bytes"] == wanted["bytes"]
        assert [one["token"] for one in found["top_logprobs"]] == [one["token"] for one in wanted["top_logprobs"]]
    events: list[Any] = list(api.responses.create(**given, stream=True))
    deltas = [one for one in events if one.type == "response.output_text.delta"]
    streamed = [one for delta in deltas for one in delta.logprobs]
    assert [one.token for one in streamed] == [one["token"] for one in spelled]
    assert all(len(one.top_logprobs) == (top or 0) for one in streamed)
    (last,) = events[-1].response.output
    assert [one.token for one in last.content[0].logprobs] == [one["token"] for one in spelled]


@pytest.mark.parametrize("top", [0, 5])
def test_a_completion_has_lists_with_offsets(api: OpenAI, top: int) -> None:
    given: Any = {"model": "tiny", "prompt": "def main", "max_tokens": 8, "temperature": 0, "logprobs": top}
    (choice,) = api.completions.create(**given).choices
    found: Any = choice.logprobs
    assert "".join(found.tokens).startswith(choice.text)
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(8)]
    for token, value, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert likely[token] == value
        assert len(likely) <= top + 1
    streamed: Any = [event.choices[0].logprobs for event in api.completions.create(**given, stream=True)]
    assert [token for one in streamed if one for token in one.tokens] == found.tokens
    assert [offset for one in streamed if one for offset in one.text_offset] == found.text_offset


def test_every_prompt_of_a_call_has_its_own(api: OpenAI) -> None:
    answer = api.completions.create(model="tiny", prompt=["a", "b c"], max_tokens=3, temperature=0, logprobs=1)
    assert [len(choice.logprobs.tokens or []) for choice in answer.choices if choice.logprobs is not None] == [3, 3]


def test_entries_end_with_the_token_that_completes_a_stop_string(api: OpenAI) -> None:
    text, entries, _ = chat(api, False, temperature=0)
    stop = text[len(entries[0].token) + 1 :][:4]
    for stream in (False, True):
        cut, kept, finish = chat(api, stream, temperature=0, stop=[stop])
        assert (cut, finish) == (text[: text.index(stop)], "stop")
        written = "".join(entry.token for entry in kept)
        assert stop in written
        assert stop not in written.removesuffix(kept[-1].token)


def test_an_answer_under_a_grammar_has_them(api: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"enum": ["red", "green"]}}}
    text, entries, _ = chat(api, False, response_format=wanted, max_tokens=50, top_logprobs=2)
    assert "".join(entry.token for entry in entries).startswith(text)
    assert min(entry.logprob for entry in entries) < -1, "raw: the model did not expect JSON"


def test_tool_calls_have_them(api: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "close", "parameters": {"type": "object"}}}]
    given: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "logprobs": True, "tools": tools}
    answer = api.chat.completions.create(**given, tool_choice="required")
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content or []) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "invalid_request", "top_logprobs"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"prompt": "a", "logprobs": 6}, "invalid_request", "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "unsupported_feature", "logprobs"),
        ({"prompt": "a", "extra_body": {"prompt_logprobs": 1}}, "unsupported_feature", "prompt_logprobs"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(api: OpenAI, fields: dict[str, Any], code: str, param: str) -> None:
    call: Any = api.completions if "prompt" in fields else api.chat.completions
    given = fields if "prompt" in fields else {"messages": HELLO, **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        call.create(model="tiny", max_tokens=2, **given)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_calls_that_do_not_ask_have_none(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, logprobs=False)
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize(("threshold", "path"), [(-1000.0, "small"), (-1e-9, "small>large")])
def test_a_cascade_decides_by_them(tmp_path: Path, tiny_model: Path, threshold: float, path: str) -> None:
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["small"]}
    large = {**worker, "name": "other", "models": ["large"]}
    cascade = {"small": "small", "large": "large", "accept": {"min_mean_logprob": threshold}, "shadow": 0}
    ensemble = {"models": ["small", "small"], "choose": "logprob"}
    config = {"workers": [worker, large], "cascades": {"pair": cascade}, "ensembles": {"best": ensemble}}
    with Serving(tmp_path, config=config) as gateway, OpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
        for model in ("small", "large"):  # one of them is ready: a call waits for the other
            client.completions.create(model=model, prompt="a", max_tokens=1)
        for prompt in ({"messages": HELLO}, {"prompt": "def main"}):
            call: Any = client.chat.completions if "messages" in prompt else client.completions
            answer = call.with_raw_response.create(model="pair", max_tokens=4, **prompt)
            assert answer.headers["x-inferry-path"] == path
            assert answer.parse().choices[0].logprobs is None, "the client asked for none"
        best = client.chat.completions.with_raw_response.create(model="best", max_tokens=4, messages=HELLO)
        assert best.parse().choices[0].message.content is not None


def test_a_stream_outlives_the_engine_that_began_it(tmp_path: Path, tiny_model: Path) -> None:
    worker = {"kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    config = {"workers": [{**worker, "name": name} for name in ("one", "two")]}
    given: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "temperature": 0}
    given |= {"logprobs": True, "stream": True, "extra_body": {"ignore_eos": True}}
    with Serving(tmp_path, config=config) as gateway, OpenAI(base_url=gateway.url + "/v1", api_key="none") as client:
        texts = []
        for breaks in (False, True):
            text, tokens, finish = "", 0, None
            answer = client.chat.completions.with_raw_response.create(**given)
            for event in answer.parse():
                (choice,) = event.choices
                text += choice.delta.content or ""
                tokens += 0 if choice.logprobs is None else len(choice.logprobs.content or [])
                finish = finish or choice.finish_reason
                if breaks and tokens > 5:
                    breaks = False
                    engine: Any = gateway.service.pool.worker(answer.headers["x-inferry-worker"])
                    os.kill(engine.pid, signal.SIGKILL)
            assert (tokens, finish) == (400, "length")
            texts.append(text)
        assert texts[0] == texts[1]
