"""Request bodies as they are sent upstream: streamed, with the prompt unchanged and no field twice."""

import json

import msgspec
import pytest

from inferry.workers.openai_http.request_bodies import streaming_body


def streamed(body: bytes) -> bytes:
    return b"".join(streaming_body(body, None, streams=False))


def test_a_body_keeps_its_prompt_byte_for_byte() -> None:
    body = b'{"model":"m","stream":false,"messages":[ {"role":"user","content":"\\u00e9 \xc3\xa9"} ],"x":{"y": [1, 2]}}'
    sent = streamed(body)
    assert b'[ {"role":"user","content":"\\u00e9 \xc3\xa9"} ]' in sent
    assert msgspec.json.decode(sent) == {
        **msgspec.json.decode(body),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"a","\\u0073tream":false}',
        b'{"model":"m","prompt":"a","stream":false,"stream_options":{"x":1e999}} ',
        b'{"model":"m","prompt":"stream"}\n',
    ],
)
def test_every_spelling_of_the_stream_field_is_replaced(body: bytes) -> None:
    sent = json.loads(streamed(body))
    assert sent["stream"] is True
    assert sent["stream_options"]["include_usage"] is True


@pytest.mark.parametrize(
    ("body", "names", "streams"),
    [
        (b'{"model":"m","prompt":"a"}', (False, False), False),
        (b'{"model":"m","prompt":"a","stream":true}', (True, False), True),
        (b'{"model":"m","prompt":"a","stream":false}', (True, False), False),
        (b'{"model":"m","prompt":"a","stream":true,"stream_options":null}\n', (True, True), True),
        (b'{"model":"m","prompt":"a","stream_options":{"include_usage":false}}', (False, True), False),
    ],
)
def test_no_known_field_occurs_twice_in_a_body(body: bytes, names: tuple[bool, bool], streams: bool) -> None:
    sent = b"".join(streaming_body(body, names, streams))
    assert json.loads(sent) == {"model": "m", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    assert (sent.count(b'"stream"'), sent.count(b'"stream_options"')) == (1, 1)


def test_stream_options_of_the_client_are_kept() -> None:
    body = b'{"stream_options":{"continuous_usage_stats":true}}'
    sent = msgspec.json.decode(streamed(body))
    assert sent["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
