"""Limits of the HTTP server, in a module of their own because mypyc cannot compile structs."""

from msgspec import Struct


class HttpLimits(Struct, frozen=True, kw_only=True):
    """Limits per request. `max_prompts`: prompts of one call."""

    max_body_bytes: int
    body_timeout_s: float
    heartbeat_interval_s: float
    max_unread_bytes: int
    max_prompts: int
