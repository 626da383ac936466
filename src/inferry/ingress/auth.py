"""Authentication: a request's headers to its caller, before its body is read."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidApiKey

_LOOPBACK_PREFIXES = ("127.", "::ffff:127.")


class CallerDirectory(Protocol):
    """Tenants and their keys."""

    @property
    def is_auth_required(self) -> bool:
        """Whether requests need an API key."""
        ...

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        """The caller of a request with these headers. Raises InvalidApiKey."""
        ...


class Auth:
    """Authenticates requests.

    A gateway without API keys serves only clients on its own machine, whatever address it listens on. `allow_remote`
    lifts that where another component authenticates clients.
    """

    __slots__ = ("_allow_remote", "_directory", "_wall")

    def __init__(
        self, directory: CallerDirectory, *, allow_remote: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._allow_remote = allow_remote
        self._wall = wall

    def caller(self, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """The caller of the request. Raises InvalidApiKey."""
        directory = self._directory
        if not (
            directory.is_auth_required or self._allow_remote or peer.startswith(_LOOPBACK_PREFIXES) or peer == "::1"
        ):
            raise InvalidApiKey("a gateway without API keys serves only clients on its own machine; create a key there")
        get = headers.get
        return directory.caller(get(b"authorization"), get(b"x-api-key"), get(b"x-inferry-tenant"), self._wall())
