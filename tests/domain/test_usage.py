"""Implausible usage is replaced."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.jobs import InferenceJob, Payload, ResumePoint
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.domain.usage import MEDIA_TOKENS, TEMPLATE_TOKENS, max_plausible_output, plausible_usage, with_usage
from inferry.domain.values import replace
from support.builders import a_job

COUNTS = st.integers(-(10**25), 10**25) | st.integers(-3, 5000)


def job(context: int | None = 4096, limit: int | None = 100, body: bytes = b'{"model":"m"}') -> InferenceJob:
    payload = Payload(api="chat", body=body, sampling=Sampling(), output_limit=limit, context_tokens=context)
    return replace(a_job("j", tokens=300), payload=payload)


@given(prompt=COUNTS, cached=COUNTS, output=COUNTS, counted=st.integers(0, 100), context=st.sampled_from([None, 4096]))
def test_validated_usage_is_always_plausible(
    prompt: int, cached: int, output: int, counted: int, context: int | None
) -> None:
    found = plausible_usage(job(context), Usage(prompt, cached, output), counted)
    assert 0 <= found.cached_tokens <= found.prompt_tokens <= 13 + TEMPLATE_TOKENS
    assert 0 <= found.output_tokens <= max_plausible_output(100)
    assert plausible_usage(job(context), found, counted) is found


def test_plausible_usage_is_unchanged() -> None:
    for usage in (Usage(4096, 4096, 100), Usage(1, 0, 0), Usage(10, 10, 150, 0.5), Usage()):
        assert plausible_usage(job(), usage, 7) is usage


def test_implausible_usage_is_replaced_by_estimates_and_counts() -> None:
    assert plausible_usage(job(), Usage(-1, 0, 5), 7) == Usage(300, 0, 5)
    assert plausible_usage(job(), Usage(10**20, 12, 5), 7) == Usage(300, 12, 5)
    assert plausible_usage(job(), Usage(20, 21, 5), 7) == Usage(20, 20, 5)
    assert plausible_usage(job(), Usage(20, -4, 5), 7) == Usage(20, 0, 5)
    assert plausible_usage(job(), Usage(20, 0, -5), 7) == Usage(20, 0, 7)
    assert plausible_usage(job(), Usage(20, 0, 10**20), 7) == Usage(20, 0, 7)
    for seconds in (-1.0, float("nan"), float("inf")):
        assert plausible_usage(job(), Usage(20, 0, 5, seconds), 7) == Usage(20, 0, 5)


def test_the_output_bound_is_multiplied_by_the_number_of_choices() -> None:
    usage = Usage(20, 0, 400)
    assert plausible_usage(job(limit=400), usage, 7) is usage
    assert plausible_usage(job(limit=100), usage, 7) == Usage(20, 0, 7)


def test_without_a_context_a_prompt_has_no_more_tokens_than_bytes() -> None:
    text = b'{"messages":[{"role":"user","content":"hello"}]}'
    most = len(text) + TEMPLATE_TOKENS
    assert plausible_usage(job(None, body=text), Usage(most, 0, 5), 7) == Usage(most, 0, 5)
    assert plausible_usage(job(None, body=text), Usage(most + 1, 0, 5), 7) == Usage(300, 0, 5)


def test_media_may_be_more_tokens_than_bytes() -> None:
    picture = b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]}'
    assert plausible_usage(job(None, body=picture), Usage(50_000, 0, 5), 7) == Usage(50_000, 0, 5)
    assert plausible_usage(job(None, body=picture), Usage(2 * MEDIA_TOKENS, 0, 5), 7) == Usage(300, 0, 5)


def test_resumed_output_counts_as_prompt() -> None:
    continued = replace(job(None), resume_point=ResumePoint((1,) * 9000, (2,) * 500))
    assert plausible_usage(continued, Usage(9500, 0, 5), 7) == Usage(9500, 0, 5)


def test_a_client_gets_the_usage_that_is_billed() -> None:
    raw = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":5},"x":null}\n\n'
    for said, kept in ((raw, {"id": "a", "choices": [], "x": None}), (b"", {"choices": []})):
        end = with_usage(Done("j", FinishReason.STOP, Usage(-1, 0, 5), said), Usage(300, 2, 5))
        assert end.usage == Usage(300, 2, 5)
        event = msgspec.json.decode(end.raw.removeprefix(b"data: ").removesuffix(b"\n\n"))
        assert event.pop("usage") == {
            "prompt_tokens": 300,
            "completion_tokens": 5,
            "total_tokens": 305,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert event == kept
