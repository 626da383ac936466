"""The tokenizer and its chat template."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferry.domain.errors import InvalidRequest
from inferry.engine.tokenizer import HfTokenizer

BOS = 1


def with_template(tiny_dir: Path, directory: Path, template: str) -> HfTokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, directory)
    (directory / "chat_template.jinja").write_text(template)
    return HfTokenizer(directory)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_survives_encoding_and_decoding(tokenizer: HfTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    if "<|" not in text:
        assert tokenizer.decode(ids) == text


def test_a_text_that_brings_its_own_bos_does_not_get_a_second(tokenizer: HfTokenizer) -> None:
    assert tokenizer.encode("<|bos|>hello") == tokenizer.encode("hello")


def test_a_chat_is_rendered_by_the_models_template(tokenizer: HfTokenizer) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert tokenizer.render_chat(messages) == "<|bos|><|system|>be brief<|end|><|user|>ab<|end|><|assistant|>"
    ids = tokenizer.encode_chat(messages)
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("content", ["The answer", "The answer ", "<|end|>"])
def test_the_last_message_can_be_continued(tokenizer: HfTokenizer, content: str) -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "The answer"},
        {"role": "assistant", "content": [{"type": "text", "text": content}]},
    ]
    text = tokenizer.render_chat(messages, continues_last=True)
    assert text == f"<|bos|><|user|>The answer<|end|><|assistant|>{content}" + "<|end|>" * (content == "<|end|>")


def test_a_template_may_strip_the_message_that_is_continued(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = with_template(tiny_dir, tmp_path, "{% for m in messages %}{{ m.content | trim }}<|end|>{% endfor %}")
    assert tokenizer.render_chat([{"role": "assistant", "content": " So "}], continues_last=True) == "So"
    tokenizer = with_template(tiny_dir, tmp_path, "{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        tokenizer.render_chat([{"role": "assistant", "content": "So"}], continues_last=True)


def test_special_tokens_are_left_out_of_decoded_text(tokenizer: HfTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<|user|>hi<|end|>")) == "hi"


def test_the_template_has_the_usual_helpers(tiny_dir: Path, tmp_path: Path) -> None:
    helpers = "{{ messages[0] | tojson }} {{ strftime_now('%Y') | length }}"
    template = helpers + "\n{% for m in messages %}\n  {% break %}\n{% endfor %}\n{{ eos_token }}"
    text = with_template(tiny_dir, tmp_path, template).render_chat([{"role": "user", "content": "ü<"}])
    assert text == '{"role": "user", "content": "ü<"} 4\n<|eos|>'


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'].nope() }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
    ],
)
def test_template_errors_are_the_clients_and_do_not_quote_it(
    tiny_dir: Path, tmp_path: Path, template: str, said: str
) -> None:
    tokenizer = with_template(tiny_dir, tmp_path, template)
    with pytest.raises(InvalidRequest, match=said) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "CANARY"}])
    assert "CANARY" not in str(caught.value)


def test_parts_other_than_text_are_refused(tokenizer: HfTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="text parts"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_model_without_a_template_is_an_error(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        HfTokenizer(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_a_named_default_template_and_tokens_given_as_objects_are_read(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    config = {
        "bos_token": {"content": "<|bos|>", "special": True},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}!"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert HfTokenizer(tmp_path).render_chat([]) == "<|bos|>!"
