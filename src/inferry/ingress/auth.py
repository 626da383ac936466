"""Who sent a request: asked once, before anything else is read of it."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidApiKey

_LOOPBACK_PREFIXES = ("127.", "::ffff:127.")


class CallerDirectory(Protocol):
    """Whoever knows the tenants and their keys."""

    @property
    def is_auth_required(self) -> bool:
        """Whether callers have to bring a key."""
        ...

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        """Who sent these headers. Raises InvalidApiKey."""
        ...


class Auth:
    """From headers to a caller.

    Without keys the gateway serves its own machine and nobody else, whatever address it listens on; `allow_remote` is
    the operator's word that somebody else keeps strangers away.
    """

    __slots__ = ("_allow_remote", "_directory", "_wall")

    def __init__(
        self, directory: CallerDirectory, *, allow_remote: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._allow_remote = allow_remote
        self._wall = wall

    def caller(self, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """Who sent the request. Raises InvalidApiKey."""
        directory = self._directory
        if not (
            directory.is_auth_required or self._allow_remote or peer.startswith(_LOOPBACK_PREFIXES) or peer == "::1"
        ):
            raise InvalidApiKey("without API keys this gateway serves only its own machine; create one there")
        get = headers.get
        return directory.caller(get(b"authorization"), get(b"x-api-key"), get(b"x-inferry-tenant"), self._wall())
