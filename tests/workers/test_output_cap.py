"""The rest of a budget replaces the client's output limit in every body."""

import json

import pytest

from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.values import replace
from inferry.workers.openai_http.request_bodies import remaining_tokens, resumed_body, streaming_body
from support.builders import a_job


def capped(body: bytes, cap: int) -> bytes:
    return b"".join(streaming_body(body, None, streams=False, output_cap=cap))


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"model":"m","prompt":"a"}', "max_tokens"),
        (b'{"model":"m","max_tokens":900,"prompt":"a"}', "max_tokens"),
        (b'{"model":"m","prompt":"a","max_tokens":null}\n', "max_tokens"),
        (b'{"model":"m","prompt":"a","max_completion_tokens":900}', "max_completion_tokens"),
        (b'{"model":"m","prompt":"a","max_completion_tokens":900,"max_tokens":80}', "max_completion_tokens"),
    ],
)
def test_the_cap_is_the_only_limit_that_goes_upstream(body: bytes, limit: str) -> None:
    sent = capped(body, 7)
    fields = json.loads(sent)
    assert fields[limit] == 7
    assert sent.count(b"max_tokens") + sent.count(b"max_completion_tokens") == 1
    assert (fields["prompt"], fields["stream"]) == ("a", True)


def test_an_escaped_limit_field_is_replaced() -> None:
    assert json.loads(capped(b'{"prompt":"a","max\\u005ftokens":900}', 7))["max_tokens"] == 7


@pytest.mark.parametrize(("least", "sent"), [(50, 7), (3, 3)])
def test_no_request_exceeds_the_remaining_tokens(least: int, sent: int) -> None:
    body = b'{"prompt":"a","max_tokens":100,"min_tokens":%d}' % least
    assert json.loads(capped(body, 7))["min_tokens"] == sent


def test_a_body_without_limits_is_not_written_anew() -> None:
    body = b'{"model": "m",  "prompt": "a"}'
    assert capped(body, 7).startswith(body[:-1])


def test_without_a_cap_the_clients_limit_stands() -> None:
    body = b'{"prompt":"a","max_tokens":900}'
    assert json.loads(b"".join(streaming_body(body, None, streams=False)))["max_tokens"] == 900


def lost_job(body: bytes, cap: int | None) -> tuple[InferenceJob, ResumePoint]:
    job = a_job(body=body, output=500)
    job = replace(job, payload=replace(job.payload, output_cap=cap), token_budget=cap or 500)
    return job, ResumePoint((1, 2), (3, 4, 5))


@pytest.mark.parametrize("body", [b'{"model":"m"}', b'{"model":"m","max_tokens":900}'])
def test_a_resumed_job_gets_the_remaining_cap(body: bytes) -> None:
    job, resume_point = lost_job(body, 7)
    left = remaining_tokens(job, resume_point, 1000)
    assert left == 4
    assert json.loads(resumed_body(job, resume_point, left, b""))["max_tokens"] == 4


def test_a_continuation_requests_no_more_than_the_remaining_tokens() -> None:
    job, resume_point = lost_job(b'{"model":"m","max_tokens":900,"min_tokens":100}', 7)
    assert json.loads(resumed_body(job, resume_point, 4, b""))["min_tokens"] == 4
