"""HTTP requests with one part broken: lengths, chunks, headers, targets, bodies, first lines."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

Header = tuple[bytes, bytes]


class Sent(NamedTuple):
    """A request, before it is bytes."""

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes
    version: bytes = b"HTTP/1.1"

    def wire(self) -> bytes:
        lines = [b"%b %b %b" % (self.method, self.target, self.version)]
        lines += [b"%b: %b" % one for one in self.headers]
        return b"\r\n".join([*lines, b"", b""]) + self.body


Attempt = tuple[str, str, Any]
"""Method, target and body of a request."""


def valid(rng: Random, key: str, admin_key: str, attempts: Sequence[Attempt] = ()) -> Sent:
    """One of what clients really send, or one of `attempts`."""
    message = {"role": "user", "content": rng.choice(["hi", "x" * 300, "é\U0001f600", ""])}
    chat = {"model": "m", "messages": [message], "max_tokens": 3}
    method, target, body = rng.choice(
        [
            *attempts,
            *_of_other_apis(chat),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/chat/completions", {**chat, "stream": True}),
            ("POST", "/v1/chat/completions?x=1", {**chat, "temperature": 0, "seed": 3}),
            ("POST", "/v1/completions", {"model": "m", "prompt": [1, 2, 3]}),
            ("POST", "/v1/completions", {"model": "m", "prompt": "a", "stop": ["b"]}),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/m", None),
            ("GET", "/v1/runs?limit=3&status=idle", None),
            ("GET", "/v1/runs/mine?steps=5", None),
            ("GET", "/v1/runs/theirs", None),
            ("DELETE", "/v1/runs/theirs?wait_ms=5", None),
            ("POST", "/v1/runs/theirs/finish", None),
            ("GET", "/admin/workers", None),
            ("GET", "/admin/keys?tenant=acme&status=valid", None),
            ("PUT", "/admin/tenants/made-up", {"max_lane": "P1", "tokens_per_minute": 5}),
            ("POST", "/admin/keys/nobody/rotate", {"grace_s": 5}),
            ("GET", "/health", None),
            ("GET", "/metrics", None),
            ("GET", "/openapi.json", None),
        ]
    )
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    secret = admin_key if target.startswith("/admin") else key
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {secret}".encode())]
    if body is not None:
        headers.append((b"content-length", b"%d" % len(data)))
        is_upload = isinstance(body, bytes)
        headers.append((b"content-type", b"multipart/form-data; boundary=b" if is_upload else b"application/json"))
    if rng.random() < 0.3:
        headers.append(
            rng.choice([(b"x-inferry-run-id", b"mine"), (b"x-inferry-lane", b"P2"), (b"x-request-id", b"q-1")])
        )
    return Sent(method.encode(), target.encode(), headers, data)


UPLOAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"a"}}\n\r\n--b--\r\n'
)


def _of_other_apis(chat: dict[str, Any]) -> list[Attempt]:
    """Requests of Messages, Responses, files, batches, async jobs and pooled tasks."""
    message = {**chat, "stop_sequences": ["b"], "system": "be brief"}
    prefilled = {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "So"}]}
    response = {"model": "m", "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 3}
    return [
        ("POST", "/v1/messages", message),
        ("POST", "/v1/messages", {**message, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 9}}),
        ("POST", "/v1/messages", prefilled),
        ("POST", "/v1/messages/count_tokens", {"model": "m", "messages": chat["messages"]}),
        ("POST", "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": message}]}),
        ("GET", "/v1/messages/batches?limit=3&after_id=none", None),
        ("GET", "/v1/messages/batches/none/results", None),
        ("POST", "/v1/responses", response),
        ("POST", "/v1/responses", {**response, "stream": True, "store": False}),
        ("POST", "/v1/responses", {**response, "background": True, "previous_response_id": "resp_none"}),
        ("GET", "/v1/responses/resp_none?stream=true&starting_after=1", None),
        ("GET", "/v1/responses/resp_none/input_items?limit=2&order=asc", None),
        ("POST", "/v1/files", UPLOAD),
        ("GET", "/v1/files?limit=2&purpose=batch", None),
        ("DELETE", "/v1/files/file-none", None),
        ("POST", "/v1/batches", {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}),
        ("POST", "/v1/batches/none/cancel", None),
        ("POST", "/v1/jobs", {"endpoint": "/v1/completions", "body": {"model": "m", "prompt": "a"}}),
        ("GET", "/v1/jobs/none/deliveries", None),
        ("POST", "/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
        ("POST", "/v1/classify", {"model": "m", "input": ["a", "b"]}),
        ("POST", "/v1/rerank", {"model": "m", "query": "a", "documents": ["b"]}),
        ("POST", "/v1/score", {"model": "m", "text_1": "a", "text_2": ["b"]}),
    ]


# -- what is broken in a request -------------------------------------------------------------------------------------


def lengths(rng: Random, sent: Sent) -> Sent:
    size = len(sent.body)
    value = rng.choice(
        [
            b"-1",
            b"+5",
            b"0x10",
            b"1e3",
            b"",
            b" ",
            b"00000000005",
            b"99999999999999999999999",
            b"9" * 400,
            b"18446744073709551616",
            b"9223372036854775807",
            b"%d" % (size + 7),
            b"%d" % max(0, size - 3),
            b"5, 5",
            b"5 5",
            b"\xb2",
            b"1_000",
            b"%d\x00" % size,
        ]
    )
    headers = [one for one in sent.headers if one[0] != b"content-length" or rng.random() < 0.2]
    return sent._replace(headers=[*headers, (b"Content-Length", value)])


def chunks(rng: Random, sent: Sent) -> Sent:
    body = sent.body or b"{}"
    half = len(body) // 2
    pieces = [body[:half], body[half:]]
    good = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces if one)
    broken = rng.choice(
        [
            good + b"0\r\n\r\n",
            good,
            good + b"0\r\nx-trailer: 1\r\nauthorization: Bearer no\r\n\r\n",
            b"zz\r\n" + good,
            b"-1\r\n" + good + b"0\r\n\r\n",
            b"ffffffffffffffffffff\r\n" + good,
            b"7fffffffffffffff\r\n" + good,
            good.replace(b"\r\n", b"\n") + b"0\n\n",
            good.replace(b"\r\n", b"\r", 1) + b"0\r\n\r\n",
            b"5;" + b"e" * 70_000 + b"\r\n" + good,
            b"5;a=\x00\r\nhello\r\n0\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
            b" 5\r\nhello\r\n0\r\n\r\n",
            b"0\r\n\r\n" + sent.wire(),
        ]
    )
    kept = [one for one in sent.headers if one[0] != b"content-length" or rng.random() < 0.15]
    coding = rng.choice(
        [b"chunked"] * 5
        + [b"Chunked", b"chunked, identity", b"identity", b"gzip, chunked", b"\x0bchunked", b"xchunked"]
    )
    return sent._replace(headers=[*kept, (b"transfer-encoding", coding)], body=broken)


def header_lines(rng: Random, sent: Sent) -> Sent:
    odd: list[Header] = [
        (b"authorization", b"Bearer ifk_0000000000_" + b"0" * 43),
        (b"authorization", b"Basic Zm9vOmJhcg=="),
        (b"x-api-key", b"ifk_x_y"),
        (b"x-inferry-tenant", rng.choice([b"globex", b"", b"a b", b"\xff\xfe", b"acme"])),
        (
            b"x-inferry-run-id",
            rng.choice(
                [b"a\r\n b", b"a\r\n\tx-injected: 1", b"%0d%0ax-injected:%201", b"\xc3\xa9", b"x" * 257, b"a\x00b", b""]
            ),
        ),
        (
            b"x-request-id",
            rng.choice(
                [b"a\r\n folded", b'"><script>', b"x" * 5000, b"\x7f", b"%0d%0aset-cookie:a=b", b"\xe2\x80\xa8"]
            ),
        ),
        (b"x-inferry-lane", rng.choice([b"p0", b"P3", b"P0, P1", b"\x00"])),
        (b"x-inferry-deadline-ms", rng.choice([b"-1", b"1e9", b"999999999999", b"9" * 50, b"\xd9\xa3", b"0"])),
        (b"x-inferry-linger-ms", rng.choice([b"999999999999", b"x"])),
        (b"x-claude-code-session-id", rng.choice([b"../..", b"a/b", b"\xff", b"x" * 300])),
        (b"expect", rng.choice([b"100-continue", b"200-maybe", b""])),
        (b"upgrade", rng.choice([b"websocket", b"h2c", b"\x00"])),
        (b"connection", rng.choice([b"upgrade", b"close, upgrade", b"keep-alive", b"content-length, host"])),
        (b"host", rng.choice([b"evil.example", b"", b"a\x00", b"127.0.0.1:99999"])),
        (b"x" * 70_000, b"1"),
        (b"x-long", b"v" * 70_000),
        (b"bad name", b"1"),
        (b"no-colon\r\nnext", b"1"),
        (b"", b"1"),
        (b"x-nul", b"a\x00b"),
        (b"x-cr", b"a\rb"),
        (b"x-lf", b"a\nb: c"),
        (b"content-encoding", b"gzip"),
        (b"cookie", b"a=b; " * 100),
    ]
    headers = list(sent.headers)
    for _ in range(rng.randint(1, 3)):
        headers.insert(rng.randint(0, len(headers)), rng.choice([*odd, rng.choice(sent.headers)]))
    if rng.random() < 0.03:
        headers += [(b"x-%d" % number, b"1") for number in range(3000)]
    return sent._replace(headers=headers)


_IDS = (
    *(b"%00", b"%0d%0ax-injected:%201", b"%2e%2e%2fadmin%2fkeys", b"..%2f..", b"%252e", b"%zz", b"%"),
    *(b"%c0%af", b"%ff", b"%ed%a0%80", b"\xc3\xa9", b"a" * 9000, b"theirs%00", b"theirs/", b"theirs//"),
    *(b"theirs;x", b"Theirs", b"%74heirs", b".", b"mine/finish/finish", b"mine%2ffinish"),
    *(b"%F0%9F%98%80", b"\\..\\x", b"'%20or%201=1--", b"*", b"mine?steps=999999999999"),
)
_QUERIES = (
    *(b"?", b"?limit=-1", b"?limit=0", b"?limit=201", b"?limit=%00", b"?limit=1&limit=2"),
    *(b"?cursor=AAAA", b"?cursor=bnVsbA==", b"?cursor=MWUzMDk=", b"?cursor=LTFlMzA4", b"?since=1e9"),
    *(b"?since=999999999999.999999999", b"?since=%d9%a3", b"?&&&==&=", b"?a[]=1", b"?status=IDLE"),
    *(b"?parent=%27", b"?wait_ms=10001", b"?wait_ms=0", b"?" + b"a=b&" * 2000, b"?\xff\xfe", b"?%ff=%fe"),
    *(b"#frag", b"?steps=1001"),
)


def targets(rng: Random, sent: Sent) -> Sent:
    # Whose key it has says which paths it gets deeper into.
    is_admin = sent.target.startswith(b"/admin")
    own = (
        [b"/admin/keys", b"/admin/tenants", b"/admin/workers"]
        if is_admin
        else [b"/v1/runs", b"/v1/runs", b"/v1/models"]
    )
    some = rng.choice(_IDS)
    tail = rng.choice([b"", b"", b"/finish", b"/rotate", b"/drain", b"/readmit"])
    odd = [b"//v1/models", b"/v1/../admin/keys", b"/V1/models", b"/v1/runs%2f" + some, b"/admin", b"/%61dmin/keys"]
    odd += [
        b"http://evil.example/v1/models",
        b"*",
        b"",
        b"v1/models",
        b"/\x00",
        b"/a b",
        b"/\r\nx-injected: 1",
        b"a.b:443",
    ]
    generate = [
        b"%b/%b%b" % (rng.choice(own), some, tail),
        b"%b/%b%b" % (rng.choice(own), some, rng.choice(_QUERIES)),
        rng.choice([*own, sent.target]) + rng.choice(_QUERIES),
        rng.choice(odd),
    ]
    method = rng.choice([sent.method, sent.method, b"GET", b"DELETE", b"POST", b"PUT"])
    return sent._replace(method=method, target=rng.choice(generate))


FIELDS = (
    *(b"max_tokens", b"temperature", b"seed", b"n", b"top_k", b"stop", b"logit_bias", b"stop_token_ids", b"stream"),
    *(b"stream_options", b"user", b"tools", b"tool_choice", b"service_tier", b"response_format", b"messages", b"model"),
)


VALUES = (
    *(b"1e999", b"-1e999", b"9" * 5000, b"-0", b"0.1e-9999", b"NaN", b"Infinity", b'"\\ud83d"', b"[[]]", b'{"a":{}}'),
    *(b"true", b'""', b"null", b"1.5", b"-1", b"18446744073709551616", b'"' + b"v" * 3000 + b'"', b"[1,null]"),
)


def bodies(rng: Random, sent: Sent) -> Sent:
    start = b'{"model":"m","messages":[{"role":"user","content":"a"}]'
    depth = rng.choice([50, 900, 3000, 30_000])
    names = [b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"m\\u0000"', b"null", b"{}", b'"' + b"m" * 60_000 + b'"']
    body = rng.choice(
        [
            sent.body[: rng.randint(0, len(sent.body))],
            sent.body + rng.choice([b"}", b"\x00", b" " * 5000, sent.body, b"\xef\xbb\xbf"]),
            b"\xef\xbb\xbf" + sent.body,
            sent.body.decode("latin-1").encode("utf-16"),
            sent.body.replace(b'"m"', rng.choice(names)),
            start + b',"x":' + b"[" * depth + b"]" * depth + b"}",
            b'{"model":"m","messages":[{"role":"user","content":' + b'[{"type":' * (depth // 5),
            b'{"model":"m","prompt":' + b"[" * depth + b"1" + b"]" * depth + b"}",
            *(start + b',"%b":%b}' % (rng.choice(FIELDS), rng.choice(VALUES)) for _ in range(8)),
            start + b',"model":"other","messages":[]}',
            start + b',"messages":[{"role":"user","content":"\\u0000\\u0001"}]}',
            b'{"model":"m","prompt":[' + b"1," * 20_000 + b"1]}",
            b'{"model":"m","prompt":%b}' % rng.choice([b"[-1]", b"[1.5]", b'""', b"[true]", b"[[1]]", b'["a"]', b"[]"]),
            b'{"model":"m","prompt":"' + b"x" * 120_000 + b'"}',
            b'"' + b"\\u0041" * 5000 + b'"',
            rng.randbytes(rng.randint(1, 400)),
        ]
    )
    headers = [one for one in sent.headers if one[0] != b"content-length"]
    target = rng.choice([sent.target, b"/v1/chat/completions", b"/v1/completions", b"/admin/keys", b"/admin/tenants/t"])
    method = b"PUT" if target.endswith(b"/t") else b"POST"
    return Sent(method, target, [*headers, (b"content-length", b"%d" % len(body))], body)


def first_lines(rng: Random, sent: Sent) -> Sent:
    method = rng.choice(
        [
            sent.method,
            sent.method.lower(),
            b"CONNECT",
            b"TRACE",
            b"OPTIONS",
            b"PATCH",
            b"HEAD",
            b"PRI",
            b"BREW",
            b"",
            b"G\x00T",
            b"GET ",
        ]
    )
    version = rng.choice(
        [
            b"HTTP/1.1",
            b"HTTP/1.0",
            b"HTTP/0.9",
            b"HTTP/2.0",
            b"HTTP/1.9",
            b"HTTP/9999.1",
            b"http/1.1",
            b"HTTP/1.1 ",
            b"",
            b"ICE/1.0",
            b"RTSP/1.0",
        ]
    )
    return sent._replace(method=method, version=version)


def untouched(rng: Random, sent: Sent) -> Sent:
    return sent
