"""Who may connect to the owner, and what frames both ends accept."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from contracts.worker_calls import a_call, receive
from inferry.cluster import frames, handshake, link, owner_server
from inferry.domain.clock import SystemClock
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.workers.remote.owner_link import OwnerAddress, OwnerLink
from inferry.workers.remote.worker import RemoteWorker
from support.owner import running_owner
from support.scripted_worker import ScriptedWorker
from support.waiting import async_until


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


def a_worker() -> ScriptedWorker:
    return ScriptedWorker(words=("one", " two"))


# -- who may connect -------------------------------------------------------------------------------------------------


async def _refused(address: OwnerAddress) -> None:
    outsider = OwnerLink(address, SystemClock())
    error = await outsider._connect_once()
    assert error is not None
    assert not outsider.is_connected


def test_other_hosts_connect_with_the_secret_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            with pytest.raises(ValueError, match="need a secret"):
                await owner_server.OwnerServer(owner.gateway, owner.owner).listen_tcp("127.0.0.1", 0)
            server = owner_server.OwnerServer(owner.gateway, owner.owner, secret=b"secret", epoch=3)
            port = await server.listen_tcp("127.0.0.1", 0)
            for secret in (None, b"other"):
                await _refused(OwnerAddress(None, "127.0.0.1", port, secret))
            assert not server.connections
            member = OwnerLink(OwnerAddress(None, "127.0.0.1", port, b"secret", epoch=3), SystemClock())
            member.start()
            await member.wait_connected()
            assert member.catalog is not None
            remote = RemoteWorker("owner", member, member.catalog.served[0], SystemClock())
            assert isinstance((await receive(remote, a_call("j"))).ends["j"], Done)
            await member.close()
            await server.close()

    run(scenario())


def test_a_forwarded_request_is_refused_where_the_owner_does_not_prove_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            await owner.stop()
            await owner.listen(epoch=4)
            stale = OwnerLink(OwnerAddress(owner.path, epoch=5), SystemClock())
            with pytest.raises(OSError, match="epoch is over"):
                await stale.open_http("127.0.0.1", asyncio.Protocol)

    run(scenario())


def test_an_owner_that_does_not_know_the_secret_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            server = owner_server.OwnerServer(owner.gateway, owner.owner, secret=b"guess")
            port = await server.listen_tcp("127.0.0.1", 0)
            given = handshake.challenge()
            hello = handshake.answer_challenge(b"secret", given, "jobs")
            forged = frames.Welcome(0, handshake.welcome(b"guess", given, _resigned(hello, given), 0).proof)
            with pytest.raises(handshake.HandshakeFailed):
                handshake.check_welcome(b"secret", given, hello, forged)
            await _refused(OwnerAddress(None, "127.0.0.1", port, b"secret"))
            await server.close()

    run(scenario())


def _resigned(hello: frames.Hello, given: frames.Challenge) -> frames.Hello:
    proof = handshake._proof(b"guess", b"ingress", given.nonce, hello.nonce, hello.purpose, hello.peer)
    return replace(hello, proof=proof)


def test_an_owner_of_an_earlier_epoch_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            await owner.stop()
            await owner.listen(epoch=4)
            await _refused(OwnerAddress(owner.path, epoch=5))
            current = OwnerLink(OwnerAddress(owner.path, epoch=4), SystemClock())
            current.start()
            await current.wait_connected()
            await current.close()

    run(scenario())


def test_only_this_user_may_use_the_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            assert owner.path.stat().st_mode & 0o777 == 0o600

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        (1 << 31).to_bytes(4, "big"),
        (owner_server.MAX_GREETING_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\1x",
        frames.encode_frame([frames.Cancel(1, [1])]),
        frames.encode_frame([frames.Hello(99, "jobs", b"n" * 32, b"")]),
    ],
    ids=["too long", "too long for a greeting", "no frame", "no greeting", "another version"],
)
def test_a_peer_that_breaks_the_protocol_is_disconnected(tmp_path: Path, data: bytes) -> None:
    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            reader, writer = await asyncio.open_unix_connection(str(owner.path))
            writer.write(data)
            assert len(await reader.read()) < 200  # the challenge, then the end
            writer.close()
            assert not owner.server.connections

    run(scenario())


def test_connections_of_peers_that_have_not_proved_themselves_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_server, "MAX_UNPROVEN", 2)

    async def scenario() -> None:
        async with running_owner([a_worker()], tmp_path / "owner.sock") as owner:
            silent = [await asyncio.open_unix_connection(str(owner.path)) for _ in range(2)]
            for reader, _ in silent:
                await reader.readexactly(4)
            await _refused(OwnerAddress(owner.path))
            for _, writer in silent:
                writer.close()
            await async_until(lambda: not owner.server.unproven)
            member = OwnerLink(OwnerAddress(owner.path), SystemClock())
            assert await member._connect_once() is None
            assert not owner.server.unproven
            await member.close()

    run(scenario())


@pytest.mark.plain
def test_a_frame_may_arrive_in_any_pieces(tmp_path: Path) -> None:
    class Counting(link.LinkEnd):
        def __init__(self) -> None:
            super().__init__(asyncio.get_running_loop())
            self.messages: list[frames.Message] = []

        def on_message(self, message: frames.Message) -> None:
            self.messages.append(message)

    async def scenario() -> None:
        sent = [frames.Cancel(number, list(range(number))) for number in range(20)]
        data = b"".join(frames.encode_frame([message, frames.Ping()]) for message in sent)
        for size in (1, 2, 3, 5, 7, 64, len(data)):
            end = Counting()
            for at in range(0, len(data), size):
                end.data_received(data[at : at + size])
            assert end.messages == sent

    run(scenario())


def test_messages_of_one_turn_leave_in_one_frame_and_long_ones_do_not_wait(tmp_path: Path) -> None:
    class Writing:
        def __init__(self) -> None:
            self.frames: list[bytes] = []

        def set_write_buffer_limits(self, high: int) -> None:
            pass

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.frames.append(data)

    async def scenario() -> None:
        end, transport = link.LinkEnd(asyncio.get_running_loop()), Writing()
        end.connection_made(transport)  # type: ignore[arg-type]
        for number in range(10):
            end.send(frames.Cancel(number, []))
        assert transport.frames == []
        await asyncio.sleep(0)
        assert [len(frames.decode_frame(frame[4:])) for frame in transport.frames] == [10]
        end.send(frames.Cancel(1, []), frames.BATCH_BYTES)
        assert len(transport.frames) == 2
        end._stop()

    run(scenario())


def test_a_frame_that_is_nested_too_deeply_is_refused_like_any_other() -> None:
    nested = b"\x91\x95\x01\x04\xc4\x00\xc0" + b"\x91" * 3000
    for payload in (nested, b"\xc1", b""):
        with pytest.raises(frames.FrameError):
            frames.decode_frame(payload)
