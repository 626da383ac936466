# ruff: noqa: E501
"""What clients send on one connection: framed in every way HTTP/1.1 has, broken in many, and cut anywhere.

The same seed, the same bytes.
"""

from collections.abc import Callable
from random import Random

METHODS = (b"GET", b"POST", b"POST", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS")
TARGETS = (b"/", b"/v1/chat/completions", b"/v1/models?limit=3&x=%20y", b"/a/b/../c;d=e", b"http://h.example/p?q")
FIELDS = (
    b"User-Agent: a/1.0 (b; c)",
    b"Authorization: Bearer ifk_0000000000_abc",
    b"X-Inferry-Run-Id: r-1",
    b"accept:*/*",
    b"X-Empty:",
    b"X-Space: \t two  words \t ",
    b"X-Text: caf\xc3\xa9 \xff",
    b"X_under-score!#$%&'*+.^`|~: 1",
    b"X-Twice: 1\r\nx-twice: 2\r\nX-TWICE: 3",
    b"Cookie: a=b; c=d",
    b"Connection: keep-alive",
    b"Connection: upgrade\r\nUpgrade: h2c",
)
TRAILERS = (b"", b"", b"", b"X-Sum: 1\r\n", b"a:b\r\nc:\r\n", b"X-Api-Key: x\r\n", b"X-T: \xff\t1 \r\n")
EXTENSIONS = (b"", b"", b"", b"", b";a", b";a=b", b';a="b;\\"c"', b";a;b;c=1")

# -- what is good ----------------------------------------------------------------------------------------------------


def a_body(rng: Random) -> bytes:
    kind = rng.random()
    if kind < 0.01:
        return rng.randbytes(64) * rng.randint(1020, 1500)  # about what is kept instead of copied
    if kind < 0.1:
        return rng.choice([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]) * rng.randint(
            1, 4
        )
    return rng.randbytes(rng.choice([1, 2, 5, 15, 16, 17, 60, 300]))


def chunked(rng: Random, body: bytes) -> bytes:
    """A body in chunks of any sizes, with all that may stand around them."""
    parts, at = [], 0
    largest = max(1, len(body) // rng.choice([1, 1, 2, 3, 8]))
    while at < len(body):
        size = rng.randint(1, largest)
        piece = body[at : at + size]
        digits = b"%x" % len(piece)
        if rng.random() < 0.15:
            digits = rng.choice([digits.upper(), b"0" + digits, b"000" + digits])
        parts.append(b"%b%b\r\n%b\r\n" % (digits, rng.choice(EXTENSIONS), piece))
        at += size
    return b"".join(parts) + rng.choice([b"0", b"0", b"00"]) + rng.choice(EXTENSIONS) + b"\r\n" + _trailers(rng)


def _trailers(rng: Random) -> bytes:
    return rng.choice(TRAILERS) + b"\r\n"


def a_request(rng: Random) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (rng.choice(METHODS), rng.choice(TARGETS))]
    fields = [rng.choice([b"Host: x", b"host: h.example:80", b"HOST:[::1]"])]
    fields += rng.sample(FIELDS, rng.choice([0, 1, 2, 4]))
    framing = rng.random()
    body = b""
    if framing < 0.35:
        body = a_body(rng)
        fields.append(b"Content-Length: %d" % len(body))
    elif framing < 0.7:
        body = chunked(rng, a_body(rng))
        fields.append(b"Transfer-Encoding: " + rng.choice([b"chunked", b"chunked", b"Chunked"]))
    elif framing < 0.8:
        fields.append(b"Content-Length: 0")
    rng.shuffle(fields)
    return b"\r\n".join([*lines, *fields, b"", b""]) + body


# -- what is not -----------------------------------------------------------------------------------------------------


def _swap(rng: Random, data: bytes, old: bytes, *new: bytes) -> bytes:
    return data.replace(old, rng.choice(new), 1)


def request_lines(rng: Random, data: bytes) -> bytes:
    versions = (
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"HTTP/1.2",
        b"HTTP/0.9",
        b"HTTP/3.0",
        b"http/1.1",
        b"HTTP/11",
        b"",
        b"ICE/1.0",
    )
    more = (b"HTTP/1.1 ", b" HTTP/1.1", b"HTTP/1.1\r", b"HTTP/1.1\x00", b"HTTP/1.1 x", b"HTTP/1.10")
    methods = (b"get", b"BREW", b"G(T", b"", b"CONNECT", b"M-SEARCH", b"PRI", b"G\x00T", b" GET", b"A" * 30, b"SOURCE")
    targets = (b"*", b"x", b"a.b:443", b"", b"/\xc3\xa9", b"/a b", b"/\x01", b"/\t", b"ftp://x/", b"http://", b"//x/y")
    more_targets = (b"http://a@b/", b"HTTPS://x", b"http://x?y", b"/#f", b"/%zz", b'/<>"{}|\\^`', b"/" + b"a" * 9000)
    method, _, rest = data.partition(b" ")
    _, _, tail = rest.partition(b" ")
    kind = rng.randrange(3)
    if kind == 0:
        return _swap(rng, data, b"HTTP/1.1", *versions, *more)
    if kind == 1:
        return rng.choice(methods) + b" " + rest
    return b"%b %b %b" % (method, rng.choice([*targets, *more_targets]), tail)


def fields(rng: Random, data: bytes) -> bytes:
    odd = (
        b"a : b", b"a\t: b", b": b", b"a", b"a b: c", b"a: b\r\n c", b"a: b\r\n\tc", b" a: b", b"a: b\x00c", b"a: \x01",
        b"a: b\rc", b"a: b\nc: d", b"a\x00: b", b"a\xff: b", b"a: \x7f", b"a:\x0bb", b"\r", b"\n", b"a(b): c", b"a: b\r\r",
        b"Host: y", b"Host: a b", b"Host: a@b", b"Host: ", b"Host: x:y", b"Host: a/b", b"Expect: 100-continue",
        b"Expect: more", b"Connection: close", b"Connection: close, te", b"Connection: Close", b"Content-Type: a\r\ncontent-type: b",
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
        b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding: chunked,",
        b"Transfer-Encoding: xchunked", b"Transfer-Encoding:", b"Transfer-Encoding: chunked;q=1", b"Transfer-Encoding : chunked",
        b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: +5", b"Content-Length: -1", b"Content-Length: 5, 5",
        b"Content-Length: 0x5", b"Content-Length:", b"Content-Length: 5 5", b"Content-Length: 1_0", b"Content-Length: \xb2",
        b"Content-Length: 99999999999999999999999", b"Content-Length: 005", b"Content-Length: 5\x00", b"Content_Length: 5",
        b"A: " + b"v" * 66_000, b"\r\n".join(b"A%d:" % number for number in range(140)), b"A: " + b"v" * 9000,
    )  # fmt: skip
    lines = data.split(b"\r\n\r\n", 1)[0].split(b"\r\n")
    at = rng.randint(1, len(lines))
    if rng.random() < 0.2:
        del lines[rng.randrange(1, len(lines)) if len(lines) > 1 else 0]  # a Host, or a framing
    else:
        lines.insert(at, rng.choice(odd))
    return b"\r\n".join(lines) + data[data.find(b"\r\n\r\n") :]


def chunk_frames(rng: Random, data: bytes) -> bytes:
    odd = (
        b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"5\r\nhello0\r\n\r\n", b"5\r\nhell\r\n0\r\n\r\n", b"g\r\n", b"\r\n",
        b"5\r\nhelloo\r\n0\r\n\r\n", b"-5\r\nhello\r\n0\r\n\r\n", b"+5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n", b" 5\r\nhello\r\n0\r\n\r\n", b"5;\r\nhello\r\n0\r\n\r\n", b"5;a=\r\nhello\r\n0\r\n\r\n",
        b"5;a b\r\nhello\r\n0\r\n\r\n", b"5;\x00\r\nhello\r\n0\r\n\r\n", b"5;a=\"\r\n\"\r\nhello\r\n0\r\n\r\n", b"1_0\r\n", b"0\r\n\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n", b"0\r\na\r\n\r\n", b"0\r\n a: b\r\n\r\n", b"0\r\na : b\r\n\r\n", b"0\r\na: b\nc: d\r\n\r\n",
        b"0\r\na: b\r\n c\r\n\r\n", b"0\r\nHost: y\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\na: \x00\r\n\r\n", b"0\n\n", b"0\r\r",
        b"5 ;a = b\r\nhello\r\n0\r\n\r\n", b"0\r\nAuthorization: Bearer x\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n: b\r\n\r\n", b"0\r\na: \x01\r\n\r\n", b"0\r\n\rx", b"0;a\r\n\r\n",
        b"ffffffffffffffff\r\n", b"00000000000000005\r\nhello\r\n0\r\n\r\n", b"7fffffffffffffff\r\n", b"5;" + b"e" * 17_000 + b"\r\nhello\r\n",
        b"0\r\n" + b"a:b\r\n" * 3500 + b"\r\n", b"1;a=b\r\nx\r\n" * 30 + b"0\r\n\r\n", b"5;a=\"b\r\nhello\r\n0\r\n\r\n", b"5;=b\r\nhello\r\n0\r\n\r\n",
    )  # fmt: skip
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + rng.choice([b"", b"", b"3\r\nabc\r\n"]) + rng.choice(odd)


def stray_bytes(rng: Random, data: bytes) -> bytes:
    at = rng.randint(0, min(len(data), 600))
    kind = rng.random()
    if kind < 0.3:
        return data[:at] + rng.choice([b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b"\xff", b";"]) + data[at:]
    if kind < 0.6:
        return data[:at] + data[at + rng.choice([1, 1, 2, 5]) :]
    if kind < 0.9 and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return data.replace(b"\r\n", rng.choice([b"\n", b"\r", b"\r\r\n", b"\n\n"]), rng.choice([1, 2, -1]))


def cut_off(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def empty_lines(rng: Random, data: bytes) -> bytes:
    return rng.choice([b"\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" \r\n"]) + data


BROKEN: tuple[Callable[[Random, bytes], bytes], ...] = (
    *(request_lines, fields, fields, fields, chunk_frames, chunk_frames),
    *(stray_bytes, stray_bytes, cut_off, empty_lines),
)


def a_connection(rng: Random) -> bytes:
    """What one client sends: some requests behind each other, of which at most two are broken."""
    kind = rng.random()
    count = 1 if kind < 0.6 else rng.randint(2, 4) if kind < 0.99 else rng.randint(17, 40)
    requests = [a_request(rng) for _ in range(count)]
    if rng.random() < 0.65:
        for _ in range(rng.choice([1, 1, 1, 2])):
            at = rng.randrange(count)
            requests[at] = rng.choice(BROKEN)(rng, requests[at])
    return b"".join(requests)


def split_reads(rng: Random, data: bytes) -> list[bytes]:
    """The same bytes, as reads of a socket may bring them."""
    kind = rng.random()
    if kind < 0.15 and len(data) <= 500:
        return [data[at : at + 1] for at in range(len(data))]
    if kind < 0.4:  # about the ends of lines, where it matters most
        ends = [at + rng.randint(-1, 2) for at in range(min(len(data), 5000)) if data[at] == 10 and rng.random() < 0.5]
        points = sorted({at for at in ends if 0 < at < len(data)})
    else:
        points = sorted({rng.randrange(len(data)) for _ in range(rng.choice([1, 2, 5]))} - {0}) if data else []
    return [data[start:end] for start, end in zip([0, *points], [*points, len(data)], strict=True) if start < end]
