"""Both ends of a connection prove that they know the secret, before either reads anything else.

Each side signs the nonces of both, so that neither proof can be replayed or reflected. A connection over a Unix socket
has no secret: the permissions of its directory protect it.
"""

import hmac
import os
from typing import Final

from inferry.cluster.frames import VERSION, Challenge, Hello, Purpose, Welcome

NONCE_BYTES: Final = 32
TIMEOUT_S: Final = 5.0
"""Time for the peer to prove itself, in seconds."""


class HandshakeFailed(Exception):
    """The peer has another version, or does not know the secret."""


def challenge() -> Challenge:
    return Challenge(VERSION, os.urandom(NONCE_BYTES))


def answer_challenge(secret: bytes | None, given: Challenge, purpose: Purpose, peer: str = "") -> Hello:
    """The peer's answer. Raises HandshakeFailed."""
    if given.version != VERSION:
        raise HandshakeFailed(f"the owner speaks version {given.version} of the protocol, this process {VERSION}")
    nonce = os.urandom(NONCE_BYTES)
    return Hello(VERSION, purpose, nonce, _proof(secret, b"ingress", given.nonce, nonce, purpose, peer), peer)


def welcome(secret: bytes | None, given: Challenge, hello: Hello, epoch: int) -> Welcome:
    """The owner's answer to a peer that knows the secret. Raises HandshakeFailed."""
    if hello.version != VERSION:
        raise HandshakeFailed(f"a peer speaks version {hello.version} of the protocol, this process {VERSION}")
    expected = _proof(secret, b"ingress", given.nonce, hello.nonce, hello.purpose, hello.peer)
    if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(hello.proof, expected):
        raise HandshakeFailed("a peer does not know the secret")
    return Welcome(epoch, _proof(secret, b"owner", given.nonce, hello.nonce, hello.purpose, str(epoch)))


def check_welcome(secret: bytes | None, given: Challenge, hello: Hello, answer: Welcome) -> None:
    """Raises HandshakeFailed where the owner does not know the secret."""
    expected = _proof(secret, b"owner", given.nonce, hello.nonce, hello.purpose, str(answer.epoch))
    if not hmac.compare_digest(answer.proof, expected):
        raise HandshakeFailed("the owner does not know the secret")


def _proof(secret: bytes | None, role: bytes, owner_nonce: bytes, peer_nonce: bytes, purpose: str, text: str) -> bytes:
    if secret is None:
        return b""
    # Nonces have a fixed length and the other parts no zero byte, so that no two messages read alike.
    signed = b"\0".join((role, purpose.encode(), text.encode(), owner_nonce + peer_nonce))
    return hmac.digest(secret, signed, "sha256")
