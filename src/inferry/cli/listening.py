"""The sockets that a gateway listens on: its own, or inherited.

A gateway inherits them from systemd (socket activation), or from its own process image before an upgrade. Both say so
with the variables of sd_listen_fds(3). Connections that arrive while no process accepts wait in the socket's queue.
"""

import fcntl
import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

from inferry.cli.config.schema import ConfigError

FIRST_INHERITED = 3
UPGRADE = "inferry-upgrade"
"""Name of sockets that come from the process image before an upgrade."""
BACKLOG = 4096
_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class Listening(NamedTuple):
    """`is_held`: systemd holds the sockets open when this process has ended."""

    sockets: tuple[socket.socket, ...]
    is_held: bool = False


def inherited(env: MutableMapping[str, str]) -> Listening | None:
    """The sockets for this process; None where there are none. Removes the variables."""
    count, pid, names = (env.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdigit() or count == "0":
        return None
    sockets = tuple(socket.socket(fileno=FIRST_INHERITED + number) for number in range(int(count)))
    for sock in sockets:
        sock.set_inheritable(False)
        sock.setblocking(False)
    return Listening(sockets, is_held=names.partition(":")[0] != UPGRADE)


def pass_on(listening: Listening) -> dict[str, str]:
    """Place the sockets where the next process image finds them; returns its variables."""
    count = len(listening.sockets)
    # Above their new places first, which other sockets may have.
    copies = [fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_INHERITED + count) for sock in listening.sockets]
    for number, copy in enumerate(copies):
        os.dup2(copy, FIRST_INHERITED + number, inheritable=True)
    name = "held" if listening.is_held else UPGRADE
    values = (str(count), str(os.getpid()), ":".join([name] * count))
    return dict(zip(_VARIABLES, values, strict=True))


def bind(host: str, port: int, processes: int) -> Listening:
    """One socket per process on the same port. Raises ConfigError.

    Several processes listen at once: the kernel spreads connections over their sockets, and those of a process that
    ends wait for the one that replaces it.
    """
    sockets: list[socket.socket] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if processes > 1:
            # Without SO_REUSEPORT first: another gateway that shares its port among its processes would share it here.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        for _ in range(processes):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if processes > 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind((host, port))
            sock.setblocking(False)
            port = sock.getsockname()[1]
        if processes > 1:
            for sock in sockets:
                sock.listen(BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(f"cannot serve on {host} port {port}: {error.strerror or error}") from None
    return Listening(tuple(sockets))
