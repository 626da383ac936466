"""Text from tokens: never half a character, never past a stop string, whatever the splits."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferry.streams.detokenizer import Assembler

ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
FEW_LETTERS = st.text(alphabet="abé€𝄞 ", max_size=40)


class ByteTokenizer:
    """A byte-level vocabulary in which token i stands for a piece of bytes, as byte-level BPE does."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self.longest_token_bytes = max(map(len, pieces), default=1)
        self.fingerprint = "pieces"
        self._pieces = list(pieces)
        self.decoded_tokens = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded_tokens += len(token_ids)
        return b"".join(self._pieces[token] for token in token_ids).decode("utf-8", errors="replace")


class SpaceStrippingTokenizer(ByteTokenizer):
    """Drops the space a text begins with, as SentencePiece decoders do."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).removeprefix(" ")


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(at)]


def assemble(tokenizer: ByteTokenizer, tokens: int, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    assembler = Assembler(tokenizer, stop)
    pieces: list[str] = []
    for token in range(tokens):
        text, stopped = assembler.push((token,))
        pieces.append(text)
        if stopped:
            return pieces, True
    return [*pieces, assembler.finish()], False


CUTS = st.lists(st.integers(0, 200), max_size=200)


@given(ANY_TEXT, CUTS)
@example("é" * 40, list(range(200)))
@example("\ufffd" * 30 + "a", list(range(200)))
def test_the_pieces_joined_are_the_text_of_all_tokens(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    for tokenizer in (ByteTokenizer(pieces), SpaceStrippingTokenizer(pieces)):
        out, _ = assemble(tokenizer, len(pieces))
        assert "".join(out) == tokenizer.decode(range(len(pieces)))


@given(st.binary(max_size=120), CUTS)
@example(b"\x80" * 100, list(range(200)))
@example(b"\xe4\xb8" * 50 + b"x", list(range(200)))
@example("𝄞".encode()[:3] * 30, list(range(200)))
def test_even_bytes_that_are_no_text_come_out_as_one_decoding_would_say(data: bytes, cuts: list[int]) -> None:
    pieces = split(data, cuts)
    out, _ = assemble(ByteTokenizer(pieces), len(pieces))
    assert "".join(out) == data.decode("utf-8", errors="replace")


@given(FEW_LETTERS, CUTS)
def test_half_a_character_is_never_given_out(text: str, cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    out, _ = assemble(ByteTokenizer(pieces), len(pieces))
    assert all("\ufffd" not in piece for piece in out)
    complete = 0
    for count in range(1, len(pieces) + 1):
        seen = b"".join(pieces[:count]).decode("utf-8", errors="ignore")
        assert "".join(out[:count]) == seen, "what is complete is given out at once"
        complete = len(seen)
    assert complete == len(text)


@given(FEW_LETTERS, CUTS, st.lists(st.text(alphabet="abé€ ", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    pieces = split(text.encode(), cuts)
    out, stopped = assemble(ByteTokenizer(pieces), len(pieces), tuple(stops))
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert stopped is bool(found)
    assert "".join(out) == (text[: min(found)[1]] if found else text)


@given(FEW_LETTERS, CUTS, st.text(alphabet="ab", min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, cuts: list[int], stop: str) -> None:
    pieces = split(text.encode(), cuts)
    assembler = Assembler(ByteTokenizer(pieces), (stop,))
    given_out = ""
    for token in range(len(pieces)):
        piece, stopped = assembler.push((token,))
        given_out += piece
        if stopped:
            return
        complete = b"".join(pieces[: token + 1]).decode("utf-8", errors="ignore")
        held = complete[len(given_out) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_a_stop_string_may_span_tokens() -> None:
    out, stopped = assemble(ByteTokenizer([b"one E", b"N", b"D two"]), 3, ("END",))
    assert (out, stopped) == (["one ", "", ""], True)


def test_nothing_comes_after_a_stop_string() -> None:
    assembler = Assembler(ByteTokenizer([b"a.", b"b"]), ("?", "."))
    assert assembler.matched is None
    assert assembler.push((0,)) == ("a", True)
    assert assembler.matched == "."
    assert assembler.push((1,)) == ("", True)
    assert assembler.finish() == ""


def test_several_tokens_may_be_pushed_at_once() -> None:
    assembler = Assembler(ByteTokenizer(["é".encode()[:1], "é".encode()[1:], b"!"]))
    assert assembler.push((0, 1)) == ("é", False)
    assert assembler.push((2,)) == ("!", False)


@pytest.mark.parametrize("piece", [b"word ", b"\x80", b"\xe4"])
def test_a_token_costs_the_same_however_long_the_output_is(piece: bytes) -> None:
    tokenizer = ByteTokenizer([piece] * 4_000)
    assemble(tokenizer, 2_000)
    first = tokenizer.decoded_tokens
    tokenizer.decoded_tokens = 0
    assemble(tokenizer, 4_000)
    assert tokenizer.decoded_tokens < 2.2 * first
    assert first < 64 * 2_000
