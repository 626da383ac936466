"""A link that is closed before the owner has answered leaves no connection behind."""

import asyncio
from pathlib import Path

import pytest

from inferry.domain.clock import SystemClock
from inferry.workers.remote.owner_link import IngressConnection, OwnerAddress, OwnerLink


@pytest.mark.plain
def test_a_link_that_is_closed_during_the_greeting_closes_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "owner.sock"
    opened: asyncio.Queue[IngressConnection] = asyncio.Queue()

    class Link(OwnerLink):
        async def _connect(self, connection: IngressConnection) -> None:
            await super()._connect(connection)
            opened.put_nowait(connection)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(say_nothing, path)
        link = Link(OwnerAddress(path), SystemClock())
        link.start()
        connection = await opened.get()
        await link.close()
        assert connection.link is None, "what the owner says later opens no closed link"
        assert connection._transport is not None
        assert connection._transport.is_closing()
        server.close()

    asyncio.run(main())
