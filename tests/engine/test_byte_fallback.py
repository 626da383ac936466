"""Detokenising with a real decoder with byte fallback, as in Llama 2, Mistral and Gemma.

Such a decoder reads a run of byte tokens as a whole: it is text, or every byte of it is invalid.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.detokenizer import Assembler, Detokenizer
from inferry.workers.in_process.engine_jobs import replay

LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
UNREADABLE = "\ufffd"


class FallingBack:
    """`domain.ports.Tokenizer` with the decoder of a Llama 2 `tokenizer.json`; counts the tokens it decodes."""

    longest_token_bytes = 6
    fingerprint = "bytes"

    def __init__(self) -> None:
        names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
        self._ids = {name: number for number, name in enumerate(names)}
        self._fast = FastTokenizer(models.BPE(vocab=self._ids, merges=[], unk_token="<unk>", byte_fallback=True))
        self._fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.decoded_tokens = 0

    def bytes_of(self, data: bytes) -> list[int]:
        return [self._ids[f"<0x{byte:02X}>"] for byte in data]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            name = "▁" if letter == " " else letter
            ids += [self._ids[name]] if name in self._ids else self.bytes_of(letter.encode())
        return ids

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
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))


TOKENIZER = FallingBack()


def told(ids: Sequence[int]) -> list[str]:
    """What each token brings out, and the end."""
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push((token,)) for token in ids), detokenizer.finish()]


@given(st.text(alphabet="ab é€😀中.", max_size=60))
@example("€" * 40)
@example("😀" * 20)
@example("a😀" * 12)
@example("中文中文中文中文 a 中文")
@example("a" * 16 + " b")  # where the window slides, a space is not the first of a text
@example("ab " * 20)
def test_a_character_is_emitted_with_its_last_byte(text: str) -> None:
    text = text.lstrip(" ")  # such decoders drop the first space of a text
    detokenizer = Detokenizer(TOKENIZER)
    for letter in text:
        *before, last = TOKENIZER.encode(letter)
        assert [detokenizer.push((token,)) for token in before] == [""] * len(before)
        assert detokenizer.push((last,)) == letter
    assert detokenizer.finish() == ""


@given(st.text(alphabet="aé€😀", max_size=40), st.lists(st.integers(0, 200), max_size=20))
@example("€" * 30, [85])
def test_several_tokens_at_once_emit_the_same_text_as_one_by_one(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text)
    at = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise(at)]
    assert "".join(pieces) + detokenizer.finish() == text


@pytest.mark.parametrize("held", range(1, 4))
def test_at_most_three_bytes_of_an_incomplete_character_are_held_back(held: int) -> None:
    start = "😀".encode()[:held]
    assert told(TOKENIZER.bytes_of(start)) == [""] * held + [UNREADABLE * held]
    assert told(TOKENIZER.bytes_of(b"\xff" * 5)) == ["", "", "", UNREADABLE, UNREADABLE, UNREADABLE * 3]


def test_an_invalid_byte_neither_retracts_nor_repeats_delivered_text() -> None:
    ids = [*TOKENIZER.bytes_of("€€€€€€".encode() + b"\xff"), *TOKENIZER.encode("abc")]
    pieces = told(ids)
    assert "".join(pieces) == f"€€€€€€{UNREADABLE}abc"
    assert pieces[-3:] == ["b", "c", ""], "and the text after it does not wait"


def test_a_text_that_ends_within_a_character_is_flushed() -> None:
    assert "".join(told(TOKENIZER.bytes_of("中".encode() + "😀".encode()[:2]))) == f"中{UNREADABLE * 2}"


def test_a_stop_string_is_found_across_bytes() -> None:
    assembler = Assembler(TOKENIZER, ("é€",))
    pieces = [assembler.push((token,)) for token in TOKENIZER.encode("aé€b")]
    assert "".join(text for text, _ in pieces) == "a"
    assert [stopped for _, stopped in pieces][-2:] == [True, True]


@pytest.mark.parametrize("written", range(20, 60, 7))
def test_a_job_within_a_long_byte_run_resumes_with_complete_characters(written: int) -> None:
    """The run is longer than what is replayed token by token, and breaks off anywhere."""
    text = "中" * 60
    ids = tuple(TOKENIZER.encode(text))
    seam = 3 * written - 1
    for at in (seam - 1, seam, seam + 1):
        assembler = Assembler(TOKENIZER)
        replay(assembler, ids[:at])
        rest = "".join(assembler.push((token,))[0] for token in ids[at:])
        assert rest + assembler.finish() == text[at // 3 :]


def test_the_longest_token_is_measured_in_bytes(tmp_path: Path) -> None:
    """What cannot fit the context is refused by this measure, before it is tokenised."""
    vocabulary = {"<unk>": 0, "▁": 1, "▁▁": 2, "abcde": 3}
    merges = [("▁", "▁")]
    FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert HfTokenizer(tmp_path).longest_token_bytes == len("▁▁".encode()) == 6


@pytest.mark.parametrize("piece", ["€", "😀", "a€", "a"])
def test_a_token_costs_the_same_however_long_a_run_of_bytes_is(piece: str) -> None:
    def cost(times: int) -> float:
        ids = TOKENIZER.encode(piece * times)
        TOKENIZER.decoded_tokens = 0
        told(ids)
        return TOKENIZER.decoded_tokens / len(ids)

    assert cost(400) < 1.5 * cost(40)
