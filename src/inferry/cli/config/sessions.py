"""The `sessions` section of the configuration."""

from collections.abc import Iterator

from msgspec import Struct

from inferry.cli.config.checks import check_positive
from inferry.scheduling.sessions import SessionLimits


class SessionsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs whose KV does not fit the engines' caches."""

    pause: bool = False
    """Whether runs pause between two calls while the KV of the other active runs fills the cache of a worker, instead
    of evicting each other's prefixes. Calls of P0 and calls without a run id never pause."""
    max_pause_s: float = 50.0
    """Longest pause of a call, in seconds; half of the time to its deadline if that is less."""

    def limits(self) -> SessionLimits | None:
        return SessionLimits(self.max_pause_s) if self.pause else None


def check_sessions(sessions: SessionsConfig) -> Iterator[str]:
    """Error messages for invalid values."""
    yield from check_positive("sessions", sessions, "max_pause_s")
