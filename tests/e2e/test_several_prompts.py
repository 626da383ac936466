"""Several prompts in one call, echo, and media in messages, with the official client."""

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import OpenAI

from inferry.domain.callers import ANONYMOUS
from inferry.ingress.internal_call import Answer, call
from inferry.ingress.job_ids import JOB_ID
from support.http_gateway import HttpGateway
from support.serving import Serving, post
from support.tenant_gateway import TenantGateway
from support.upstream import DONE, Upstream, begin, event, usage
from support.waiting import until

PROMPTS = ["The first", "a second one", "and the third"]


def client(gateway: Serving, key: str = "unused", **headers: str) -> OpenAI:
    return OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0, default_headers=headers)


# -- the embedded engine ---------------------------------------------------------------------------------------------


def test_every_prompt_gets_the_answer_that_it_gets_alone(real: Serving) -> None:
    with client(real) as api:
        alone = [api.completions.create(model="tiny", prompt=p, max_tokens=8, temperature=0) for p in PROMPTS]
        together = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=8, temperature=0)
        ids = api.completions.create(model="tiny", prompt=[[5, 6], [7, 8, 9]], max_tokens=3, temperature=0)
    assert [one.text for one in together.choices] == [one.choices[0].text for one in alone]
    assert [one.index for one in together.choices] == [0, 1, 2]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert together.usage.completion_tokens == 24
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 5


def test_a_stream_of_several_prompts_gives_the_same_choices(real: Serving) -> None:
    with client(real) as api:
        whole = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=8, temperature=0)
        chunks = list(
            api.completions.create(
                model="tiny",
                prompt=PROMPTS,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"] * 3


def test_long_prompts_among_short_ones(real: Serving) -> None:
    prompts = ["short", "long words " * 100, "short again"]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 2, "temperature": 0}
    status, _, whole = post(real.url, "/v1/completions", body)
    assert status == 200, whole
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["The parser", [5, 6, 7]])
def test_the_embedded_engine_repeats_the_prompt(real: Serving, prompt: Any) -> None:
    with client(real) as api:
        plain = api.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        echoed = api.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, echo=True)
        pieces = list(
            api.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, echo=True, stream=True)
        )
    assert echoed.choices[0].text.endswith(plain.choices[0].text)
    assert len(echoed.choices[0].text) > len(plain.choices[0].text)
    if isinstance(prompt, str):
        assert echoed.choices[0].text == prompt + plain.choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == echoed.choices[0].text
    assert echoed.usage == plain.usage


def test_every_prompt_of_a_call_is_repeated(real: Serving) -> None:
    with client(real) as api:
        plain = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=4, temperature=0)
        echoed = api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=4, temperature=0, echo=True)
    assert [one.text for one in echoed.choices] == [
        prompt + one.text for prompt, one in zip(PROMPTS, plain.choices, strict=True)
    ]


@pytest.mark.parametrize(
    ("fields", "param"), [({"suffix": "end"}, "suffix"), ({"echo": True, "logprobs": 1}, "logprobs")]
)
def test_the_embedded_engine_refuses_what_it_cannot_do(real: Serving, fields: Any, param: str) -> None:
    with client(real) as api, pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt=PROMPTS, max_tokens=4, **fields)
    assert (caught.value.code, caught.value.param) == ("unsupported_feature", param)


def test_the_embedded_engine_refuses_images_by_name(real: Serving) -> None:
    parts: Any = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "https://a/b"}}]
    with client(real) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=4)
    assert (caught.value.code, caught.value.param) == ("unsupported_feature", "messages[0].content[1].image_url")


# -- HTTP workers ----------------------------------------------------------------------------------------------------


