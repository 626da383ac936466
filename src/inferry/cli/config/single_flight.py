"""The `single_flight` section of the configuration: when one execution answers several calls."""

from collections.abc import Iterator

from msgspec import Struct

from inferry.dispatch.values import Sharing

MAX_LINGER_MS = 60_000


class SingleFlightConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When calls of a tenant share one execution."""

    identical: bool = True
    """Whether calls in flight with equal bodies, at temperature 0 or with the same `seed`, share one execution."""
    linger_ms: int = 0
    """How long an execution continues after its client has disconnected, unless `x-inferry-linger-ms` is sent; 0
    cancels it at once. At most one minute."""
    replay_ttl_s: float = 300.0
    """How long a response is kept after its end for `x-inferry-replay: allow`, in seconds."""
    replay_max_bytes: int = 64 * 1024 * 1024
    """Maximum memory for kept responses. The tenant with the most bytes loses its oldest response first."""
    join_history_max_bytes: int = 64 * 1024 * 1024
    """Maximum memory for the output of responses that can still be joined. Beyond it, or beyond 1 MiB of one
    response, no further call can join."""

    def sharing(self) -> Sharing:
        return Sharing(
            identical=self.identical,
            linger_s=self.linger_ms / 1000,
            replay_ttl_s=self.replay_ttl_s,
            replay_max_bytes=self.replay_max_bytes,
            join_history_max_bytes=self.join_history_max_bytes,
        )


def check_single_flight(config: SingleFlightConfig) -> Iterator[str]:
    if not 0 <= config.linger_ms <= MAX_LINGER_MS:
        yield f"single_flight.linger_ms must be between 0 and {MAX_LINGER_MS}"
    if not config.replay_ttl_s > 0:
        yield "single_flight.replay_ttl_s must be above 0"
    for name in ("replay_max_bytes", "join_history_max_bytes"):
        if getattr(config, name) < 0:
            yield f"single_flight.{name} must not be negative"
