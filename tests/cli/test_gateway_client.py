"""What a pull-worker makes of the answers of gateways."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from inferry.cli.pull_wiring import GatewayClient
from inferry.durable.gateway_work import NoGateway
from inferry.durable.work_runner import WorkRefused


def play(answer: bytes, scenario: Callable[[GatewayClient], Awaitable[None]]) -> None:
    """With one gateway that gives this answer, behind one that is away."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}" % answer)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = GatewayClient(["http://127.0.0.1:1", f"http://127.0.0.1:{port}"], "the key")
            try:
                await scenario(client)
            finally:
                client.close()

    asyncio.run(main())


def test_the_gateway_that_answers_is_asked() -> None:
    async def scenario(client: GatewayClient) -> None:
        assert await client.post(b"body") == b"{}"
        assert await client.post(b"body") == b"{}"

    play(b"200 OK", scenario)


@pytest.mark.parametrize("answer", [b"413 Content Too Large", b"400 Bad Request"])
def test_a_message_that_will_never_be_accepted_is_refused(answer: bytes) -> None:
    async def scenario(client: GatewayClient) -> None:
        with pytest.raises(WorkRefused, match=answer[:3].decode()):
            await client.post(b"body")

    play(answer, scenario)


@pytest.mark.parametrize("answer", [b"503 Service Unavailable", b"500 Internal Server Error", b"403 Forbidden"])
def test_a_message_that_may_be_accepted_later_is_not_refused(answer: bytes) -> None:
    async def scenario(client: GatewayClient) -> None:
        with pytest.raises(NoGateway):
            await client.post(b"body")

    play(answer, scenario)
