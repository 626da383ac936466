"""Media in messages: found by their parts, and left out of sizes."""

import json
from typing import Any

import msgspec
import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.jobs import Estimate
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.domain.values import replace
from inferry.ingress.openai.decode import ChatEndpoint
from inferry.ingress.openai.media import NO_MEDIA, Media, media_of
from inferry.ingress.openai.request_schema import ChatCompletionRequest
from inferry.prediction.estimator import Estimator
from support.builders import a_job

DATA = "data:image/png;base64," + "A" * 1000
IMAGE = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}
TEXT = {"type": "text", "text": 'an "image_url" in a text'}


def read(*contents: Any) -> Media:
    messages = [{"role": "user", "content": content} for content in contents]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    wire = ChatEndpoint().decode(body).wire
    assert isinstance(wire, ChatCompletionRequest)
    return media_of(wire.messages)


def test_texts_have_no_media() -> None:
    assert read("plain", [TEXT], json.dumps([IMAGE])) is NO_MEDIA


def test_a_body_that_only_mentions_media_has_none() -> None:
    assert read([{"type": "text", "text": "a", "file": {"x": 1}}]) is NO_MEDIA
    assert read({"type": "image_url"}) is NO_MEDIA
    assert read([1, "image_url"]) is NO_MEDIA


@pytest.mark.parametrize(
    ("part", "feature"),
    [
        ({"type": "image_url", "image_url": {"url": DATA}}, "images"),
        ({"type": "image_url", "image_url": DATA}, "images"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "images"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio_input"),
        ({"type": "audio_url", "audio_url": {"url": "https://a/b.mp3"}}, "audio_input"),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, "video"),
        ({"type": "file", "file": {"file_data": "AAAA", "filename": "a.pdf"}}, "files"),
    ],
)
def test_every_kind_of_part_needs_its_feature(part: dict[str, Any], feature: str) -> None:
    kind = part["type"]
    found = read("plain", [TEXT, part])
    assert found.features == [(feature, f"messages[1].content[1].{kind}")]
    assert found.size == len(msgspec.json.encode(part[kind]))


def test_media_are_counted_over_all_messages() -> None:
    found = read([IMAGE, TEXT, IMAGE], "plain", [IMAGE])
    assert found.items == 3
    assert found.size == 3 * len(msgspec.json.encode(IMAGE["image_url"]))


def ended(media_bytes: int) -> Estimate:
    """The estimate for 1,000 bytes after a call with a body of 1,000 bytes and 10,000 prompt tokens."""
    estimator = Estimator()
    job = a_job()
    payload = replace(job.payload, body=b"x" * 1000, media_bytes=media_bytes)
    footprint = replace(job.footprint, prompt=Estimate(1, 250, 1064))
    attempt = Attempt(replace(job, payload=payload, footprint=footprint))
    attempt.ended(Done(job.job_id, FinishReason.STOP, Usage(10_000, 0, 5)), 1.0)
    estimator.ended(attempt, 1.0)
    return estimator.prompt(job.tenant, job.route.model, None, 1000)


def test_the_ratio_of_tokens_to_bytes_is_not_learned_from_media() -> None:
    assert ended(media_bytes=0).expected == 10_000
    assert ended(media_bytes=900).expected == 250
