"""Multipart forms: the same parts, however the bytes were split."""

import random

import pytest

from inferry.domain.errors import InvalidRequest
from inferry.ingress.stored_work.multipart import MAX_PART_HEADER_BYTES, MultipartParser, Part, boundary_of

FORM = (
    b"preamble\r\n--xyz\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\n'
    b"content-type: application/octet-stream\r\n\r\n"
    b"one\r\n--xy\r\ntwo\n\r\n--xyz\r\n"
    b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--xyz--\r\nepilogue'
)
PARTS = [("purpose", None, b"batch"), ("file", 'a "b".jsonl', b"one\r\n--xy\r\ntwo\n"), ("empty", None, b"")]


def parts_of(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    parser = MultipartParser(b"xyz")
    found: list[tuple[str, str | None, bytes]] = []
    for piece in pieces:
        for one in parser.feed(piece):
            if isinstance(one, Part):
                found.append((one.name, one.filename, b""))
            else:
                name, filename, content = found.pop()
                found.append((name, filename, content + one))
    assert parser.is_complete
    return found


def test_the_parts_of_a_form_do_not_depend_on_how_it_was_split() -> None:
    assert parts_of([FORM]) == PARTS
    assert parts_of([FORM[at : at + 1] for at in range(len(FORM))]) == PARTS
    rng = random.Random(7)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(FORM)), 6))
        assert parts_of([FORM[a:b] for a, b in zip([0, *cuts], [*cuts, len(FORM)], strict=True)]) == PARTS


@pytest.mark.parametrize(
    "form",
    [
        b"--xyz\r\n\r\n\r\nno disposition\r\n--xyz--",
        b'--xyz\r\ncontent-disposition: form-data; filename="x"\r\n\r\nno name\r\n--xyz--',
        b"--xyzz\r\n",
        b"--xyz\r\n" + b"x" * (MAX_PART_HEADER_BYTES + 1),
        b"".join(b'--xyz\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(65)),
    ],
)
def test_a_malformed_form_is_refused(form: bytes) -> None:
    with pytest.raises(InvalidRequest):
        MultipartParser(b"xyz").feed(form)


def test_a_form_without_its_last_boundary_is_incomplete() -> None:
    parser = MultipartParser(b"xyz")
    parser.feed(FORM[: FORM.index(b"--xyz--")])
    assert not parser.is_complete


@pytest.mark.parametrize(
    ("header", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
    ],
)
def test_the_boundary_is_in_the_content_type(header: bytes, boundary: bytes) -> None:
    assert boundary_of(header) == boundary


@pytest.mark.parametrize("header", [b"", b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=a"])
def test_a_body_of_another_type_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(header)
