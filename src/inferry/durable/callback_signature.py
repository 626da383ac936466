"""Signatures of callbacks, as Standard Webhooks defines them: HMAC-SHA256 over id, timestamp and body. Pure."""

import base64
import hashlib
import hmac
from collections.abc import Sequence

_PREFIX = "whsec_"


def secret_text(key: bytes) -> str:
    """The secret as the receiver stores it."""
    return _PREFIX + base64.b64encode(key).decode()


def sign(key: bytes, id: str, timestamp: int, body: bytes) -> str:
    signed = b"%b.%d.%b" % (id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def signature_headers(keys: Sequence[bytes], id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a callback. During a rotation it has a signature of every valid secret."""
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign(key, id, timestamp, body) for key in keys),
    }
