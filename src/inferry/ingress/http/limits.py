"""Plain values of this room. Apart from what works with them, for mypyc compiles that and cannot compile structs."""

from msgspec import Struct


class HttpLimits(Struct, frozen=True, kw_only=True):
    """What one request may ask of the HTTP surface."""

    max_body_bytes: int
    body_timeout_s: float
    heartbeat_interval_s: float
    max_unread_bytes: int
