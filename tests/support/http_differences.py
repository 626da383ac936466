"""Where our reading of HTTP/1.1 differs from that of others, and why it may.

`DIFFERENCES` is the whole list. A difference that none of them explains is a fault, of ours until shown otherwise.
"""

import re
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from inferry.ingress.http.request_reader import LARGE_HEAD
from support.http_verdicts import Verdict

KNOWN_METHODS = frozenset(
    b"DELETE GET HEAD POST PUT CONNECT OPTIONS TRACE COPY LOCK MKCOL MOVE PROPFIND PROPPATCH SEARCH UNLOCK BIND REBIND "
    b"UNBIND ACL REPORT MKACTIVITY CHECKOUT MERGE M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE PATCH PURGE MKCALENDAR LINK "
    b"UNLINK SOURCE QUERY".split()
)
HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[\w\-.~!$&'()*+,;=%]*)(:\d{0,5})?", re.ASCII)
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
GOOD_EXTENSION = (
    rb"[ \t]*;[ \t]*"
    + TOKEN
    + rb"([ \t]*=[ \t]*("
    + TOKEN
    + rb'|"([\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"))?'
)
GOOD_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}(" + GOOD_EXTENSION + rb")*\r\n")
NOT_FOR_TRAILERS = re.compile(
    rb"^(host|content-length|transfer-encoding|trailer|authorization|te):", re.IGNORECASE | re.MULTILINE
)


class Difference:
    """The first request that two implementations do not agree about, in the bytes that begin with it."""

    def __init__(self, reference: str, kind: str, ours: Verdict, theirs: Verdict, rest: bytes, before: bytes) -> None:
        self.reference = reference
        self.kind = kind
        self.ours = ours
        self.theirs = theirs
        self.rest = rest
        self.before = before
        end = re.search(rb"\n\r?\n", rest)
        self.head = rest if end is None else rest[: end.end()]
        self.body = b"" if end is None else rest[end.end() :]
        line, _, fields = self.head.partition(b"\n")
        self.method, _, tail = line.rstrip(b"\r").partition(b" ")
        self.target, _, self.version = tail.partition(b" ")
        self._fields = b"\n" + fields

    def values(self, name: bytes) -> list[bytes]:
        found = re.findall(rb"\n" + name + rb"[ \t]*:([^\n]*)", self._fields, re.IGNORECASE)
        return [one.strip(b" \t\r") for one in found]

    @cached_property
    def last(self) -> "Difference":
        """The request before this one, about which they agree, without the empty line that may precede it."""
        before = self.before.removeprefix(b"\r\n")
        return Difference(self.reference, self.kind, self.ours, self.theirs, before, b"")

    @cached_property
    def frames(self) -> tuple[list[bytes], bytes]:
        """The lines with sizes of chunks as far as they can be followed, and what stands where trailers do."""
        sizes, at = [], 0
        while True:
            end = self.body.find(b"\n", at) + 1
            line = self.body[at:end] if end else self.body[at:]
            size = re.match(rb"[ \t]*[0-9a-fA-F]+", line)
            sizes.append(line)
            if size is None or not end:
                return sizes, b""
            if not int(size[0], 16):
                stop = re.search(rb"\A\r?\n|\n\r?\n", self.body[end:])
                return sizes, self.body[end:] if stop is None else self.body[end : end + stop.end()]
            at = end + int(size[0], 16)
            if self.body[at : at + 2] != b"\r\n":
                return sizes, b""
            at += 2


class Reason(NamedTuple):
    name: str
    references: str
    kinds: str
    """`stricter`: only they take it. `laxer`: only we do. `end`: both serve the same, and end it differently."""
    holds: Callable[[Difference], bool]
    why: str


def _has_stray(text: bytes) -> bool:
    return re.search(rb"(?<!\r)\n|\r(?!\n)", text) is not None


def _is_in_chunks(it: Difference) -> bool:
    return it.ours.is_in_body and it.ours.status in (400, 431)


def _bad_trailers(it: Difference) -> bool:
    return _is_in_chunks(it) and (_has_stray(it.frames[1]) or re.search(rb"\n[ \t]", it.frames[1]) is not None)


def _bad_host(it: Difference) -> bool:
    hosts = it.values(b"host")
    is_bad = len(hosts) > 1 or any(HOST.fullmatch(host) is None for host in hosts)
    return it.ours.status == 400 and not it.ours.is_in_body and (is_bad or (not hosts and it.version == b"HTTP/1.1"))


