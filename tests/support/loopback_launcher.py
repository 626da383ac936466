"""Runs a command in a network namespace that has a loopback interface only: `unshare -rn python loopback_launcher.py`.

Arguments: the descriptor of a Unix socket, a port, the command. The launcher listens on the port inside the namespace,
sends the listening socket through the Unix socket, waits for one byte, and becomes the command. Connections of the
command are thus accepted by the process that holds the other end.
"""

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def main(descriptor: int, port: int, command: list[str]) -> None:
    with socket.socket(fileno=descriptor) as parent, socket.socket() as listener:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(listener, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
        listener.bind(("127.0.0.1", port))
        listener.listen()
        socket.send_fds(parent, [b"s"], [listener.fileno()])
        assert parent.recv(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