def text_event(index: int, text: str, finish: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return event({"id": "up", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


async def repeats(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers every choice with its number and the prompt. `fails` is refused once `holds` has its first token."""
    prompt = str(body["prompt"])
    if prompt == "fails":
        await upstream.release.wait()
        return web.json_response({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, status=400)
    response = await begin(request)
    for index in range(body.get("n") or 1):
        await response.write(text_event(index, f"{index}:"))
    if prompt == "holds":
        upstream.release.set()
        await asyncio.Event().wait()
    for index in range(body.get("n") or 1):
        await response.write(text_event(index, prompt, "stop"))
    await response.write(usage(7, 2 * (body.get("n") or 1)))
    await response.write(DONE)
    await response.write_eof()
    return response


@pytest.fixture
def served(tmp_path: Path) -> Any:
    tenants = {"few": {"max_concurrent": 4}, "tokens": {"tokens_per_minute": 150}}
    with HttpGateway(tmp_path, repeats, {"tenants": tenants}) as gateway:
        yield gateway


def test_each_prompt_is_a_call_of_its_own_upstream(served: HttpGateway) -> None:
    key = served.key("acme")
    with client(served, key) as api:
        answer = api.completions.create(model="m", prompt=PROMPTS, n=2, max_tokens=9)
    assert [one.text for one in answer.choices] == [f"{j}:{prompt}" for prompt in PROMPTS for j in (0, 1)]
    assert [one.index for one in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 12)
    assert sorted(body["prompt"] for body in served.upstream.bodies) == sorted(PROMPTS)
    assert all(body["n"] == 2 and body["max_tokens"] == 9 for body in served.upstream.bodies)
    ids = [headers["x-request-id"] for headers in served.upstream.headers]
    assert len(set(ids)) == 3
    assert answer.id == f"cmpl-{min(ids)}"


def test_the_prompts_of_a_call_share_its_request_id_and_run(served: HttpGateway) -> None:
    key = served.key("acme")
    headers = {"authorization": f"Bearer {key}", "x-request-id": "r-1", "x-inferry-run-id": "run-1"}
    answer = served.call("POST", "/v1/completions", {"model": "m", "prompt": ["a", "b"]}, headers)
    assert answer.headers["x-request-id"] == "r-1"
    run = served.call("GET", "/v1/runs/run-1", headers={"authorization": f"Bearer {key}"}).json
    assert run["jobs"]["ended"] == 2


def test_a_repeated_call_shares_each_execution(served: HttpGateway) -> None:
    key = served.key("acme")
    headers = {"authorization": f"Bearer {key}", "idempotency-key": "k", "x-inferry-replay": "allow"}
    body = {"model": "m", "prompt": ["a", "b"]}
    first = served.call("POST", "/v1/completions", body, headers)
    again = served.call("POST", "/v1/completions", body, headers)
    assert [one["text"] for one in again.json["choices"]] == ["0:a", "0:b"]
    assert again.json["choices"] == first.json["choices"]
    assert len(served.upstream.bodies) == 2
    assert again.headers["x-inferry-replayed"] == "true"
    swapped = served.call("POST", "/v1/completions", {"model": "m", "prompt": ["b", "a"]}, headers)
    assert [one["text"] for one in swapped.json["choices"]] == ["0:b", "0:a"]


def test_equal_prompts_of_a_call_share_one_execution(served: HttpGateway) -> None:
    headers = {"authorization": f"Bearer {served.key('acme')}"}
    body = {"model": "m", "prompt": ["same", "same", "other"], "temperature": 0}
    answer = served.call("POST", "/v1/completions", body, headers)
    assert [one["text"] for one in answer.json["choices"]] == ["0:same", "0:same", "0:other"]
    assert sorted(body["prompt"] for body in served.upstream.bodies) == ["other", "same"]


def test_the_jobs_of_a_stored_call_have_ids_of_their_own(served: HttpGateway) -> None:
    async def stored() -> Answer:
        body = json.dumps({"model": "m", "prompt": ["a", "b"]}).encode()
        return await call(served.service.app.serve, b"/v1/completions", body, {JOB_ID: b"batch-7"}, ANONYMOUS)

    answer = served.run(stored())
    assert [one["text"] for one in json.loads(answer.body)["choices"]] == ["0:a", "0:b"]
    assert sorted(one["x-request-id"] for one in served.upstream.headers) == ["batch-7", "batch-7-1"]


def test_a_call_with_a_prompt_that_is_refused_runs_nothing_and_keeps_nothing(served: HttpGateway) -> None:
    key = served.key("tokens")
    headers = {"authorization": f"Bearer {key}"}
    refused = served.call("POST", "/v1/completions", {"model": "m", "prompt": PROMPTS, "max_tokens": 40}, headers)
    assert (refused.status, refused.code) == (429, "rate_limited")
    assert not served.upstream.bodies
    assert refused.headers["x-ratelimit-remaining-tokens"] == "150"
    assert served.service.gateway.in_flight == 0
    admitted = served.call("POST", "/v1/completions", {"model": "m", "prompt": PROMPTS, "max_tokens": 4}, headers)
    assert admitted.status == 200


def test_a_call_that_no_limit_will_ever_admit_is_not_told_to_retry(served: HttpGateway) -> None:
    headers = {"authorization": f"Bearer {served.key('few')}"}
    refused = served.call("POST", "/v1/completions", {"model": "m", "prompt": ["a"] * 5}, headers)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")
    assert "max_concurrent" in refused.json["error"]["message"]
    assert served.call("POST", "/v1/completions", {"model": "m", "prompt": ["a"] * 4}, headers).status == 200


def test_a_full_queue_refuses_the_whole_call(tmp_path: Path) -> None:
    lanes = {"P1": {"queue_limit": 10, "high_watermark": 1.0}}
    with HttpGateway(tmp_path, repeats, {"lanes": lanes, "server": {"max_prompts": 20}}) as gateway:
        headers = {"authorization": f"Bearer {gateway.key('acme')}"}
        never = gateway.call("POST", "/v1/completions", {"model": "m", "prompt": ["a"] * 11}, headers)
        assert (never.status, never.code) == (400, "invalid_request")
        too_many = gateway.call("POST", "/v1/completions", {"model": "m", "prompt": ["a"] * 21}, headers)
        assert "20 prompts" in too_many.json["error"]["message"]
        assert not gateway.upstream.bodies
        assert gateway.call("POST", "/v1/completions", {"model": "m", "prompt": ["a"] * 10}, headers).status == 200


def test_a_call_is_counted_once_against_the_queued_bytes(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, repeats, {"server": {"max_queued_bytes": 3000}}) as gateway:
        headers = {"authorization": f"Bearer {gateway.key('acme')}"}
        body = {"model": "m", "prompt": ["a" * 600] * 4}
        assert gateway.call("POST", "/v1/completions", body, headers).status == 200
        body = {"model": "m", "prompt": ["a" * 600] * 6}
        refused = gateway.call("POST", "/v1/completions", body, headers)
        assert (refused.status, refused.code) == (429, "queue_full")


@pytest.mark.parametrize("streams", [True, False])
def test_a_prompt_that_fails_ends_the_call_and_cancels_the_others(served: HttpGateway, streams: bool) -> None:
    headers = {"authorization": f"Bearer {served.key('acme')}"}
    body = {"model": "m", "prompt": ["holds", "fails"], "stream": streams}
    answer = served.call("POST", "/v1/completions", body, headers)
    assert answer.status == (200 if streams else 400)
    assert b'"error"' in answer.body
    assert b"[DONE]" not in answer.body
    until(lambda: served.upstream.disconnects == 1)
    until(lambda: served.service.gateway.in_flight == 0)


def test_a_disconnect_cancels_every_prompt(served: HttpGateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = json.dumps({"model": "m", "prompt": ["holds", "holds", "holds"]})
    connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {served.key('acme')}"})
    until(lambda: len(served.upstream.running) == 3)
    connection.close()
    until(lambda: served.upstream.disconnects == 3)
    until(lambda: served.service.gateway.in_flight == 0)


# -- media -----------------------------------------------------------------------------------------------------------


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
LOOK: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]


def test_images_are_passed_on_and_not_counted_as_text(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, kind="vllm") as gateway:
        key = gateway.key("acme")
        with client(gateway, key) as api:
            answer = api.chat.completions.create(model="m", messages=LOOK, max_tokens=3)
        assert answer.choices[0].message.content == "Hello world"
        assert gateway.upstream.bodies[-1]["messages"] == LOOK
        models = gateway.service.gateway.models
        assert models.estimator.prompt("acme", "m", None, 1000).expected == 250, "nothing was learned from the image"


@pytest.mark.parametrize(
    ("kind", "part", "is_taken"),
    [
        ("openai", {"type": "file", "file": {"file_id": "f-1"}}, True),
        ("vllm", {"type": "file", "file": {"file_id": "f-1"}}, False),
        ("vllm", {"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, True),
        ("tgi", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, False),
    ],
)
def test_media_are_refused_by_name_where_the_server_takes_none(
    tmp_path: Path, kind: str, part: dict[str, Any], is_taken: bool
) -> None:
    with HttpGateway(tmp_path, kind=kind) as gateway:
        messages = [{"role": "user", "content": [part]}]
        headers = {"authorization": f"Bearer {gateway.key('acme')}"}
        body = {"model": "m", "messages": messages, "max_tokens": 3}
        answer = gateway.call("POST", "/v1/chat/completions", body, headers)
        if is_taken:
            assert answer.status == 200
            assert gateway.upstream.bodies[-1]["messages"] == messages
        else:
            assert (answer.status, answer.code) == (400, "unsupported_feature")
            assert answer.json["error"]["param"] == f"messages[0].content[0].{part['type']}"


def test_a_vllm_server_is_asked_whether_it_takes_images(tmp_path: Path) -> None:
    gateway = HttpGateway(tmp_path)
    gateway.upstream.takes_images = False
    with gateway:
        headers = {"authorization": f"Bearer {gateway.key('acme')}"}
        answer = gateway.call("POST", "/v1/chat/completions", {"model": "m", "messages": LOOK}, headers)
        assert (answer.status, answer.code) == (400, "unsupported_feature")


def test_the_configuration_says_which_media_a_worker_takes(tmp_path: Path) -> None:
    def config(gateway: HttpGateway, **more: Any) -> dict[str, Any]:
        return {"name": "up", "kind": "vllm", "url": gateway.upstream.url, "models": ["m"], **more}

    with HttpGateway(tmp_path) as behind:
        for media, status in ((["images"], 200), ([], 400)):
            workers = [config(behind, media=media)]
            directory = tmp_path / str(status)
            directory.mkdir()
            with TenantGateway(directory, None, {"workers": workers}) as gateway:
                headers = {"authorization": f"Bearer {gateway.key('acme')}"}
                body = {"model": "m", "messages": LOOK, "max_tokens": 3}
                assert gateway.call("POST", "/v1/chat/completions", body, headers).status == status
