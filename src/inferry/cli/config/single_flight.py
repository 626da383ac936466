"""The `single_flight` section of the configuration: when one execution answers several calls."""

from collections.abc import Iterator

from msgspec import Struct

MAX_LINGER_MS = 60_000


class SingleFlightConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When one execution answers several calls of a tenant."""

    identical: bool = True
    """Calls in flight at temperature 0, or with the same `seed`, whose bodies are equal get one answer."""
    linger_ms: int = 0
    """How long a call that can be made again goes on after its client has left, where `x-inferry-linger-ms` does not
    say; 0 cancels it at once. At most a minute."""
    replay_ttl_s: float = 300.0
    """How long an answer is kept after its end where `x-inferry-replay: allow` asks for that."""
    replay_max_bytes: int = 64 * 1024 * 1024
    """Most memory for answers that are kept after their end. Whose answers take most loses the oldest first."""
    join_history_max_bytes: int = 64 * 1024 * 1024
    """Most memory for what has been said in answers that others may still join. Beyond it, or beyond 1 MiB of one
    answer, nobody joins any more."""


def check_single_flight(config: SingleFlightConfig) -> Iterator[str]:
    if not 0 <= config.linger_ms <= MAX_LINGER_MS:
        yield f"single_flight.linger_ms must be between 0 and {MAX_LINGER_MS}"
    if not config.replay_ttl_s > 0:
        yield "single_flight.replay_ttl_s must be above 0"
    for name in ("replay_max_bytes", "join_history_max_bytes"):
        if getattr(config, name) < 0:
            yield f"single_flight.{name} must not be negative"
