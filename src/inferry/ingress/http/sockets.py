"""Operations on a connection's socket that the event loop does not offer."""

import asyncio
import socket
import struct
from typing import Final

_RESET = struct.pack("ii", 1, 0)
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_TCP_CLOSE: Final = 7
_TCP_CLOSE_WAIT: Final = 8


def reset(transport: asyncio.Transport) -> None:
    """Reset the connection: a client cannot mistake a reset for a complete response, whatever its framing."""
    if not transport.is_closing():
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def peer_has_closed(transport: asyncio.Transport) -> bool | None:
    """Whether the peer has closed its sending side, although data is still unread; None if the peer has reset.

    Linux only (TCP_INFO); False elsewhere, and for a Unix socket.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX or _TCP_INFO is None or transport.is_closing():
        return False
    state = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
    return None if state == _TCP_CLOSE else state == _TCP_CLOSE_WAIT
