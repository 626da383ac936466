"""The `sharing` section of the configuration: when one execution answers several calls."""

from collections.abc import Iterator

from msgspec import Struct

LONGEST_LINGER_MS = 60_000


class SharingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When one execution answers several calls of a tenant."""

    identical: bool = True
    """Calls in flight at temperature 0, or with the same `seed`, whose bodies are equal get one answer."""
    linger_ms: int = 0
    """How long a call that can be made again goes on after its client has left, where `x-inferry-linger-ms` does not
    say; 0 cancels it at once. At most a minute."""
    keep_s: float = 300.0
    """How long an answer is kept after its end where `x-inferry-replay: allow` asks for that."""
    keep_bytes: int = 64 * 1024 * 1024
    """Most memory for answers that are kept after their end. Whose answers take most loses the oldest first."""
    history_bytes: int = 64 * 1024 * 1024
    """Most memory for what has been said in answers that others may still join. Beyond it, or beyond 1 MiB of one
    answer, nobody joins any more."""


def impossible_sharing(config: SharingConfig) -> Iterator[str]:
    if not 0 <= config.linger_ms <= LONGEST_LINGER_MS:
        yield f"sharing.linger_ms must be between 0 and {LONGEST_LINGER_MS}"
    if not config.keep_s > 0:
        yield "sharing.keep_s must be above 0"
    for name in ("keep_bytes", "history_bytes"):
        if getattr(config, name) < 0:
            yield f"sharing.{name} must not be negative"
