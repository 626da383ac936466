"""Long bodies without their long strings say the same, and nothing that is no JSON becomes any."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.errors import InvalidRequest
from inferry.ingress import parse
from inferry.ingress.brevity import LEAST_BODY_BYTES, shortened
from inferry.ingress.wire import ChatBody

shorten: Any = pytest.importorskip("inferry.ingress._shorten", reason="nothing is compiled here").shorten

_decoder = msgspec.json.Decoder(ChatBody)
_raw = msgspec.json.Decoder(msgspec.Raw)
LEAST = 64


def _chat(content: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def _in_a_message(inside: bytes) -> bytes:
    """A body with these bytes within its quotes, whatever they are."""
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % inside


def _is_json(body: bytes) -> bool:
    try:
        _raw.decode(body)
    except msgspec.DecodeError:
        return False
    return True


def test_a_long_text_in_a_message_is_left_out_and_all_else_stays() -> None:
    body = _chat("word " * 1000, max_tokens=7, stop=["x" * 500], user="u" * 500)
    short, is_ascii = shorten(body, LEAST)
    assert is_ascii
    assert len(short) < 1500
    said, meant = _decoder.decode(short), _decoder.decode(body)
    for name in ChatBody.__struct_fields__:
        if name != "messages":
            assert getattr(said, name) == getattr(meant, name), name
    assert [message.role for message in said.messages] == ["user"]


def test_texts_that_are_not_within_two_others_are_never_touched() -> None:
    long = "y" * 5000
    assert (
        shorten(json.dumps({"model": long, "stop": [long], "response_format": {"type": long}}).encode(), LEAST) is None
    )


def test_equal_texts_leave_equal_bodies_and_others_do_not() -> None:
    text = "word " * 1000
    assert shorten(_chat(text), LEAST) == shorten(_chat(text), LEAST)
    for other in ("w0rd " + text[5:], text[:-5] + "w0rd ", text + "word "):
        assert shorten(_chat(other), LEAST) != shorten(_chat(text), LEAST)


def test_what_is_short_is_not_worth_it() -> None:
    assert shorten(_chat("hello"), LEAST) is None
    assert shortened(_chat("x" * (LEAST_BODY_BYTES // 2))) is None
    assert shortened(_chat("x" * LEAST_BODY_BYTES)) is not None


@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 31, 63, 64, 65, 79, 80, 100, 199, 200])
@pytest.mark.parametrize(
    "odd",
    [
        b"\x00",
        b"\x1f",
        b"\n",
        b"\t",
        b"\\",
        b"\\x",
        b"\\u12",
        b"\\u12g4",
        b"\\ud800",
        b"\\udc00",
        b"\\ud800\\u0041",
        b'"',
    ],
)
def test_what_is_no_json_is_left_to_the_decoder_wherever_it_stands(odd: bytes, place: int) -> None:
    text = b"z" * 200
    body = _in_a_message(text[:place] + odd + text[place:])
    if not _is_json(body):
        found = shorten(body, LEAST)
        assert found is None or not _is_json(found[0])


@pytest.mark.parametrize("place", [0, 1, 14, 15, 16, 17, 31, 63, 64, 65, 78, 79, 80, 81, 199, 200])
@pytest.mark.parametrize(
    "escape",
    [
        b"\\n",
        b'\\"',
        b"\\\\",
        b"\\/",
        b"\\b\\f\\r\\t",
        b"\\u00e4",
        b"\\ud83d\\uDE00",
        b"\\\\\\n",
        b'\\\\\\\\\\"',
        "ä".encode(),
    ],
)
def test_every_escape_is_known_wherever_it_stands(escape: bytes, place: int) -> None:
    text = b"z" * 200
    body = _in_a_message(text[:place] + escape + text[place:])
    assert _is_json(body)
    found = shorten(body, LEAST)
    assert found is not None
    assert b"z" not in found[0]
    assert found[1] is (escape[0] < 0x80)


_texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["n" * 100, '"\\' * 40, "é\n" * 50, "\x7f" * 70]
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(_values, st.booleans(), st.sampled_from([None, 1]))
def test_whatever_is_json_stays_json(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"messages": [{"content": value}]}, ensure_ascii=ascii_only, indent=indent).encode()
    found = shorten(body, LEAST)
    if found is not None:
        short, is_ascii = found
        assert _is_json(short)
        assert len(short) < len(body)
        assert not (is_ascii and short.isascii()) or body.isascii()


@settings(max_examples=250, deadline=None)
@given(_values, st.data())
def test_whatever_is_no_json_never_becomes_any(value: Any, data: st.DataObject) -> None:
    body = bytearray(json.dumps({"messages": [{"content": value}], "x": ["y" * 80]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        new = data.draw(st.sampled_from(b'"\\{}[]:,nu0\x00\n\xff'))
        if data.draw(st.booleans()):
            body[at] = new
        else:
            body.insert(at, new)
    found = shorten(bytes(body), LEAST)
    if found is not None and _is_json(found[0]):
        assert _is_json(bytes(body))


def test_bodies_end_where_they_end() -> None:
    body = _chat('say "it" \\ and \U0001f600 ' * 20)
    for size in range(len(body)):
        found = shorten(body[:size], LEAST)
        assert found is None or not _is_json(found[0])


def test_it_takes_bytes_alone() -> None:
    for wrong in ("text", bytearray(b"{}"), memoryview(b"{}")):
        with pytest.raises(TypeError):
            shorten(wrong, LEAST)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"word end", b"word \x01 end", "not valid JSON: JSON is malformed: invalid character \\(byte 25057\\)"),
        (b"word end", b"word \\x end", "not valid JSON: JSON is malformed: invalid escaped character \\(byte 25058\\)"),
        (b"word end", b"word \xff end", "not valid UTF-8 \\(byte 25057\\)"),
        (b'"user"', b'"nobody"', "not one of the allowed values"),
        (b'"max_tokens": 5', b'"max_tokens": "5"', "expected `int"),
        (b"}]", b"}", "expected `object`, got `str`"),
        (b"}]", b"}}", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_long_body_is_said_of_the_body_as_it_came(old: bytes, new: bytes, what: str) -> None:
    body = _chat("word " * 5000 + "end", max_tokens=5)
    assert old in body
    with pytest.raises(InvalidRequest, match=what):
        parse._decode("chat", body.replace(old, new))
