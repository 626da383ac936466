"""Files over HTTP: uploads stream to storage, and tenants see their own only."""

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from inferry.ingress.stored_work import upload
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get
from support.waiting import until


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path) as gateway:
        yield gateway


def client(gateway: Serving, tenant: str = "acme") -> OpenAI:
    headers = {"x-inferry-tenant": tenant}
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, default_headers=headers)


def form(content: bytes, *, purpose: str = "batch", name: str = "in.jsonl", before: bytes = b"") -> bytes:
    return (
        before
        + b'--b\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n' % (name.encode(), content)
        + b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n%b\r\n--b--\r\n' % purpose.encode()
    )


def head(length: int, *lines: str) -> bytes:
    fixed = ["POST /v1/files HTTP/1.1", "host: x", "content-type: multipart/form-data; boundary=b"]
    return "\r\n".join([*fixed, f"content-length: {length}", *lines]).encode() + b"\r\n\r\n"


def send(gateway: Serving, *pieces: bytes) -> tuple[int, Any]:
    """Status and body of the answer to raw bytes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except OSError:
            pass  # it was refused before its end
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.partition(b"\r\n\r\n")[2].endswith(b"}"):
            part = sock.recv(65_536)
            if not part:
                break
            answer += part
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


def test_a_file_is_uploaded_listed_read_and_deleted_with_the_official_client(gateway: ScriptedGateway) -> None:
    content = b"".join(b'{"line": %d}\n' % number for number in range(60_000))
    with client(gateway) as api:
        file = api.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        assert (file.bytes, file.purpose, file.filename, file.status) == (
            len(content),
            "batch",
            "in.jsonl",
            "processed",
        )
        assert file.expires_at == file.created_at + 30 * 86_400
        assert api.files.retrieve(file.id) == file
        assert api.files.content(file.id).read() == content
        assert [one.id for one in api.files.list()] == [file.id]
        assert api.files.delete(file.id).deleted
        assert not api.files.list().data
        with pytest.raises(openai.NotFoundError):
            api.files.content(file.id)
        with pytest.raises(openai.NotFoundError):
            api.files.delete(file.id)


def test_files_are_listed_in_pages_and_by_purpose(gateway: ScriptedGateway) -> None:
    with client(gateway) as api:
        ids = [api.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch").id for n in range(5)]
        other = api.files.create(file=("u", b"x"), purpose="user_data").id
        assert [one.id for one in api.files.list(limit=2, order="asc")] == [*ids, other]
        assert [one.id for one in api.files.list(purpose="batch")] == ids[::-1]
        assert [one.id for one in api.files.list(after=ids[1], order="asc", limit=1).data] == [ids[2]]


def test_a_file_of_another_tenant_is_unknown(gateway: ScriptedGateway) -> None:
    with client(gateway) as mine, client(gateway, "other") as theirs:
        file = mine.files.create(file=("a", b"secret"), purpose="user_data")
        for ask in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file.id)
        assert not theirs.files.list().data
        assert not theirs.files.list(after=file.id).data
        assert mine.files.content(file.id).read() == b"secret"


def test_a_file_expires_when_its_client_says(gateway: ScriptedGateway) -> None:
    with client(gateway) as api:
        after = {"anchor": "created_at", "seconds": 3600}
        file = api.files.create(file=("a", b"x"), purpose="batch", expires_after=after)  # type: ignore[arg-type]
        assert file.expires_at == file.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="between 3600 and 2592000"):
            api.files.create(file=("a", b"x"), purpose="batch", expires_after={**after, "seconds": 5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form(b"x", purpose="fine-tune"), "`purpose` must be one of batch, user_data"),
        (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--', "the form has no `file`"),
        (form(b"x")[:-8], "the multipart body is incomplete"),
        (b"nothing of the kind", "the multipart body is incomplete"),
        (form(b"x", before=form(b"y")[:-7]), "more than one `file`"),
        (form(b"x", before=b'--b\r\ncontent-disposition: form-data; name="z"\r\n\r\n1\r\n'), "unknown form field"),
    ],
)
def test_an_invalid_form_is_refused_and_leaves_nothing(gateway: ScriptedGateway, body: bytes, message: str) -> None:
    status, answer = send(gateway, head(len(body)), body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert message in answer["error"]["message"]
    assert get(gateway.url, "/v1/files")[2]["data"] == []
    assert used_bytes(gateway) == 0


def used_bytes(gateway: ScriptedGateway, tenant: str = "default") -> int:
    async def swept() -> int:
        storage = gateway.service.storage
        await storage.sweeper.sweep()
        return await storage.executor.run(storage.files._store.used_bytes, tenant)  # type: ignore[attr-defined]

    return gateway.run(swept())


def test_other_bodies_and_bodies_that_are_too_large_are_refused_on_their_head(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, config={"storage": {"max_file_bytes": 1000}}) as gateway:
        status, answer = send(gateway, head(10**9))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        json_head = (
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        assert send(gateway, json_head)[0] == 400
        assert send(gateway, b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")[0] == 400
        body = form(b"x" * 1001)
        status, answer = send(gateway, head(len(body)), body)
        assert (status, answer["error"]["message"]) == (413, "the file exceeds 1000 bytes")


def test_uploads_are_refused_before_the_body_without_a_key_and_without_storage(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, config={"auth": {"mode": "on"}}) as gateway:
        assert send(gateway, head(10_000_000))[0] == 401
    with ScriptedGateway(tmp_path, config={"storage": {"store": "never"}}) as gateway:
        status, answer = send(gateway, head(10_000_000))
        assert (status, answer["error"]["code"]) == (403, "storage_disabled")
        assert get(gateway.url, "/v1/files")[0] == 403


def test_a_tenant_stores_no_more_than_its_quota(tmp_path: Path) -> None:
    quota = 1_000_000
    config = {"storage": {"max_bytes_per_tenant": quota}}
    with ScriptedGateway(tmp_path, config=config) as gateway, client(gateway) as api:
        first = api.files.create(file=("a", b"x" * 600_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            api.files.create(file=("b", b"x" * 600_000), purpose="batch")
        assert refused.value.status_code == 413
        assert refused.value.code == "storage_quota_exceeded"
        with client(gateway, "other") as other:
            other.files.create(file=("b", b"x" * 600_000), purpose="batch")
        api.files.delete(first.id)
        assert used_bytes(gateway, "acme") == 0
        api.files.create(file=("b", b"x" * 600_000), purpose="batch")


def test_a_slow_store_stops_the_client_and_not_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store hangs, no more than the buffer and the sockets take is accepted."""
    gate = threading.Event()
    with ScriptedGateway(tmp_path) as gateway:
        store = gateway.service.storage.files._store
        append = store.append

        def slow(*args: Any) -> None:
            gate.wait(120)
            append(*args)

        monkeypatch.setattr(store, "append", slow)
        size = 64 * 1024 * 1024
        body = form(b"x" * size)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
            sock.sendall(head(len(body)))
            sock.setblocking(False)
            sent = 0
            stalled_at = time.monotonic()
            while time.monotonic() < stalled_at + 1.0:
                try:
                    sent += sock.send(body[sent : sent + 65_536])
                    stalled_at = time.monotonic()
                except BlockingIOError:
                    time.sleep(0.01)
            assert sent < size // 2
            assert get(gateway.url, "/health")[0] == 200
            gate.set()
            sock.setblocking(True)
            sock.sendall(body[sent:])
            answer = sock.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 200")
        assert get(gateway.url, "/v1/files")[2]["data"][0]["bytes"] == size


