"""`inferry observe` over real sockets: what passes, and what is recorded."""

import asyncio
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from typer.testing import CliRunner

from inferry.cli.main import app
from inferry.cli.observe_proxy import LateRecords, ObserveProxy
from inferry.cli.observe_wiring import MAX_BODY_BYTES
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.observed import observed_fields
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from inferry.observe.observed_call import CallDescriber
from support.upstream import DONE, chunk, role, usage

LIMIT_S = 120.0
CANARY = "the secret of the canary"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scene:
    """A server of one handler, the proxy before it, and the proxy's database."""

    def __init__(self, port: int, upstream_port: int, recorder: Recorder, database: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.upstream_port = upstream_port
        self._recorder = recorder
        self._database = database

    async def rows(self, count: int) -> list[LedgerEntry]:
        while self._recorder.accepted < count:
            await asyncio.sleep(0.005)
        assert await asyncio.to_thread(self._recorder.flush, LIMIT_S)
        with open_queries(self._database) as ledger:
            found = ledger.jobs(limit=100)
        assert len(found) == count
        return found


@asynccontextmanager
async def a_scene(directory: Path, handler: Handler) -> AsyncIterator[Scene]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    upstream_port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    database = f"sqlite:///{directory / 'observed.db'}"
    recorder = Recorder(AttemptStore(database))
    describer = CallDescriber(b"salt", DEFAULT_LANES)
    proxy = ObserveProxy(f"http://127.0.0.1:{upstream_port}", describer, recorder, SystemClock())
    loop = asyncio.get_running_loop()
    server = Server(proxy.serve, max_body_bytes=MAX_BODY_BYTES, body_timeout_s=60.0, idle_timeout_s=60.0)
    listener = await loop.create_server(lambda: Connection(server, loop), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield Scene(listener.sockets[0].getsockname()[1], upstream_port, recorder, database)
    finally:
        listener.close()
        server.abort()
        proxy.close()
        await runner.cleanup()
        await asyncio.to_thread(recorder.close)


def run(directory: Path, handler: Handler, act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with a_scene(directory, handler) as scene:
            await act(scene)

    asyncio.run(whole())


def a_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": CANARY * 200}], "user": "me"} | fields


async def echo(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {"x-method": request.method, "x-target": request.raw_path, "x-own": request.headers.get("x-own", "")}
    return web.Response(status=418, reason="Short and Stout", headers=headers, body=body)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_any_method_path_status_and_header_passes_with_its_bytes(tmp_path: Path, method: str) -> None:
    async def act(scene: Scene) -> None:
        data = bytes(range(256)) * 5000 if method in ("POST", "PUT", "PATCH") else b""
        async with (
            ClientSession() as client,
            client.request(
                method,
                f"{scene.url}/any/p%20ath?q=1&q=2",
                data=io.BytesIO(data) if data else None,
                headers={"x-own": "kept"},
            ) as response,
        ):
            assert (response.status, response.reason) == (418, "Short and Stout")
            assert response.headers["x-method"] == method
            assert response.headers["x-target"] == "/any/p%20ath?q=1&q=2"
            assert response.headers["x-own"] == "kept"
            assert await response.read() == data

    run(tmp_path, echo, act)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/admin/tenants", 403), ("/admin", 403), ("/%61dmin/workers?x=1", 403), ("//admin/keys", 403)),
        *(("/v1/../admin/keys", 403), ("/v1/load_lora_adapter", 403)),
        *(("/v1/models?path=/admin/keys", 418), ("/administration", 418)),
    ],
)
def test_the_endpoints_for_operators_are_not_passed_on(tmp_path: Path, path: str, status: int) -> None:
    async def act(scene: Scene) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        assert answer.startswith(f"HTTP/1.1 {status} ")
        assert ("--forward-admin" in answer) is (status == 403)
        writer.close()

    run(tmp_path, echo, act)


def test_a_stream_passes_piece_by_piece_and_its_times_and_tokens_are_recorded(tmp_path: Path) -> None:
    pieces = [role(), chunk("one"), chunk(" two", "stop"), usage(1234, 2), DONE]
    read = asyncio.Event

    async def act_with(released: list[asyncio.Event], scene: Scene) -> None:
        async with (
            ClientSession() as client,
            client.post(
                f"{scene.url}/v1/chat/completions",
                json=a_body(stream=True, service_tier="priority"),
                headers={"authorization": "Bearer sk-secret"},
            ) as response,
        ):
            assert response.headers["content-type"] == "text/event-stream"
            got = b""
            for number, piece in enumerate(pieces):
                released[number].set()  # the server writes a piece only after the piece before has arrived
                while len(got) < sum(map(len, pieces[: number + 1])):
                    got += await response.content.readany()
                assert got.endswith(piece)
            assert await response.content.read() == b""
        (row,) = await scene.rows(1)
        assert (row.model, row.lane, row.outcome) == ("m", "P0", Outcome.DONE)
        assert (row.prompt_tokens, row.output_tokens) == (1234, 2)
        assert row.first_token_ms is not None
        assert 0 < row.first_token_ms <= row.total_ms
        fields = observed_fields(row)
        assert fields is not None
        assert (fields.status, fields.is_estimated) == (200, False)
        assert len(fields.prefix) == len(CANARY) * 200 // 2048

    async def whole() -> None:
        released = [read() for _ in pieces]

        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for number, piece in enumerate(pieces):
                await released[number].wait()
                await response.write(piece)
            return response

        async with a_scene(tmp_path, handler) as scene:
            await act_with(released, scene)

    asyncio.run(whole())


def test_the_report_reads_what_the_proxy_has_recorded(tmp_path: Path) -> None:
    """Six calls of P0 and four of P1, with the usage that the server reports."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(body=role() + chunk("one", "stop") + usage(100, 5) + DONE, content_type="text/event-stream")

    async def act(scene: Scene) -> None:
        async with ClientSession() as client:
            for lane in ["P0"] * 6 + ["P1"] * 4:
                headers = {"x-inferry-lane": lane}
                url = f"{scene.url}/v1/chat/completions"
                async with client.post(url, json=a_body(stream=True), headers=headers) as response:
                    assert response.status == 200
                    await response.read()
        await scene.rows(10)

    run(tmp_path, handler, act)
    database = f"sqlite:///{tmp_path / 'observed.db'}"
    result = CliRunner().invoke(app, ["observe", "report", "--database", database, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["calls"] == 10
    direct, *_, whole = found["arms"]
    assert set(direct["attainment"]) >= {"P0", "P1", "all"}
    assert whole["attainment"] == dict.fromkeys(whole["attainment"], 1.0), "one at a time, on an idle engine"
    assert whole["gpu_seconds"] > 0
    assert found["before"]["gpus"] == found["after"]["gpus"] == 1
    assert CANARY not in result.output


def test_a_client_that_disconnects_ends_its_call_upstream(tmp_path: Path) -> None:
    async def whole() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk("one"))
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return response

        async with a_scene(tmp_path, handler) as scene:
            reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
            body = json.dumps(a_body(stream=True)).encode()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await reader.readuntil(b"one")
            await began.wait()
            writer.transport.abort()
            await ended.wait()
            (row,) = await scene.rows(1)
            assert row.outcome is Outcome.CANCELLED

    asyncio.run(whole())


async def answer(request: web.Request) -> web.StreamResponse:
    await request.read()
    counts = {"prompt_tokens": 7, "completion_tokens": 3}
    return web.json_response({"choices": [{"message": {"content": CANARY}}], "usage": counts})


def test_nothing_of_prompts_answers_and_keys_is_recorded(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        async with ClientSession() as client:
            for key in ("sk-secret-1", "sk-secret-1", "sk-secret-2"):
                headers = {"authorization": f"Bearer {key}"}
                async with client.post(f"{scene.url}/v1/chat/completions", json=a_body(), headers=headers) as response:
                    assert CANARY in await response.text()
        rows = await scene.rows(3)
        assert len({row.tenant for row in rows}) == 2
        assert len({row.run_id for row in rows}) == 1
        assert len({row.template_id for row in rows}) == 1
        assert all((row.prompt_tokens, row.output_tokens) == (7, 3) for row in rows)

    run(tmp_path, answer, act)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert all(word not in content for word in (b"canary", b"sk-secret", b'"me"'))


def test_a_server_that_cannot_be_reached_is_a_502_and_one_lost_in_the_middle_a_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole() -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"part")
            assert request.transport is not None
            request.transport.abort()
            return response

        async with a_scene(tmp_path, handler) as scene, ClientSession() as client:
            with pytest.raises(Exception, match=r"payload|reset|closed"):
                async with client.post(f"{scene.url}/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                    await response.read()

        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            database = f"sqlite:///{tmp_path / 'other.db'}"
            recorder = Recorder(AttemptStore(database))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            proxy = ObserveProxy(url, CallDescriber(b"s", DEFAULT_LANES), recorder, SystemClock())
            loop = asyncio.get_running_loop()
            server = Server(proxy.serve, max_body_bytes=1000, body_timeout_s=60.0, idle_timeout_s=60.0)
            listener = await loop.create_server(lambda: Connection(server, loop), "127.0.0.1", 0)
            port = listener.sockets[0].getsockname()[1]
            async with ClientSession() as client, client.get(f"http://127.0.0.1:{port}/v1/models") as response:
                assert response.status == 502
                assert await response.text() == f"the upstream server {url} cannot be reached"
            async with ClientSession() as client, client.get(f"http://127.0.0.1:{port}/v1/models") as response:
                assert response.status == 502
            assert [one.getMessage().partition(" be reached")[0] for one in caplog.records] == [
                f"the upstream server {url} cannot"
            ]
            listener.close()
            server.abort()
            proxy.close()
            await asyncio.to_thread(recorder.close)

    asyncio.run(whole())


def test_a_call_whose_server_hangs_up_on_a_reused_connection_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferry.cli.observe_proxy.MAX_IDLE_S", inf)
    bodies: list[bytes] = []
    connections: set[asyncio.BaseTransport | None] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.read())
        connections.add(request.transport)
        if len(bodies) > 2:
            assert request.transport is not None
            request.transport.abort()
        return web.Response()

    async def act(scene: Scene) -> None:
        async with ClientSession() as client:
            for status in (200, 200, 502):
                async with client.post(f"{scene.url}/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                    assert response.status == status
        assert len(bodies) == 3
        assert len(connections) == 1

    run(tmp_path, handler, act)


def test_rows_are_recorded_after_one_that_could_not_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("the row is broken")

    records, made = LateRecords(), threading.Event()
    records.put(fails)
    records.put(made.set)
    records.close()
    assert made.is_set()
    assert records.failed == 1
    assert "the metadata of a call was not recorded (1 since the start)" in caplog.text