def _connection(it: Difference) -> bool:
    values = [one.strip(b" \t").lower() for one in b",".join(it.last.values(b"connection")).split(b",")]
    return b"close" in values and values != [b"close"]


DIFFERENCES: tuple[Reason, ...] = (
    Reason(
        "methods", "h11 gunicorn", "stricter end",
        lambda it: it.method not in KNOWN_METHODS and it.ours.status in (400, 501),
        "A method that llhttp does not know is refused (501); they leave that to the application.",
    ),
    Reason(
        "versions", "h11 gunicorn", "stricter end",
        lambda it: it.ours.status == 505 and it.version.strip() not in (b"HTTP/1.1", b"HTTP/1.0"),
        "Only HTTP/1.1 and HTTP/1.0 are spoken (505); they take other minor or major versions for 1.1.",
    ),
    Reason(
        "targets", "h11 gunicorn", "stricter end",
        lambda it: it.ours.status == 400 and (not it.target.startswith(b"/") or it.method == b"CONNECT"),
        "A target has one of the four forms of RFC 9112, 3.2, that its method allows; h11 takes any text, gunicorn any "
        "scheme and authority.",
    ),
    Reason(
        "hosts", "h11 gunicorn", "stricter end", _bad_host,
        "RFC 9112, 3.2: one valid Host in HTTP/1.1. h11 does not look at its value, gunicorn does not ask for one.",
    ),
    Reason(
        "two framings", "h11", "stricter end",
        lambda it: it.ours.status == 400
        and bool(it.values(b"content-length"))
        and bool(it.values(b"transfer-encoding")),
        "A length beside a transfer coding may be meant to smuggle a request, and is refused (RFC 9112, 6.1); h11 "
        "drops the length.",
    ),
    Reason(
        "lengths", "h11", "stricter end",
        lambda it: it.ours.status == 400 and b"," in b",".join(it.values(b"content-length")),
        "A length that comes twice is refused even where both are the same; h11 takes them for one.",
    ),
    Reason(
        "chunks in HTTP/1.0", "h11", "stricter end",
        lambda it: it.ours.status == 400 and it.version == b"HTTP/1.0" and bool(it.values(b"transfer-encoding")),
        "HTTP/1.0 has no transfer codings (RFC 9112, 6.1); h11 takes them.",
    ),
    Reason(
        "codings", "gunicorn", "stricter end",
        lambda it: it.ours.status in (400, 501)
        and b",".join(it.values(b"transfer-encoding")).lower() not in (b"", b"chunked"),
        "No coding but chunked is understood (501), nor an empty one; gunicorn takes identity, and hands gzip on.",
    ),
    Reason(
        "a tab after chunked", "h11 gunicorn", "stricter end",
        lambda it: it.ours.status == 400 and re.search(rb"chunked *\t", it.head, re.IGNORECASE) is not None,
        "llhttp takes spaces behind `chunked`, but no tab.",
    ),
    Reason(
        "line ends", "h11", "stricter end",
        lambda it: it.ours.status in (400, 505) and _has_stray(it.head),
        "Lines end with CR LF (RFC 9112, 2.2 allows more, and smuggling lives on it); h11 takes a bare LF.",
    ),
    Reason(
        "folding", "h11", "stricter end",
        lambda it: it.ours.status == 400 and re.search(rb"\n[ \t]", it.head) is not None,
        "A folded field is refused (RFC 9112, 5.2); h11 unfolds it.",
    ),
    Reason(
        "controls", "h11", "stricter end",
        lambda it: it.ours.status == 400 and re.search(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]", it.head) is not None,
        "No control characters but HTAB in values (RFC 9110, 5.5); h11 refuses NUL, CR and LF alone.",
    ),
    Reason(
        "chunk lines", "h11 gunicorn", "stricter end",
        lambda it: _is_in_chunks(it) and any(GOOD_SIZE.fullmatch(line) is None for line in it.frames[0]),
        "A chunk begins with up to 16 digits and extensions in the grammar of RFC 9112, 7.1.1. h11 takes any text as "
        "extension, spaces before the end of the line and a bare LF in it; gunicorn more digits.",
    ),
    Reason(
        "trailers", "h11", "stricter end", _bad_trailers,
        "Trailers have the grammar of fields: not folded, and CR LF after each; h11 takes both.",
    ),
    Reason(
        "controls in trailers", "h11", "stricter end",
        lambda it: _is_in_chunks(it) and re.search(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]", it.frames[1]) is not None,
        "As in headers.",
    ),
    Reason(
        "limits", "h11 gunicorn", "stricter end",
        lambda it: it.ours.status in (413, 431),
        "What is longer than this server takes: heads, fields, chunk extensions, trailers, bodies.",
    ),
    Reason(
        "an empty line", "h11", "laxer end",
        lambda it: it.rest.startswith(b"\r\n") or it.rest == b"\r",
        "One empty line before a request is ignored, as RFC 9112, 2.2 asks for; h11 refuses it.",
    ),
    Reason(
        "an empty line at the end", "gunicorn", "end",
        lambda it: it.rest in (b"\r\n", b"\r", b"\r\n\r") and it.ours.end == "open",
        "After it the connection is as idle as before; gunicorn takes it for the beginning of a request.",
    ),
    Reason(
        "spaces in extensions", "h11", "laxer end",
        lambda it: any(re.match(rb"[0-9a-fA-F]+[ \t]+;", line) is not None for line in it.frames[0]),
        "RFC 9112, 7.1.1 allows whitespace before the semicolon of a chunk extension; h11 refuses it.",
    ),
    Reason(
        "trailers with a meaning", "h11 gunicorn", "laxer end",
        lambda it: NOT_FOR_TRAILERS.search(it.frames[1]) is not None,
        "Trailers are dropped whatever their names; gunicorn refuses those that must not be trailers, h11 "
        "those of them with values that would be wrong in headers.",
    ),
    Reason(
        "expectations", "gunicorn", "laxer end",
        lambda it: any(value.lower() != b"100-continue" for value in it.values(b"expect")),
        "An expectation that is unknown is ignored, as RFC 9110, 10.1.1 allows; gunicorn refuses it (417).",
    ),
    Reason(
        "content types", "gunicorn", "laxer end",
        lambda it: len(it.values(b"content-type")) > 1,
        "A content-type that comes twice is a list, which nothing here reads; gunicorn refuses it.",
    ),
    Reason(
        "when to close", "gunicorn", "laxer stricter end", _connection,
        "`close` counts anywhere in the list of Connection; gunicorn looks at the first value alone.",
    ),
    Reason(
        "HTTP/1.0 kept alive", "gunicorn", "stricter end",
        lambda it: it.last.version == b"HTTP/1.0" and it.ours.end == "closed",
        "A connection is closed after a request of HTTP/1.0, whatever it asks for; gunicorn keeps it if asked to.",
    ),
    Reason(
        "CONNECT", "h11 gunicorn", "stricter end",
        lambda it: it.last.method == b"CONNECT" and it.ours.end == "closed",
        "A connection is closed after CONNECT: what a client sends after it is no HTTP. They leave that to the "
        "application.",
    ),
    Reason(
        "after a large head", "h11 gunicorn", "stricter end",
        lambda it: len(it.last.head) > LARGE_HEAD - 8 and it.ours.end == "closed",
        "A connection is closed after a head that took long to read, so that one connection cannot send many.",
    ),
    Reason(
        "sooner or later", "h11 gunicorn", "end",
        lambda it: {it.ours.end, it.theirs.end} == {"refused", "midst"},
        "Neither serves it. One has refused what the other waits to see the end of.",
    ),
)  # fmt: skip


def difference(reference: str, ours: Verdict, theirs: Verdict, data: bytes) -> Difference | None:
    same = 0
    for mine, other in zip(ours.requests, theirs.requests, strict=False):
        if mine != other:
            break
        same += 1
    if same < min(len(ours.requests), len(theirs.requests)):
        kind = "different"
    elif same < len(ours.requests):
        kind = "laxer"
    elif same < len(theirs.requests):
        kind = "stricter"
    elif ours.end == theirs.end:
        return None
    else:
        kind = "end"
    starts = theirs.starts
    before = data[starts[same - 1] : starts[same]] if same else b""
    return Difference(reference, kind, ours, theirs, data[starts[same] :], before)


def explained(it: Difference) -> Reason | None:
    for reason in DIFFERENCES:
        if it.reference in reason.references and it.kind in reason.kinds.split() and reason.holds(it):
            return reason
    return None
