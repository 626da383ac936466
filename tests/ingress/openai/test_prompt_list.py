"""Several prompts of one call, each as a request of its own."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import BodyTooLarge, InvalidRequest
from inferry.ingress.openai.decode import decode_completion
from inferry.ingress.openai.prompt_list import PromptList, read_prompt_list

TEXTS = st.text(min_size=1)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


def read(prompt: Any, *, max_prompts: int = 100, max_bytes: int = 100_000, **fields: Any) -> PromptList | None:
    body = msgspec.json.encode({"model": "m", "prompt": prompt, **fields})
    return read_prompt_list(decode_completion(body), body, max_prompts, max_bytes)


@pytest.mark.parametrize("prompt", ["a", '["a","b"]', [1, 2], ["a"], [[1, 2]], [], ""])
def test_one_prompt_is_no_list_of_prompts(prompt: Any) -> None:
    assert read(prompt) is None


@given(st.lists(st.one_of(TEXTS, IDS), min_size=2, max_size=10), st.sampled_from([0, 1, 4]))
def test_every_prompt_gets_a_body_with_the_other_fields(prompts: list[Any], indent: int) -> None:
    body = msgspec.json.format(
        msgspec.json.encode({"model": "m", "n": 2, "prompt": prompts, "user": "ü"}), indent=indent
    )
    found = read_prompt_list(decode_completion(body), body, 10, 100_000)
    assert found is not None
    assert len(found) == len(prompts)
    requests = list(found.requests())
    assert [msgspec.json.decode(one.body) for one in requests] == [
        {"model": "m", "n": 2, "user": "ü", "prompt": prompt} for prompt in prompts
    ]
    assert all(msgspec.json.decode(one.wire.prompt) == prompt for one, prompt in zip(requests, prompts, strict=True))  # type: ignore[union-attr]
    assert found.total_bytes <= sum(len(one.body) for one in requests)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(["a", 1], "prompt[1]"), (["a", None], "prompt[1]"), ([["a"], "b"], "prompt[0]"), (["a", {}], "prompt[1]"),
     ([[[1]], "a"], "prompt[0]")],
)  # fmt: skip
def test_an_element_that_is_no_prompt_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(prompt)
    assert caught.value.param == param


def test_the_number_of_prompts_is_bounded() -> None:
    assert read(["a"] * 3, max_prompts=3) is not None
    with pytest.raises(InvalidRequest, match="more than 3 prompts"):
        read(["a"] * 4, max_prompts=3)


def test_the_copies_of_other_fields_are_bounded() -> None:
    with pytest.raises(BodyTooLarge):
        read(["a"] * 50, max_bytes=10_000, suffix="x" * 300)
