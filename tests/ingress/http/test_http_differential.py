"""The HTTP/1.1 reader against two independent ones: h11, and gunicorn's parser in Python.

FUZZ_CONNECTIONS sets the number of connections, FUZZ_SEED the seed. A difference without a reason in
`support.http_differences` fails and names the seed, the number and the bytes.
"""

import os
import re
from pathlib import Path

import pytest

from support import http_fuzz
from support.http_differences import DIFFERENCES, difference, explained
from support.http_verdicts import Ours, Verdict, by_gunicorn, by_h11

CONNECTIONS = int(os.environ.get("FUZZ_CONNECTIONS", "3000"))
SEED = os.environ.get("FUZZ_SEED", "7")

LONG = b"x" * 70_000
CONVERSATION = (
    b"\r\nPOST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    b"GET http://h/b?c HTTP/1.1\r\nhost: x\r\nX-Twice: 1\r\nx-twice: 2\r\n\r\n"
    b"POST /d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'3;e="f"\r\nabc\r\n00a\r\n\r\n0\r\n\r\nxyz\r\n0\r\nauthorization: no\r\n\r\n'
    b"HEAD /f HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET /g HTTP/1.1\r\nHost: x\r\n\r\n"
)


@pytest.mark.timeout(120 + CONNECTIONS // 100)
def test_every_connection_is_read_as_others_read_it_or_for_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    report = http_fuzz.run(SEED, CONNECTIONS)
    if "FUZZ_CONNECTIONS" in os.environ:
        with capsys.disabled():
            print(f"\nseed {SEED}: {report}")
    assert not report.faults, str(report)
    # It went everywhere: most was served, and refused for reasons of every kind.
    assert report.connections == CONNECTIONS
    assert report.served > CONNECTIONS / 2
    assert {400, 431, 501, 505} <= set(report.refused)


def test_one_connection_is_read_alike_wherever_it_is_cut() -> None:
    ours = Ours()
    whole = ours.read([CONVERSATION])
    assert [one.target for one in whole.requests] == [b"/a", b"/b?c", b"/d", b"/f"]
    assert whole.requests[2].body == b"abc\r\n0\r\n\r\nxyz"
    assert whole.end == "closed"
    for at in range(1, len(CONVERSATION)):
        assert ours.read([CONVERSATION[:at], CONVERSATION[at:]]) == whole, at
        for more in range(at + 1, min(at + 5, len(CONVERSATION))):
            pieces = [CONVERSATION[:at], CONVERSATION[at:more], CONVERSATION[more:]]
            assert ours.read(pieces) == whole, (at, more)
    assert ours.read([CONVERSATION[at : at + 1] for at in range(len(CONVERSATION))]) == whole


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_long_bodies_are_the_same_in_every_framing(size: int) -> None:
    body = LONG * (size // len(LONG)) + LONG[: size % len(LONG)]
    plain = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (size, body)
    half = size // 2
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (half, body[:half], size - half, body[half:])
    data = (plain + b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) * 2
    ours = Ours()
    whole = ours.read([data])
    assert [one.body for one in whole.requests] == [body] * 4
    for piece in (1000, 65_536, 65_537, 70_001, 150_000):
        assert ours.read([data[at : at + piece] for at in range(0, len(data), piece)]) == whole
    for name, read in (("h11", by_h11), ("gunicorn", by_gunicorn)):
        assert difference(name, whole, read(data), data) is None


def test_a_fault_with_braces_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"GET /{0}{name} HTTP/1.1\r\nHost: x\r\n\r\n"

    def fail(_: object, pieces: list[bytes]) -> Verdict:
        raise ValueError("{1}")

    monkeypatch.setattr("support.http_generator.a_connection", lambda _: data)
    monkeypatch.setattr(Ours, "read", fail)
    report = http_fuzz.block("7", range(1))
    assert report.faults == [f"seed 7, connection 0: ValueError('{{1}}') in {data!r}"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("hosts", b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n"),
        ("chunk lines", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n"),
    ],
)
def test_reasons_do_not_depend_on_error_texts(name: str, data: bytes) -> None:
    verdict = Ours().read([data])
    assert verdict.why == ""
    found = difference("h11", verdict, by_h11(data), data)
    assert found is not None
    reason = explained(found)
    assert reason is not None
    assert reason.name == name


def test_an_unexplained_difference_is_reported() -> None:
    """The suite would see it if a request came out differently, or one more did."""
    ours = Ours()
    data = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    verdict = ours.read([data])
    changed = verdict._replace(requests=[verdict.requests[0]._replace(body=b"hullo")])
    more = verdict._replace(requests=[*verdict.requests, verdict.requests[0]])
    for wrong in (changed, more, verdict._replace(requests=[], end="refused", status=400)):
        found = difference("h11", wrong, by_h11(data), data)
        assert found is not None
        assert explained(found) is None


def test_every_reason_is_listed_once() -> None:
    names = [reason.name for reason in DIFFERENCES]
    assert len(names) == len(set(names))
    assert all("different" not in reason.kinds for reason in DIFFERENCES)
    page = (Path(__file__).parents[3] / "docs/explanation/http-server.md").read_text().replace("\n", " ")
    for name in names:
        assert re.search(rf"[|,*] ?{name}[ ,*\n]", page), name