def test_an_upload_that_breaks_off_leaves_nothing(gateway: ScriptedGateway) -> None:
    body = form(b"x" * 3_000_000)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
        sock.sendall(head(len(body)) + body[:2_000_000])
        until(lambda: used_bytes(gateway) > 0)
    until(lambda: used_bytes(gateway) == 0)
    assert get(gateway.url, "/v1/files")[2]["data"] == []


def test_uploads_in_chunks_and_pipelined_ones_are_read(gateway: ScriptedGateway) -> None:
    body = form(b"y" * 300_000)
    chunked = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    chunked += b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
        sock.sendall(
            chunked + head(len(body)) + body + b"GET /v1/files HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answer = b""
        while part := sock.recv(65_536):
            answer += part
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"bytes":300000') == 4


def test_a_body_that_stops_arriving_times_out_and_a_steady_one_does_not(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, config={"server": {"body_timeout_s": 0.5}}) as gateway:
        body = form(b"x" * 3_000_000)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
            sock.sendall(head(len(body)) + body[:300_000])
            answer = sock.recv(65_536)
        assert b"the body did not arrive" in answer
        until(lambda: used_bytes(gateway) == 0)


def test_form_fields_have_a_limit(gateway: ScriptedGateway) -> None:
    body = form(b"x", purpose="p" * (upload.MAX_FIELD_BYTES + 1))
    status, answer = send(gateway, head(len(body)), body)
    assert (status, answer["error"]["message"]) == (400, "`purpose` is too long")


def test_wrong_methods_and_paths_are_named(gateway: ScriptedGateway) -> None:
    for method, path, status in (
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/files/x", 405),
        ("GET", "/v1/files/x/y", 404),
    ):
        raw = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        assert send(gateway, raw)[0] == status
    assert get(gateway.url, "/v1/files?limit=0")[0] == 400
    assert get(gateway.url, "/v1/files?order=up")[0] == 400
    assert get(gateway.url, "/v1/files?what=1")[0] == 400
