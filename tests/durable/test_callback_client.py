"""Callbacks over real sockets: to checked addresses only, within limits, without following redirects."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import NamedTuple

import pytest

from inferry.durable.callback_client import MAX_HEAD_BYTES, CallbackClient, CallbackFailed, SystemResolver
from inferry.durable.callback_policy import CallbackPolicy

LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


class Requests(NamedTuple):
    """A server's port, and the heads and bodies that arrived."""

    port: int
    arrived: list[bytes]


def policy(timeout_s: float = 30.0) -> CallbackPolicy:
    return CallbackPolicy(allow_http=True, allowed_networks=LOOPBACK, timeout_s=timeout_s)


def a_client(rules: CallbackPolicy, *addresses: str, tls: ssl.SSLContext | None = None) -> CallbackClient:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses or ["127.0.0.1"])

    return CallbackClient(rules, resolve, tls or ssl.create_default_context())


@asynccontextmanager
async def a_server(answer: bytes | Answer = OK, tls: ssl.SSLContext | None = None) -> AsyncIterator[Requests]:
    arrived: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            arrived.append(head + await reader.readexactly(length))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Requests(server.sockets[0].getsockname()[1], arrived)
    finally:
        server.close()


def error_of(work: Callable[[], Awaitable[object]]) -> str:
    async def run() -> str:
        with pytest.raises(CallbackFailed) as failed:
            await work()
        return failed.value.code

    return asyncio.run(run())


def test_the_request_has_the_name_of_the_host_the_headers_and_the_body() -> None:
    async def run() -> None:
        async with a_server() as server:
            url = f"http://hooks.example:{server.port}/in?token=1"
            assert await a_client(policy()).post(url, {"webhook-id": "job_1"}, b'{"a":1}') == 204
            head, _, body = server.arrived[0].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /in?token=1 HTTP/1.1"
            assert b"host: hooks.example:%d" % server.port in lines
            assert b"webhook-id: job_1" in lines
            assert b"content-length: 7" in lines
            assert body == b'{"a":1}'

    asyncio.run(run())


def test_a_redirect_is_reported_and_not_followed() -> None:
    async def run() -> None:
        async with a_server() as other:
            head = b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:%d/\r\n\r\n" % other.port
            async with a_server(head) as server:
                assert await a_client(policy()).post(f"http://hooks.example:{server.port}/", {}, b"{}") == 307
                assert len(server.arrived) == 1
            assert other.arrived == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/2 200 OK\r\n\r\n",
        b"200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10,
    ],
)
def test_a_response_without_a_valid_head_of_limited_size_is_none(answer: bytes) -> None:
    async def run() -> None:
        async with a_server(answer) as server:
            await a_client(policy()).post(f"http://hooks.example:{server.port}/", {}, b"{}")

    assert error_of(run) == "response"


def test_interim_responses_are_skipped() -> None:
    async def run() -> None:
        async with a_server(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n") as server:
            assert await a_client(policy()).post(f"http://hooks.example:{server.port}/", {}, b"{}") == 200

    asyncio.run(run())


def test_a_receiver_that_drips_its_answer_is_given_up() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def run() -> None:
        async with a_server(drip) as server:
            await a_client(policy(timeout_s=0.3)).post(f"http://hooks.example:{server.port}/", {}, b"{}")

    assert error_of(run) == "timeout"


def test_a_large_body_of_a_response_is_not_read() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def run() -> None:
        async with a_server(pour) as server:
            assert await a_client(policy()).post(f"http://hooks.example:{server.port}/", {}, b"{}") == 200

    asyncio.run(run())


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("::ffff:127.0.0.1",), ("8.8.8.8", "169.254.169.254")])
def test_a_host_with_a_forbidden_address_is_not_connected_to(addresses: tuple[str, ...]) -> None:
    arrived: list[list[bytes]] = []

    async def run() -> None:
        async with a_server() as server:
            arrived.append(server.arrived)
            client = a_client(CallbackPolicy(allow_http=True), *addresses)
            await client.post(f"http://hooks.example:{server.port}/", {}, b"{}")

    assert error_of(run) == "forbidden"
    assert arrived == [[]]


def test_a_name_that_is_rebound_after_the_check_gains_nothing() -> None:
    """The first lookup gives an allowed address, every later one a forbidden one. The connection uses the first."""
    answers = ["127.0.0.1", "127.0.0.2"]
    looked_up: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        looked_up.append(host)
        return [answers[min(len(looked_up), len(answers)) - 1]]

    rules = CallbackPolicy(allow_http=True, allowed_networks=(ip_network("127.0.0.1/32"),))
    client = CallbackClient(rules, resolve, ssl.create_default_context())

    async def run() -> None:
        async with a_server() as server:
            url = f"http://rebound.example:{server.port}/"
            assert await client.post(url, {}, b"{}") == 204
            assert looked_up == ["rebound.example"], "one lookup per attempt"
            with pytest.raises(CallbackFailed, match="forbidden"):
                await client.post(url, {}, b"{}")
            assert len(server.arrived) == 1

    asyncio.run(run())


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async def run() -> None:
        async with a_server() as server:
            client = a_client(policy(), "127.0.0.99", "127.0.0.1")
            assert await client.post(f"http://hooks.example:{server.port}/", {}, b"{}") == 204

    asyncio.run(run())


def test_no_address_no_listener_and_no_resolver() -> None:
    async def none(host: str, port: int) -> list[str]:
        return []

    async def run() -> None:
        await CallbackClient(policy(), none, ssl.create_default_context()).post("http://hooks.example/", {}, b"{}")

    async def unused_port() -> None:
        async with a_server() as server:
            port = server.port
        await a_client(policy()).post(f"http://hooks.example:{port}/", {}, b"{}")

    assert error_of(run) == "dns"
    assert error_of(unused_port) == "connect"


def test_the_systems_resolver_reads_numbers_in_every_spelling_so_that_the_check_sees_them() -> None:
    resolver = SystemResolver()
    try:
        for host in ("127.1", "0x7f000001", "2130706433", "localhost"):
            client = CallbackClient(CallbackPolicy(allow_http=True), resolver, ssl.create_default_context())
            url = f"http://{host}:9/"
            assert error_of(lambda client=client, url=url: client.post(url, {}, b"{}")) == "forbidden"  # type: ignore[misc]
    finally:
        resolver.close()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of hooks.example that signs itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    made, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return made, key


@pytest.mark.parametrize(
    ("host", "is_trusted", "outcome"),
    [("hooks.example", True, 204), ("other.example", True, "tls"), ("hooks.example", False, "tls")],
)
def test_tls_verifies_the_name_though_the_connection_goes_to_an_address(
    certificate: tuple[Path, Path], host: str, is_trusted: bool, outcome: int | str
) -> None:
    made, key = certificate
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made, key)
    trusting = ssl.create_default_context(cafile=str(made) if is_trusted else None)

    async def run() -> int | str:
        async with a_server(tls=serving) as server:
            try:
                return await a_client(policy(), tls=trusting).post(f"https://{host}:{server.port}/", {}, b"{}")
            except CallbackFailed as failed:
                return failed.code

    assert asyncio.run(run()) == outcome
